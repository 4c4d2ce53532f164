"""Which pictures are measured by the validation loss, and which of them are kept out of training."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from ..config import ValidationConfig
from ..data.subset import Subset
from ..draws import Draws, sample_key
from .stable_loss import Picture

if TYPE_CHECKING:
    from ..data import Item

P = TypeVar("P", bound=Picture)

_FEWEST_HELD_OUT = 2


@dataclass(frozen=True)
class Holdout(Generic[P]):
    """`training` and `measured` pictures. `held_out`: they do not overlap; else the measured ones are also trained on,
    and the loss tells how well they are learnt, not how well the model does on others. `reason` says it in words."""

    training: Sequence[P]
    measured: tuple[P, ...]
    held_out: bool
    reason: str


def choose_holdout(items: Sequence[P], config: ValidationConfig, draws: Draws) -> Holdout[P]:
    """Choose the measured pictures: `split` of the set, at most `max_pictures`, keyed by seed and picture.

    Equal pictures (same content) go to the same side, so nothing leaks. A set so small that its share is under two
    pictures is not split: all of it is trained on, and `max_pictures` of it are probed.
    """
    if not config.enabled or not items:
        return Holdout(items, (), False, "The validation loss is switched off." if items else "There are no pictures.")
    ranked = _Ranked(items, draws)
    first = [place for _, _, place in heapq.nsmallest(config.max_pictures, ranked)]
    wanted = min(round(config.split * ranked.contents), config.max_pictures)
    if wanted < _FEWEST_HELD_OUT:
        measured = tuple(items[place] for place in sorted(first))
        few = "1 picture is" if len(items) == 1 else f"{len(items)} pictures are"
        why = "none is to be held out" if config.split == 0 else f"{few} too few to hold some out"
        return Holdout(items, measured, False, f"The validation loss is measured on trained pictures: {why}.")
    measured = tuple(items[place] for place in sorted(first[:wanted]))
    training = _without(items, measured)
    reason = f"{len(items) - len(training)} of {len(items)} pictures are held out of training for the validation loss."
    return Holdout(training, measured, True, reason)


def hold_out(items: Sequence[Item], config: ValidationConfig, draws: Draws) -> Holdout[Item]:
    """`choose_holdout` for the pictures of a run, which may be of several sets with shares of their own.

    Prior pictures are never measured: they say nothing about the new concept. What has the content of a held-out
    picture is trained on nowhere, neither as a prior picture nor in another set, and that is said.
    """
    shares: dict[float | None, list[int]] = {}
    for place, item in enumerate(items):
        if not item.is_prior:
            shares.setdefault(item.spec.validation_split, []).append(place)
    parts = [
        choose_holdout(Subset(items, shares[share]), config if share is None else replace(config, split=share), draws)
        for share in sorted(shares, key=lambda share: -1.0 if share is None else share)
    ]
    held = [part for part in parts if part.held_out]
    measured = tuple(item for part in held or parts for item in part.measured)[: config.max_pictures]
    if not held:
        return Holdout(items, measured, False, " ".join(part.reason for part in parts))
    training = _without(items, measured)
    own = sum(len(places) for places in shares.values())
    out = own - sum(1 for item in training if not item.is_prior)
    reason = f"{out} of {own} pictures are held out of training for the validation loss."
    prior = len(items) - len(training) - out
    if prior:
        many = "picture has the content of one of them and is" if prior == 1 else "pictures have their content and are"
        reason += f" {prior} prior {many} not trained on either."
    return Holdout(training, measured, True, reason)


def _without(items: Sequence[P], measured: Sequence[P]) -> Subset[P]:
    """The pictures whose content is none of the measured ones'."""
    held = {item.content_hash for item in measured}
    return Subset(items, [place for place, item in enumerate(items) if item.content_hash not in held])


class _Ranked:
    """(rank, key, place) of the first picture of each content; `contents` counts them while they are read."""

    def __init__(self, items: Sequence[Picture], draws: Draws) -> None:
        self.items = items
        self.draws = Draws(draws.seed)  # without the attempt: a rollback holds out the same pictures
        self.contents = 0

    def __iter__(self) -> Iterator[tuple[float, str, int]]:
        seen: set[bytes] = set()
        for place, item in enumerate(self.items):
            content = item.content_hash.encode()
            if content not in seen:
                seen.add(content)
                self.contents += 1
                key = sample_key(item.file, item.content_hash)
                rank = float(self.draws.generator(0, key, "holdout").random((), np.float32))
                yield rank, key, place
