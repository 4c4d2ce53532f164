"""Learning-rate schedules as pure functions of applied steps.

Nothing is stored between steps, so a resumed or extended run cannot disagree with the plan, and the list of rates does
not depend on accumulation. Past the planned end a schedule stays at its last value.
"""

from __future__ import annotations

import math

from ..config import ScheduleConfig


def warmup_length(config: ScheduleConfig, total: int) -> int:
    """Applied steps of warm-up; a value below 1 is a share of `total`."""
    return int(config.warmup_steps * total) if config.warmup_steps < 1 else int(config.warmup_steps)


def learning_rate_factor(config: ScheduleConfig, applied: int, total: int) -> float:
    """Factor on every learning rate for the update that follows `applied` applied steps, of `total` planned ones.

    linear, cosine and cosine_with_restarts equal transformers' schedules of these names up to `total`; those fall to 0
    (or climb again) past it, these stay at the value they end with.
    """
    warmup = warmup_length(config, total)
    if applied < warmup:
        return applied / max(1, warmup)
    done = min(1.0, (applied - warmup) / max(1, total - warmup))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * _decay(config, done)


def _decay(config: ScheduleConfig, done: float) -> float:
    if config.type == "constant":
        return 1.0
    if config.type == "linear":
        return 1.0 - done
    if config.type == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    if done >= 1.0:
        return 0.0
    return 0.5 * (1.0 + math.cos(math.pi * ((config.cycles * done) % 1.0)))
