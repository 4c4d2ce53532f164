"""Which checkpoints stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_core.checkpoints.manifest import SavedCheckpoint, folder_name
from trainer_core.checkpoints.retention import superfluous


def saved(step: int, generation: int, *, verified: bool = False, problem: str = "") -> SavedCheckpoint:
    return SavedCheckpoint(Path(folder_name(step)), step, generation, 1, 0.0, verified, problem)


def kept(steps: list[SavedCheckpoint], **rule: object) -> list[int]:
    gone = superfluous(steps, **{"keep_last": 1, **rule})  # type: ignore[arg-type]
    return [entry.step for entry in steps if entry.name not in gone]


NINE = [saved(step, step) for step in range(9, 0, -1)]


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        ({"keep_last": 3}, [9, 8, 7]),
        ({"keep_last": 0}, [9]),
        ({"keep_last": 1, "protect": (4, "step-00000002")}, [9, 4, 2]),
        ({"keep_last": 1, "in_use": "step-00000005"}, [9, 5]),
        ({"keep_last": 1, "milestone_every": 3}, [9, 6, 3]),
        ({"keep_last": 1, "milestone_every": 50}, [9]),
        ({"keep_last": 99}, [9, 8, 7, 6, 5, 4, 3, 2, 1]),
    ],
)
def test_rules(rule: dict[str, object], left: list[int]) -> None:
    assert kept(NINE, **rule) == left


def test_milestones_need_not_be_hit_exactly() -> None:
    """With a cadence in minutes the first one at or after the multiple counts."""
    steps = [saved(step, step) for step in (510, 430, 260, 205, 130, 40)]
    assert kept(steps, milestone_every=100) == [510, 430, 205, 130]


def test_the_newest_verified_one_stays_and_damaged_ones_are_left_alone() -> None:
    steps = [saved(9, 9), saved(8, 8, problem="cut"), saved(7, 7, verified=True), saved(6, 6, verified=True)]
    assert kept(steps) == [9, 8, 7]


def test_deleted_oldest_first() -> None:
    assert superfluous(NINE, keep_last=7) == ["step-00000001", "step-00000002"]


def test_after_going_back_the_abandoned_future_goes_first() -> None:
    steps = [saved(4, 7), saved(3, 6), saved(6, 5), saved(2, 2)]
    assert kept(steps, keep_last=2, in_use="step-00000002") == [4, 3, 2]
