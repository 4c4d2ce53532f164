"""Which checkpoints are kept. Pure: sees the list, says the names."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .manifest import SavedCheckpoint


def superfluous(
    newest_first: Sequence[SavedCheckpoint],
    *,
    keep_last: int,
    protect: Collection[str | int] = (),
    in_use: str | None = None,
    milestone_every: int = 0,
) -> list[str]:
    """Names that may be deleted, oldest first.

    Kept: the `keep_last` newest (at least one), the newest verified one, the one in use, those named by `protect` (by
    name or step), and with `milestone_every` the first one at or after every multiple of that many steps.
    Damaged ones are no candidates: a person should look at them.
    """
    good = [saved for saved in newest_first if not saved.problem]
    keep = {saved.name for saved in good[: max(1, keep_last)]}
    keep |= {saved.name for saved in [saved for saved in good if saved.verified][:1]}
    keep |= {saved.name for saved in good if saved.name == in_use or saved.name in protect or saved.step in protect}
    keep |= _milestones(good, milestone_every)
    return [saved.name for saved in reversed(good) if saved.name not in keep]


def _milestones(good: Sequence[SavedCheckpoint], every: int) -> set[str]:
    if every <= 0:
        return set()
    first: dict[int, SavedCheckpoint] = {}
    for saved in good:  # newest first: of two saves of one step the newer stays
        number = saved.step // every
        if number > 0 and (number not in first or saved.step < first[number].step):
            first[number] = saved
    return {saved.name for saved in first.values()}
