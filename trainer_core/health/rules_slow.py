"""Rules that look at the full measurements. Their horizons count measurements, not steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from ..config_health import HealthConfig
from .findings import Finding, Streaks, Thresholds, percentile
from .groups import Tensor, partner_of
from .records import FastRecord, SlowRecord, TensorSample

VANISHING_SAMPLES = 3
STALE_SAMPLES = 3
IMBALANCED_SAMPLES = 2
_IMBALANCE_FROM = 50
_FEWEST_STALE = 2
_IMBALANCED_SHARE = 0.25
_HELD_BACK = 0.3
_QUIET_RATE = 1e-3
_ONE_COORDINATE = 0.01
_LEAP, _LEAP_TIMES, _LEAPS_KEPT = 0.05, 8.0, 20


class SlowRules:
    """STATE-LOST, DTYPE-CHANGED, EXPLODING by RMS, VANISHING, STALE, IMBALANCED."""

    def __init__(
        self, tensors: Mapping[str, Tensor], config: HealthConfig, streaks: Streaks, thresholds: Thresholds
    ) -> None:
        self._tensors = tensors
        self._config = config
        self._streaks = streaks
        self._thresholds = thresholds
        self._age = 0.0
        self._peak_rate = 0.0
        self._leaps: list[float] = []
        self._eps_told = False
        self._vanishing_of = [t.name for t in tensors.values() if t.part == "unet"] or list(tensors)

    def look(
        self, record: SlowRecord, fast: FastRecord, expected_frozen: frozenset[str], explained: set[str]
    ) -> list[Finding]:
        """`fast`: the fast record of the same step. Adds the tensors that findings explain to `explained`."""
        samples = record.tensors
        self._peak_rate = max([self._peak_rate, *(sample.rate for sample in samples.values())])
        return [
            *self._state_lost(samples),
            *self._exploding(record),
            *self._vanishing(samples, explained | expected_frozen),
            *self._outside(samples, explained | expected_frozen, explained),
            *self._stale(samples, fast, explained | expected_frozen, explained),
            *self._untouched_b(samples, fast, explained, expected_frozen),
            *self._imbalanced(record, explained | expected_frozen),
        ]

    def optimizer_was_reset(self) -> None:
        """The optimizer's state was dropped on purpose."""
        self._age = 0.0

    def _state_lost(self, samples: Mapping[str, TensorSample]) -> list[Finding]:
        """The optimizer counts fewer updates than before."""
        ages = [sample.age for sample in samples.values() if sample.has_gradient and sample.in_optimizer]
        known = [age for age in ages if not math.isnan(age)]
        age = statistics.median(known) if known else 0.0
        lost = self._age > 1 and age < self._age
        before, self._age = self._age, age
        confirmed = self._streaks.see("state lost", ["optimizer"] if lost else [], 1)
        return [Finding("STATE-LOST", numbers={"before": before, "now": age})] if confirmed else []

    def _leaping(self, record: SlowRecord) -> list[Finding]:
        """lora_down (which does not begin at 0) moves by a part of itself that is many times what it was.

        Where attention saturates, a far too high rate makes gradients smaller, and no norm shows it.
        """
        ratios = [
            sample.update / sample.weight
            for name, sample in record.tensors.items()
            if self._tensors[name].role == "A" and sample.has_gradient and sample.weight > 0
        ]
        ratio = statistics.median(ratios) if ratios else 0.0
        usual = statistics.median(self._leaps) if self._leaps else math.inf
        if ratio > max(_LEAP, _LEAP_TIMES * usual):
            return [Finding("EXPLODING", "", (), "leap", numbers={"ratio": ratio, "usual": usual})]
        if ratio > 0:
            self._leaps = [*self._leaps, ratio][-_LEAPS_KEPT:]
        return []

    def _exploding(self, record: SlowRecord) -> list[Finding]:
        if leap := self._leaping(record):
            return leap
        worst = _worst_rms(record, self._tensors)
        if worst is None:
            return []
        group, rms = worst
        self._thresholds.learn(record.step, "rms", rms)
        if rms > self._thresholds.rms:
            return [Finding("EXPLODING", group, (), "rms", numbers={"rms": rms})]
        if rms > min(self._config.rms_warn, self._thresholds.rms):
            return [Finding("EXPLODING", group, (), "rms rising", "info", {"rms": rms})]
        lonely = [s.spread for s in record.tensors.values() if s.has_gradient and not math.isnan(s.spread)]
        if lonely and percentile(lonely, 50) < _ONE_COORDINATE:
            return [Finding("EXPLODING", group, (), "one coordinate", "info", {"share": percentile(lonely, 50)})]
        return []

    def _vanishing(self, samples: Mapping[str, TensorSample], asleep: set[str] | frozenset[str]) -> list[Finding]:
        names = [n for n in self._vanishing_of if n in samples and n not in asleep and samples[n].has_gradient]
        judged = [n for n in names if not self._waits_for_b(n, samples)]
        gone = [n for n in judged if samples[n].zero > self._config.zero_share]
        share = len(gone) / len(judged) if judged else 0.0
        seen = ["run"] if share >= self._config.vanishing_tensors else []
        confirmed = self._streaks.see("vanishing", seen, VANISHING_SAMPLES)
        if not confirmed:
            return []
        return [Finding("VANISHING", "", tuple(gone), "zeros", numbers={"tensors": len(gone), "share": share})]

    def _waits_for_b(self, name: str, samples: Mapping[str, TensorSample]) -> bool:
        """lora_down gets no gradient while lora_up is 0; that is no fault when lora_up's own gradient is there."""
        tensor = self._tensors[name]
        if tensor.role != "A":
            return False
        partner = samples.get(partner_of(name))
        return partner is not None and partner.weight - partner.update <= 0 and partner.zero <= self._config.zero_share

    def _outside(self, samples: Mapping[str, TensorSample], asleep: set[str], explained: set[str]) -> list[Finding]:
        """Tensors that the optimizer does not hold: sure at the first look."""
        names = [name for name, sample in samples.items() if not sample.in_optimizer and name not in asleep]
        explained.update(names)
        return self._by_group("STALE", self._streaks.see("outside", names, 1), "outside")

    def _stale(
        self, samples: Mapping[str, TensorSample], fast: FastRecord, asleep: set[str], explained: set[str]
    ) -> list[Finding]:
        still = [
            name
            for name, sample in samples.items()
            if name not in asleep
            and sample.has_gradient
            and sample.grad > 0
            and sample.zero <= self._config.zero_share
            and sample.rate > _QUIET_RATE * self._peak_rate
            and name not in fast.zero_rate
            and sample.changed < self._config.changed_share
        ]
        seen = still if len(still) >= _FEWEST_STALE else []
        explained.update(seen)
        confirmed = self._streaks.see("stale", seen, STALE_SAMPLES)
        share = statistics.mean(samples[name].changed for name in confirmed) if confirmed else 0.0
        # One cause for all: where rounding loses updates, tensors of large numbers do not move at all.
        return self._by_group("STALE", confirmed, "rounding" if share > 0 else "unmoved", changed=share)

    def _untouched_b(
        self, samples: Mapping[str, TensorSample], fast: FastRecord, explained: set[str], expected: frozenset[str]
    ) -> list[Finding]:
        """lora_up is still exactly 0, because its rate or its gradient is."""
        resting = [
            name
            for name, sample in samples.items()
            if self._tensors[name].role == "B"
            and name not in expected
            and sample.weight == 0
            and (name in fast.zero_rate or (name not in explained and sample.has_gradient and sample.grad == 0))
        ]
        confirmed = self._streaks.see("untouched", resting, IMBALANCED_SAMPLES)
        explained.update(resting)
        explained.update(partner_of(name) for name in resting)
        by_rate = [name for name in confirmed if name in fast.zero_rate]
        by_gradient = [name for name in confirmed if name not in fast.zero_rate]
        return [
            *self._by_group("IMBALANCED", by_rate, "b rate"),
            *self._by_group("IMBALANCED", by_gradient, "b gradient"),
        ]

    def _imbalanced(self, record: SlowRecord, asleep: set[str]) -> list[Finding]:
        """One factor moves the layer a hundred times more than the other, in a good part of a group.

        Not judged where the slower factor's gradients are below Adam's eps (RMS far below 1): that comes from the size
        of the loss and not from the rates, so it is told once as information.
        """
        groups: dict[str, list[tuple[str, float]]] = {}
        held: list[str] = []
        for module, quotient in record.quotients.items():
            names = [
                name for name in (f"{module}.lora_down.weight", f"{module}.lora_up.weight") if name in self._tensors
            ]
            if len(names) < 2 or math.isnan(quotient) or asleep.intersection(names):
                continue
            slower = names[0] if quotient > 0 else names[1]
            if abs(quotient) > 1.0 and slower in record.tensors and record.tensors[slower].rms < _HELD_BACK:
                held.append(slower)
                continue
            groups.setdefault(self._tensors[names[0]].group, []).append((module, quotient))
        if record.step <= _IMBALANCE_FROM:
            return []
        found: list[Finding] = []
        if not self._eps_told and len(held) > _IMBALANCED_SHARE * len(record.quotients):
            self._eps_told = True
            found = [Finding("IMBALANCED", "", tuple(held), "eps", "info", {"tensors": len(held)})]
        judged = [abs(quotient) for members in groups.values() for _, quotient in members]
        if judged:
            self._thresholds.learn(record.step, "imbalance", percentile(judged, 90))
        limit = self._thresholds.imbalance
        seen = [
            group
            for group, members in groups.items()
            if sum(abs(quotient) > limit for _, quotient in members) >= max(1, _IMBALANCED_SHARE * len(members))
        ]
        for group in self._streaks.see("imbalanced", seen, IMBALANCED_SAMPLES):
            over = [(module, quotient) for module, quotient in groups[group] if abs(quotient) > limit]
            middle = statistics.median(quotient for _, quotient in over)
            names = tuple(f"{module}.lora_{'down' if middle > 0 else 'up'}.weight" for module, _ in over)
            found.append(Finding("IMBALANCED", group, names, "quotient", numbers={"q": middle}))
        return found

    def _by_group(self, kind: str, names: Iterable[str], cause: str, **numbers: float) -> list[Finding]:
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(self._tensors[name].group, []).append(name)
        return [
            Finding(kind, group, tuple(members), cause, numbers={"tensors": len(members), **numbers})
            for group, members in groups.items()
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"age": self._age, "peak_rate": self._peak_rate, "leaps": list(self._leaps), "eps_told": self._eps_told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._age, self._peak_rate = float(state["age"]), float(state["peak_rate"])
        self._leaps = [float(value) for value in state.get("leaps", ())]
        self._eps_told = bool(state.get("eps_told", False))


def group_rms(record: SlowRecord, tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """RMS of g / sqrt(v) by group: the root of the mean over its tensors of the square."""
    groups: dict[str, list[float]] = {}
    for name, sample in record.tensors.items():
        if not math.isnan(sample.rms) and name in tensors:
            groups.setdefault(tensors[name].group, []).append(sample.rms)
    return {group: math.sqrt(statistics.fmean(v * v for v in values)) for group, values in groups.items()}


def _worst_rms(record: SlowRecord, tensors: Mapping[str, Tensor]) -> tuple[str, float] | None:
    found = group_rms(record, tensors)
    return max(found.items(), key=lambda item: item[1]) if found else None
