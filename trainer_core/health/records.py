"""What is known of one step: the fast record of every step, and the slow record of some."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

FLUSH_EXPONENT = -24
"""fp16 numbers below 2^-24 become 0."""
SUBNORMAL_EXPONENT = -14
"""fp16 numbers below 2^-14 lose digits."""
FP16_MAX = 65504.0


@dataclass(frozen=True)
class FastRecord:
    """One decided step, from what the step's single reading brought. Norms are of unscaled gradients before clipping.

    `outcome`: "applied" or the class of the rejected step. `norms`: gradient norm by parameter name; a name that is
    missing had no gradient. `clip`: what the gradients were multiplied by. `zero_rate`: tensors whose learning rate is
    0 where the schedule says it is not; `not_trainable`: tensors with requires_grad off. `captions_dropped`: every
    caption of the step was empty.
    """

    step: int
    applied: int
    outcome: str
    loss: float
    losses: tuple[float, ...]
    grad_norm: float
    loss_scale: float
    clip: float
    norms: Mapping[str, float]
    zero_rate: frozenset[str] = frozenset()
    not_trainable: frozenset[str] = frozenset()
    captions_dropped: bool = False
    calibrating: bool = False
    time: float = 0.0

    @property
    def was_applied(self) -> bool:
        return self.outcome == "applied"


@dataclass(frozen=True)
class TensorSample:
    """One trained tensor in a slow record. Norms are estimates from a fixed sample of at most 4096 elements.

    `zero`: share of gradient elements that are exactly 0; `changed`: share of elements that the update changed; `grad`,
    `weight`, `update`: norms (gradient unscaled, before clipping); `amax`: largest absolute gradient; `gain`: -g .
    update, what the update should gain to first order. `rms` and
    `consistency`: RMS of g / sqrt(v) (Wortsman et al. 2023) and sum m^2 / sum v, bias-corrected, NaN where the
    optimizer keeps no such moments; `spread`: participation ratio (sum u^2)^2 / (n sum u^4) of the update; `age`:
    updates that the optimizer has counted for it, NaN when it keeps no state.
    """

    has_gradient: bool
    in_optimizer: bool
    dtype: str = "float32"
    rate: float = 0.0
    zero: float = math.nan
    changed: float = math.nan
    grad: float = 0.0
    weight: float = 0.0
    update: float = 0.0
    amax: float = 0.0
    gain: float = 0.0
    rms: float = math.nan
    consistency: float = math.nan
    spread: float = math.nan
    age: float = math.nan


@dataclass(frozen=True)
class SlowRecord:
    """A full measurement around one update. `tensors` by parameter name.

    `quotients`: q = log10(||dB A|| / ||B dA||) by module. `exponents`: how many sampled gradient elements have which
    binary exponent (floor(log2 |g|)), by group, from `records.LOWEST_EXPONENT` upwards, zeros apart in `zeros`.
    """

    step: int
    loss: float
    loss_scale: float
    tensors: Mapping[str, TensorSample]
    quotients: Mapping[str, float] = field(default_factory=dict)
    exponents: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    zeros: Mapping[str, int] = field(default_factory=dict)
    fire_counts: Mapping[str, int] = field(default_factory=dict)


LOWEST_EXPONENT = -80
HIGHEST_EXPONENT = 40
