"""Whether the state of a run is one to go back to. Written into every checkpoint under "good"."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optim.phases import EXPLODING
from ..optim.reading import weights_finite

if TYPE_CHECKING:
    from ..trainer import Trainer

_WORSE_THAN_BEST = 1.05


def goodness(trainer: Trainer, validation: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whether the present state is good: `{good, why}`. Reads the device.

    All tensors finite, the last step applied, no open verdict above a warning, and a validation loss at most 5 % above
    the best one.
    """
    why: list[str] = []
    parts = trainer.parts
    if parts.precision.phases.rejected_in_a_row:
        why.append("the last step was rejected")
    if alarms := _alarms(trainer):
        why.append(f"open: {', '.join(sorted(alarms))}")
    losses = [float(entry["mean"]) for entry in validation]
    if losses and losses[-1] > _WORSE_THAN_BEST * min(losses):
        why.append(f"validation loss {losses[-1]:.4g}, {min(losses):.4g} at best")
    if not weights_finite(parts.optimizer):
        why.append("weights or optimizer state are not finite")
    return {"good": not why, "why": why}


def _alarms(trainer: Trainer) -> set[str]:
    """Open verdicts above a warning: gradient health's errors, and that training is exploding."""
    found = set(trainer.guard.alarms)
    if trainer.health is not None:
        held = [entry.finding for entry in trainer.health.alerts.open.values()]
        found |= {finding.kind for finding in held if finding.severity == "error" or finding.kind == EXPLODING}
    return found


def says_good(scalars: dict[str, Any]) -> bool:
    """What the scalars of a checkpoint say of themselves; those of earlier versions say nothing."""
    return bool(scalars.get("good", {}).get("good", False))


def is_good(state_file: Path) -> bool:
    """Whether the checkpoint of this state file says that it was good when it was taken."""
    try:
        return says_good(json.loads(state_file.read_text(encoding="utf-8"))["scalars"])
    except (OSError, ValueError, KeyError):
        return False
