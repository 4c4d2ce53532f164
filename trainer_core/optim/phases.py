"""What a row of good and bad steps means: the phases of the safe scaler. Pure: sees outcomes, says what follows.

| phase | leaves when |
|---|---|
| CALIBRATE | 5 applied steps in a row -> NORMAL; the 17th rejected step -> trigger |
| NORMAL | any rejected step -> ALERT |
| ALERT | 20 applied steps in a row -> NORMAL; a trigger |
| RECOVER | 200 applied steps without a trigger -> NORMAL; a trigger -> the next rung |

A trigger is a reason to act between steps (see `health/ladder.py`): too many rejected steps in a row, three at the
lowest loss scale, too many of the last hundred, or damaged weights. In CALIBRATE an fp16 run looks for its loss scale,
so rejected steps are normal there; bf16 and fp32 have nothing to look for and begin in NORMAL.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from ..config import PrecisionConfig, SafetyConfig

CALIBRATE, NORMAL, ALERT, RECOVER, STOPPED = "CALIBRATE", "NORMAL", "ALERT", "RECOVER", "STOPPED"

POISON, OVERFLOW, FLOOR, NORM_OVERFLOW, WEIGHTS = "POISON", "OVERFLOW", "FLOOR", "NORM-OVERFLOW", "WEIGHTS"
SANITIZED = "SANITIZED"
"""Applied without the tensors that overflowed: neither a good step nor a rejected one."""
EXPLODING = "EXPLODING"

_CALIBRATED_AFTER = 5
_CALIBRATION_SKIPS = 16
_FLOOR_LIMIT = 3
_CALM_AFTER = 20
_RING = 100
_COLLAPSE, _RESTORED = 64.0, 16.0


@dataclass(frozen=True)
class Trigger:
    """Why the ladder is asked. `kind`: class of the steps, or EXPLODING (from gradient health)."""

    kind: str
    reason: str
    step: int = 0


@dataclass(frozen=True)
class Change:
    """What one outcome led to: the phase entered (empty = none), a trigger, and the start or end of the scale alarm."""

    entered: str = ""
    trigger: Trigger | None = None
    scale_alarm: bool | None = None


class Phases:
    """Counters and phase of one run. `scaled`: fp16, with a loss scale to find."""

    def __init__(self, precision: PrecisionConfig, safety: SafetyConfig, *, scaled: bool) -> None:
        self._limit = precision.max_rejected_steps
        self._floor = precision.min_loss_scale
        self._safety = safety
        self.scaled = scaled
        self.phase = CALIBRATE if scaled else NORMAL
        self.rejected_in_a_row = 0
        self.applied_in_a_row = 0
        self.floor_in_a_row = 0
        self.phase_rejected = 0
        self.phase_applied = 0
        self.reference_scale: float | None = None
        self.collapsing = False
        self.ring: deque[str] = deque(maxlen=_RING)

    @property
    def rejected_share(self) -> float:
        """Share of the last steps (at most 100) that were rejected."""
        return sum(kind not in ("", SANITIZED) for kind in self.ring) / len(self.ring) if self.ring else 0.0

    @property
    def watching(self) -> bool:
        """Whether something went wrong lately: slow records are to be taken at every step."""
        return self.phase in (ALERT, RECOVER)

    def record(self, kind: str, loss_scale: float) -> Change:
        """Take in a decided step: `kind` is empty for an applied one, SANITIZED, or the class of a rejected one."""
        self.ring.append(kind)
        alarm = self._watch_scale(loss_scale)
        if kind == "":
            return Change(self._applied(loss_scale), None, alarm)
        if kind == SANITIZED:
            self.applied_in_a_row = self.rejected_in_a_row = 0
        else:
            self._rejected(kind)
        trigger = self._trigger(kind)
        entered = ALERT if self.phase == NORMAL else ""
        if entered:
            self._enter(ALERT)
        return Change(entered, trigger, alarm)

    def restart(self) -> None:
        """A rung was taken: counters begin anew in RECOVER."""
        self.rejected_in_a_row = self.applied_in_a_row = self.floor_in_a_row = 0
        self.ring.clear()
        self.collapsing = False
        self._enter(RECOVER)

    def state_dict(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "rejected_in_a_row": self.rejected_in_a_row,
            "applied_in_a_row": self.applied_in_a_row,
            "floor_in_a_row": self.floor_in_a_row,
            "phase_rejected": self.phase_rejected,
            "phase_applied": self.phase_applied,
            "reference_scale": self.reference_scale,
            "collapsing": self.collapsing,
            "ring": list(self.ring),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.state_dict():
            if name != "ring" and name in state:
                setattr(self, name, state[name])
        self.ring = deque(state.get("ring", ()), maxlen=_RING)
        if self.scaled and self.phase == NORMAL and self.reference_scale is None:
            self._enter(CALIBRATE)  # taken up from bf16 or fp32: a loss scale is to be found first
        if not self.scaled and self.phase == CALIBRATE:
            self._enter(NORMAL)
        if self.phase == STOPPED:  # somebody resumes it, with other settings: it gets its chance
            self.rejected_in_a_row = self.floor_in_a_row = 0
            self._enter(ALERT)

    def _applied(self, loss_scale: float) -> str:
        self.rejected_in_a_row = self.floor_in_a_row = 0
        self.applied_in_a_row += 1
        self.phase_applied += 1
        if self.phase == CALIBRATE and self.applied_in_a_row >= _CALIBRATED_AFTER:
            self.reference_scale = loss_scale
            self.ring.clear()
            return self._enter(NORMAL)
        if self.phase == ALERT and self.applied_in_a_row >= _CALM_AFTER:
            return self._enter(NORMAL)
        if self.phase == RECOVER and self.phase_applied >= self._safety.recovered_after:
            self.reference_scale = loss_scale
            return self._enter(NORMAL)
        return ""

    def _rejected(self, kind: str) -> None:
        self.applied_in_a_row = 0
        self.rejected_in_a_row += 1
        self.phase_rejected += 1
        self.floor_in_a_row = self.floor_in_a_row + 1 if kind == FLOOR else 0

    def _trigger(self, kind: str) -> Trigger | None:
        if kind == WEIGHTS:
            return Trigger(kind, "trained weights or optimizer state hold NaN or infinity")
        if self.phase == CALIBRATE:
            if self.phase_rejected > _CALIBRATION_SKIPS:
                return Trigger(kind, f"no loss scale was found in {self.phase_rejected} rejected steps")
            return None
        if self.rejected_in_a_row >= self._limit:
            return Trigger(kind, f"{self._limit} rejected steps in a row")
        if self.floor_in_a_row >= _FLOOR_LIMIT:
            where = f" at the lowest loss scale ({self._floor:g})" if self.scaled else ""
            return Trigger(kind, f"{_FLOOR_LIMIT} steps in a row with gradients that are not finite{where}")
        rejected = round(self.rejected_share * len(self.ring))
        if rejected > self._safety.rejected_share * _RING:
            return Trigger(kind, f"{rejected} of the last {len(self.ring)} steps were rejected")
        return None

    def _watch_scale(self, loss_scale: float) -> bool | None:
        """True when the scale collapsed (64 times below the healthy one), False when it came back, None otherwise."""
        if not self.scaled or self.reference_scale is None:
            return None
        if not self.collapsing and loss_scale <= self.reference_scale / _COLLAPSE:
            self.collapsing = True
            return True
        if self.collapsing and loss_scale >= self.reference_scale / _RESTORED:
            self.collapsing = False
            return False
        return None

    def _enter(self, phase: str) -> str:
        self.phase = phase
        self.phase_rejected = self.phase_applied = 0
        return phase
