"""Learning-rate schedules as pure functions of applied steps.

Nothing is stored between steps, so a resumed or extended run cannot disagree with the plan, and the list of rates does
not depend on accumulation or the number of processes. Past the planned end a schedule stays at its last value.
"""

from __future__ import annotations

import math

from ..config import ScheduleConfig
from ..config_schedule import parse_step_rules

_TIMESCALE_WITHOUT_WARMUP = 10_000


def steps_of(value: float, total: int) -> int:
    """`value` in steps; below 1 it is a share of `total`, rounded down."""
    return int(value * total) if value < 1 else int(value)


def warmup_length(config: ScheduleConfig, total: int) -> int:
    """Applied steps of warm-up; a value below 1 is a share of `total`."""
    return steps_of(config.warmup_steps, total)


def schedule_problem(config: ScheduleConfig, total: int) -> str | None:
    """Why the schedule does not fit a run of `total` steps, with both numbers; None when it does."""
    warmup = warmup_length(config, total)
    if warmup >= total > 1:
        return f"schedule.warmup_steps is {warmup}, the run has {total} steps: all of them would be warm-up"
    decay = steps_of(config.decay_steps, total) if config.type == "warmup_stable_decay" else 0
    if warmup + decay > total:
        return f"warm-up ({warmup}) and decay ({decay}) are longer than the run ({total} steps)"
    return None


def learning_rate_factor(config: ScheduleConfig, applied: int, total: int, base_rate: float = 1.0) -> float:
    """Factor on every learning rate for the update that follows `applied` applied steps, of `total` planned ones.

    Equal to transformers' and diffusers' schedules of these names up to `total` (which sd-scripts uses); those fall to
    0 or climb again past it, these stay at the value they end with. `min_lr_ratio` holds for every schedule.
    `base_rate`: the config's learning rate, for `end_lr`, which is a rate and not a share of one.
    """
    warmup, low = warmup_length(config, total), config.min_lr_ratio
    if config.type == "piecewise_constant":
        share = min(1.0, applied / warmup) if warmup else 1.0
        return max(low, _piece(config, applied, total)) * share
    if config.type == "polynomial" and config.end_lr is not None and base_rate > 0:
        low = config.end_lr / base_rate
    if applied < warmup:
        share = applied / max(1, warmup)
        return low + (1.0 - low) * share if config.type == "warmup_stable_decay" else share
    if config.type == "inverse_sqrt":
        return low + (1.0 - low) * _inverse_sqrt(config, min(applied, total), warmup)
    if config.type == "warmup_stable_decay":
        decay = steps_of(config.decay_steps, total)
        done = min(1.0, max(0.0, (applied - (total - decay)) / max(1, decay)))
        return low + (1.0 - low) * _half_waves(config.cycles, done)
    done = min(1.0, (applied - warmup) / max(1, total - warmup))
    return low + (1.0 - low) * _decay(config, done)


def _decay(config: ScheduleConfig, done: float) -> float:
    """Height between 1 and 0 after the share `done` of the steps after warm-up."""
    if config.type in ("constant", "constant_with_warmup"):
        return 1.0
    if config.type == "linear":
        return 1.0 - done
    if config.type == "polynomial":
        return (1.0 - done) ** config.power
    if config.type == "cosine":
        return _half_waves(1, done)
    if config.type == "cosine_with_min_lr":
        return _half_waves(config.cycles, done)
    if config.type == "cosine_with_restarts":
        return 0.0 if done >= 1.0 else _half_waves(1, (config.cycles * done) % 1.0)
    raise ValueError(f"no schedule is called {config.type!r}")


def _piece(config: ScheduleConfig, applied: int, total: int) -> float:
    rules, last = parse_step_rules(config.step_rules)
    return next((factor for until, factor in rules if applied < steps_of(until, total)), last)


def _half_waves(count: int, done: float) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * count * done)))


def _inverse_sqrt(config: ScheduleConfig, applied: int, warmup: int) -> float:
    """1 / sqrt of the steps since warm-up in units of the timescale (Vaswani et al. 2017, section 5.3, as a shape)."""
    timescale = config.timescale or warmup or _TIMESCALE_WITHOUT_WARMUP
    return 1.0 / math.sqrt((applied + timescale - warmup) / timescale)
