"""A step whose gradient norm is far above the usual is computed once more before it is applied.

With the same draws a healthy device gives the same norm again: then data or learning rate are the cause, and gradient
health goes on from there. A norm that is back to the usual was a transient fault; the second computation is taken, so
nothing wrong reaches the weights. (Recomputing the last step: arXiv 2604.00726.)
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING

from ..events import Verdict
from . import HARDWARE

if TYPE_CHECKING:
    from ..optim.precision import StepVerdict
    from ..optim.reading import StepReading
    from ..trainer import Trainer

_HISTORY, _ENOUGH = 50, 20
_LEAST_SPREAD = 0.05
_EQUAL_DECADES = 0.05
"""Norms within 12 % of each other are the same: kernels that do not repeat themselves differ by far less."""
_QUIET = 10
"""Steps after a spike that came again: one cause makes many."""


class SpikeRecheck:
    """Decides which steps are computed again. A spike is what `health.spike_decades` and `health.spike_z` say."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._on = trainer.config.hardware.recheck_spikes
        self._health = trainer.config.health
        self._levels: deque[float] = deque(maxlen=_HISTORY)
        self._before: float | None = None
        self._quiet_until = -1

    def wanted(self, reading: StepReading, verdict: StepVerdict) -> bool:
        """Whether the step is to be computed again before it is decided. The second time: tells what came of it."""
        if not self._on or verdict.action != "apply" or reading.grad_norm <= 0:
            self._before = None
            return False
        level, step = math.log10(reading.grad_norm), self._trainer.state.step + 1
        before, self._before = self._before, None
        if before is None:
            if step <= self._quiet_until or not self._spikes(level):
                self._levels.append(level)
                return False
            self._before = level
            return True
        self._levels.append(level)
        if abs(before - level) <= _EQUAL_DECADES:
            self._quiet_until = step + _QUIET
        else:
            self._tell(step, before, level)
        return False

    def stopped(self) -> None:
        """The step was dropped half-way."""
        self._before = None

    def _spikes(self, level: float) -> bool:
        if len(self._levels) < _ENOUGH:
            return False
        middle = statistics.median(self._levels)
        spread = max(1.4826 * statistics.median(abs(value - middle) for value in self._levels), _LEAST_SPREAD)
        above = level - middle
        return above > self._health.spike_decades and above / spread > self._health.spike_z

    def _tell(self, step: int, before: float, level: float) -> None:
        sentence = (
            f"The gradient norm was {10**before:.3g}, far above the usual, and {10**level:.3g} when the step was "
            "computed again: a transient fault of the device is likely. The second computation was used. Watch the "
            "device's temperature and memory errors."
        )
        self._trainer.bus.emit(Verdict(step=step, kind=HARDWARE, sentence=sentence, severity="warning"))
