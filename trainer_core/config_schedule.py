"""The notation of a piecewise constant schedule: `factor:step,factor:step,...,factor` (diffusers' `step_rules`)."""

from __future__ import annotations

import functools
import math

from .config_fields import BadValue

_FIX = "Write factor:until step, and the last factor alone, such as 1:500,0.1:900,0.01."


@functools.lru_cache(maxsize=16)
def parse_step_rules(text: str) -> tuple[tuple[tuple[float, float], ...], float]:
    """((until step, factor) in rising order, factor from there on). A step below 1 is a share of the run.

    Raises BadValue with what is wrong and how it is written.
    """
    *rules, last = [part.strip() for part in text.split(",")]
    found: dict[float, float] = {}
    for rule in rules:
        factor, mark, until = rule.partition(":")
        if not mark:
            raise BadValue(f"{rule!r} has no step", _FIX)
        step = _number(until, rule)
        if step <= 0 or (step >= 1 and not step.is_integer()):
            raise BadValue(f"{until.strip()!r} in {rule!r} is neither a whole step nor a share below 1", _FIX)
        if step in found:
            raise BadValue(f"step {until.strip()} has two factors", _FIX)
        found[step] = _number(factor, rule)
    if ":" in last:
        raise BadValue(f"the last factor has a step: {last!r}", _FIX)
    return tuple(sorted(found.items())), _number(last, text)


def _number(text: str, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise BadValue(f"{text.strip()!r} in {where!r} is no number from 0 on", _FIX)
    return number
