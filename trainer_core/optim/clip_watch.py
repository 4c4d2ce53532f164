"""Whether clipping does what it is there for: saturation, and a clip rate that drifts.

Drift is a two-sided CUSUM (Page 1954) on log G against its mean and spread in steps 50 to 150. A CUSUM on the
clipped-or-not bit with k = 0.5, h = 8, as it is often written down, raises false alarms in 23 to 90 % of stationary
runs of 2,000 steps (lognormal norms, spread 0.3 decades, depending on where the threshold lies); on log G with k =
0.8, h = 10 it is at most 0.4 %, and a threefold norm is seen within 30 steps in 98 %.
(tests/core/optim/test_clip_watch.py)
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

_FIRST, _LAST = 50, 150
_SLACK, _ALARM = 0.8, 10.0
_LEAST_SPREAD = 0.05
_MOST_Z = 4.0
_RATE_DECAY = 0.98
_RATE_CHANGE = 0.1
_WINDOW = 50
_SATURATED_SHARE, _SATURATED_FACTOR = 0.9, 0.1
_CLEAR_AFTER = 100


@dataclass(frozen=True)
class ClipNews:
    """`kind`: CLIP-SATURATED, CLIP-DRIFT; `severity`: warning, info, or ok when it is over."""

    kind: str
    severity: str
    sentence: str


class ClipWatch:
    """Watches the applied steps of one run."""

    def __init__(self) -> None:
        self._count = 0
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._rate: float | None = None
        self._base: list[float] = []
        self._base_clipped = 0
        self._up = 0.0
        self._down = 0.0
        self._rising: list[float] = [0, 0]
        self._falling: list[float] = [0, 0]
        self._mean = 0.0
        self._spread = 0.0
        self._saturated = False
        self._clean = 0

    @property
    def rate(self) -> float:
        """Share of steps that were clipped, lately."""
        return self._rate or 0.0

    def see(self, norm: float, factor: float) -> list[ClipNews]:
        """Take in an applied step: its norm before clipping, and the factor it was multiplied by."""
        clipped = float(factor < 1.0)
        self._rate = clipped if self._rate is None else _RATE_DECAY * self._rate + (1 - _RATE_DECAY) * clipped
        self._recent.append(factor)
        return [*self._saturation(), *self._drift(norm, clipped)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "count": self._count,
            "recent": list(self._recent),
            "rate": self._rate,
            "base": list(self._base),
            "base_clipped": self._base_clipped,
            "up": self._up,
            "down": self._down,
            "rising": list(self._rising),
            "falling": list(self._falling),
            "mean": self._mean,
            "spread": self._spread,
            "saturated": self._saturated,
            "clean": self._clean,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, f"_{name}", deque(value, maxlen=_WINDOW) if name == "recent" else value)

    def _saturation(self) -> list[ClipNews]:
        full = len(self._recent) == _WINDOW
        share = sum(factor < 1.0 for factor in self._recent) / _WINDOW
        median = statistics.median(self._recent) if full and share >= _SATURATED_SHARE else 1.0
        if median < _SATURATED_FACTOR:
            self._clean = 0
            if self._saturated:
                return []
            self._saturated = True
            text = (
                f"{100 * share:.0f} % of the last {_WINDOW} steps were clipped, by a factor of {median:.2g} in the "
                "middle: the size of a gradient no longer counts, only its direction. Under Adam this is mostly "
                "harmless, under SGD or Prodigy it slows learning. Raise gradient.max_norm, or lower the learning rate "
                "if norms grew."
            )
            return [ClipNews("CLIP-SATURATED", "warning", text)]
        self._clean += 1
        if self._saturated and self._clean >= _CLEAR_AFTER:
            self._saturated = False
            return [ClipNews("CLIP-SATURATED", "ok", "Clipping is no longer saturated.")]
        return []

    def _drift(self, norm: float, clipped: float) -> list[ClipNews]:
        self._count += 1
        if norm <= 0 or not math.isfinite(norm):
            return []
        if self._count <= _LAST:
            if self._count > _FIRST:
                self._base.append(math.log10(norm))
                self._base_clipped += int(clipped)
            return []
        if len(self._base) < 2:
            return []
        if self._spread == 0.0:
            self._mean = statistics.fmean(self._base)
            self._spread = max(statistics.pstdev(self._base), _LEAST_SPREAD)
        z = max(-_MOST_Z, min(_MOST_Z, (math.log10(norm) - self._mean) / self._spread))
        self._up = max(0.0, self._up + z - _SLACK)
        self._down = max(0.0, self._down - z - _SLACK)
        # Steps since each sum was last 0, and how many of them were clipped: where the change began.
        self._rising = [self._rising[0] + 1, self._rising[1] + clipped] if self._up > 0 else [0, 0]
        self._falling = [self._falling[0] + 1, self._falling[1] + clipped] if self._down > 0 else [0, 0]
        if max(self._up, self._down) <= _ALARM:
            return []
        before, rose = self._base_clipped / len(self._base), self._up > self._down
        steps, cut = self._rising if rose else self._falling
        now = cut / steps
        self._count, self._base, self._base_clipped = _FIRST, [], 0
        self._up = self._down = self._spread = 0.0
        self._rising = self._falling = [0, 0]
        if abs(now - before) < _RATE_CHANGE:
            return []  # the norm moved where clipping does not act
        text = (
            f"Gradient norms {'rose' if rose else 'fell'}: {100 * before:.0f} % of the steps were clipped before, "
            f"{100 * now:.0f} % lately. Causes: learning rate, data, or number format."
        )
        return [ClipNews("CLIP-DRIFT", "info", text)]
