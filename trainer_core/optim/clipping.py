"""How much of a gradient is applied: decided on the host from the norms that the step's one reading brought.

fixed: Pascanu et al. 2013. zclip: Kumar et al. 2025 (ZClip), here on log G and with the clipped value fed back, so
that a spike does not raise the threshold for the next one. percentile: Seetharaman et al. 2020 (AutoClip); at 10 it
clips nine steps of ten by design. module: Brock et al. 2021 (AGC), by tensor. A tensor that has not grown is exempt
there: lora_up starts at 0, and a share of 0 would clip it away for ever.
In every mode `max_norm`, when above 0, stays the ceiling of the global norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..config import GradientConfig
from .reading import StepReading, gradients, total_norm

_GROWN = 1e-3
"""Weight norm from which AGC applies to a tensor."""
_LEAST_SPREAD = 0.01
"""Standard deviation of log G is taken as at least this (1 per cent of the norm)."""
_MOST_NORMS = 4096
"""Norms remembered for the percentile; older ones are forgotten."""


@dataclass(frozen=True)
class Clip:
    """A decision: `factor` on every gradient, or `factors` of single tensors (by place in the reading) and then
    `factor`.

    `norm`: the global norm that is left.
    """

    factor: float = 1.0
    factors: tuple[float, ...] = ()
    norm: float = 0.0

    @property
    def acted(self) -> bool:
        return self.factor < 1.0 or any(factor < 1.0 for factor in self.factors)


class Clipping:
    """Clipping of one run and what it remembers. Fed with applied steps only."""

    def __init__(self, config: GradientConfig) -> None:
        self.config = config
        self._mean = 0.0
        self._variance = 0.0
        self._seen: list[float] = []
        self._count = 0

    @property
    def needs_weights(self) -> bool:
        """Whether the reading must bring the weights' norms."""
        return self.config.clip == "module"

    def decide(self, reading: StepReading) -> Clip:
        """The clip of a step with finite gradients. Changes nothing; `learn` does."""
        factors: tuple[float, ...] = ()
        norm = reading.grad_norm
        if self.config.clip == "module":
            factors = self._by_module(reading)
            norm = total_norm([n * f for n, f in zip(reading.norms, factors, strict=True)])
        limits = [self.config.max_norm] if self.config.max_norm > 0 else []
        adaptive = self._adaptive_limit(reading.grad_norm)
        if adaptive is not None:
            limits.append(adaptive)
        limit = min(limits, default=math.inf)
        factor = limit / norm if norm > limit else 1.0
        return Clip(factor, factors if any(f < 1.0 for f in factors) else (), norm * factor)

    def apply(self, optimizer: torch.optim.Optimizer, clip: Clip) -> None:
        """Scale the gradients. Reads nothing."""
        if not clip.acted:
            return
        found = gradients(optimizer)
        if clip.factors:
            for gradient, factor in zip(found, clip.factors, strict=True):
                if factor * clip.factor < 1.0:
                    gradient.mul_(factor * clip.factor)
        else:
            torch._foreach_mul_(found, clip.factor)

    def learn(self, reading: StepReading, clip: Clip) -> None:
        """Take in an applied step."""
        if self.config.clip == "percentile":
            # AutoClip ranks the norms as they came, not as they were cut: else the threshold would only fall.
            self._seen.append(reading.grad_norm)
            del self._seen[:-_MOST_NORMS]
        elif self.config.clip == "zclip" and clip.norm > 0:
            self._take(math.log(clip.norm))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean, "variance": self._variance, "count": self._count, "seen": list(self._seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mean, self._variance = float(state["mean"]), float(state["variance"])
        self._count, self._seen = int(state["count"]), [float(value) for value in state["seen"]]

    def _adaptive_limit(self, norm: float) -> float | None:
        if self.config.clip == "percentile":
            return self._percentile()
        if self.config.clip != "zclip" or self._count < self.config.zclip_warmup or norm <= 0:
            return None
        spread = max(math.sqrt(self._variance), _LEAST_SPREAD)
        most = self.config.zclip_z
        z = (math.log(norm) - self._mean) / spread
        # ZClip's reciprocal rule: the further out, the nearer to the mean the step is brought.
        return math.exp(self._mean + most * spread * most / z) if z > most else None

    def _percentile(self) -> float | None:
        if not self._seen:
            return None
        ordered = sorted(self._seen)
        place = (len(ordered) - 1) * self.config.clip_percentile / 100
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    def _by_module(self, reading: StepReading) -> tuple[float, ...]:
        share = self.config.module_clip
        return tuple(
            1.0 if weight <= _GROWN or norm <= share * weight else share * weight / norm
            for norm, weight in zip(reading.norms, reading.weight_norms, strict=True)
        )

    def _take(self, value: float) -> None:
        """Plain mean and variance over the warm-up, exponential ones after it."""
        self._count += 1
        warm = self._count <= self.config.zclip_warmup
        weight = 1.0 / self._count if warm else 1.0 - self.config.zclip_decay
        difference = value - self._mean
        self._mean += weight * difference
        # West 1979, for a weighted running variance.
        self._variance = (1.0 - weight) * (self._variance + weight * difference * difference)
