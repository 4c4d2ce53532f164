"""A finding: what a rule sees in one record; and the counting that turns sightings into findings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config_health import VERDICTS, HealthConfig


@dataclass(frozen=True)
class Finding:
    """`kind` is a verdict, `subject` a module group ("" = the whole run), `tensors` the parameter names it is about.

    `cause` picks the sentence; `numbers` are what it quotes.
    """

    kind: str
    subject: str = ""
    tensors: tuple[str, ...] = ()
    cause: str = ""
    severity: str = "warning"
    numbers: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def rank(self) -> int:
        """Place in the order of precedence."""
        return VERDICTS.index(self.kind)


class Streaks:
    """How often in a row each name was sighted, by rule."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}

    def see(self, rule: str, sighted: Iterable[str], needed: int) -> tuple[str, ...]:
        """Take in one look: names that are not sighted start anew. Returns those sighted `needed` times in a row."""
        before = self._counts.get(rule, {})
        counts = {name: before.get(name, 0) + 1 for name in sighted}
        self._counts[rule] = counts
        return tuple(name for name, count in counts.items() if count >= needed)

    def count(self, rule: str, name: str = "") -> int:
        return self._counts.get(rule, {}).get(name, 0)

    def suspects(self, rule: str) -> set[str]:
        """Names with a streak of at least one."""
        return set(self._counts.get(rule, ()))

    def state_dict(self) -> dict[str, Any]:
        return {rule: dict(counts) for rule, counts in self._counts.items() if counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counts = {rule: {str(n): int(c) for n, c in counts.items()} for rule, counts in state.items()}


class Thresholds:
    """The document's thresholds, made stricter by what the run's own first steps looked like.

    A learnt value is a percentile of the beginning times a margin, never above the config's value and never below half
    of it: a quiet run notices smaller faults, a noisy one is judged by the fixed values.
    """

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._seen: dict[str, list[float]] = {"spike": [], "rms": [], "imbalance": []}
        self.spike = config.spike_decades
        self.rms = config.rms_alarm
        self.imbalance = config.imbalance

    def learn(self, step: int, what: str, value: float) -> None:
        """Take in a value of the beginning."""
        if 0 < step <= self._config.learn_steps and math.isfinite(value):
            self._seen[what].append(abs(value))

    def settle(self, step: int) -> None:
        """After the beginning: take the percentiles once."""
        if self._config.learn_steps == 0 or step <= self._config.learn_steps or not self._seen:
            return
        config, seen = self._config, self._seen
        self.spike = _bounded(seen["spike"], 2.0, config.spike_decades)
        self.rms = _bounded(seen["rms"], 3.0, config.rms_alarm)
        self.imbalance = _bounded(seen["imbalance"], 2.0, config.imbalance)
        self._seen = {}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen, "spike": self.spike, "rms": self.rms, "imbalance": self.imbalance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = {name: [float(v) for v in values] for name, values in state["seen"].items()}
        self.spike, self.rms = float(state["spike"]), float(state["rms"])
        self.imbalance = float(state["imbalance"])


_PERCENTILE = 99.0
_FEWEST = 8


def _bounded(values: Sequence[float], margin: float, limit: float) -> float:
    if len(values) < _FEWEST:
        return limit
    return min(limit, max(0.5 * limit, margin * percentile(values, _PERCENTILE)))


def percentile(values: Sequence[float], share: float) -> float:
    """Percentile by linear interpolation; `share` in per cent."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100.0
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
