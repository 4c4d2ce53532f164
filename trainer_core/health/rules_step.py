"""Rules that look at every step. Each takes the record, returns findings, and says which tensors it explains.

The numbers and where they come from: docs/gradient_health.md.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ..config_health import HealthConfig
from .findings import Finding, Streaks, Thresholds
from .groups import Tensor, half_cut
from .records import FastRecord
from .slope import slope_interval

DEAD_STEPS = 8
FROZEN_STEPS = 5
_DEAD_SHARE = 0.95
_HISTORY = 50
_ENOUGH = 20
_SPIKE_WINDOW = 10
_LEAST_SPREAD = 0.05
_EARLY = (10, 60)
_VANISHED = 1e-3
_SLOPE_STEPS = 100
_SLOPE_LIMIT = -0.003
_COLLAPSED = 0.01


class ConnectionRules:
    """TE1-DEAD, TE2-DEAD, DISCONNECTED, FROZEN: whether what should be trained is."""

    def __init__(self, tensors: Mapping[str, Tensor], allowed: frozenset[str], streaks: Streaks) -> None:
        self._tensors = tensors
        self._allowed = allowed
        self._streaks = streaks
        self._unet = [t.name for t in tensors.values() if t.part == "unet"]

    def look(self, record: FastRecord, expected_frozen: frozenset[str], explained: set[str]) -> list[Finding]:
        """`expected_frozen`: tensors that are frozen on purpose."""
        asleep = self._allowed | expected_frozen
        return [
            *self._dead_encoders(record, asleep, explained),
            *self._frozen(record, expected_frozen, explained),
            *self._disconnected(record, asleep, explained),
        ]

    def _dead_encoders(self, record: FastRecord, asleep: frozenset[str], explained: set[str]) -> list[Finding]:
        """A whole encoder without gradients, on steps that had captions."""
        found: list[Finding] = []
        unet_is_dead = self._share_dead(record, self._unet) >= 0.1 + 0.5 * (record.applied <= 1)
        for part in ("te1", "te2"):
            names = [t.name for t in self._tensors.values() if t.part == part and t.name not in asleep]
            rule = f"{part} dead"
            if not names or record.captions_dropped:
                continue
            silent = self._share_dead(record, names)
            missing = sum(name not in record.norms for name in names) / len(names)
            # Gradients that are zero everywhere are an underflow; none at all are a cut.
            dead = missing >= _DEAD_SHARE or (silent >= _DEAD_SHARE and not unet_is_dead)
            if record.not_trainable.issuperset(names):
                dead = False
            confirmed = self._streaks.see(rule, [part] if dead else [], DEAD_STEPS)
            if dead:
                explained.update(names)
            if confirmed:
                cause = "none" if missing >= _DEAD_SHARE else "zero"
                found.append(
                    Finding(f"{part.upper()}-DEAD", part, tuple(names), cause, numbers={"tensors": len(names)})
                )
        return found

    def _share_dead(self, record: FastRecord, names: list[str]) -> float:
        return sum(not record.norms.get(name, 0.0) for name in names) / len(names) if names else 0.0

    def _frozen(self, record: FastRecord, expected: frozenset[str], explained: set[str]) -> list[Finding]:
        if not record.was_applied:
            return []
        off = record.not_trainable - expected
        resting = record.zero_rate - expected - off
        partners = self._only_one_factor(resting)
        explained.update(resting)
        found = []
        for rule, names, cause in (("frozen rate", resting - partners, "rate"), ("frozen", off, "off")):
            explained.update(names)
            confirmed = self._streaks.see(rule, names, FROZEN_STEPS)
            found += self._by_group("FROZEN", confirmed, cause)
        return found

    def _only_one_factor(self, resting: frozenset[str]) -> set[str]:
        """Tensors at rest whose partner in the same adapter learns: that is IMBALANCED (see rules_slow)."""
        modules: dict[str, set[bool]] = {}
        for tensor in self._tensors.values():
            modules.setdefault(tensor.module, set()).add(tensor.name in resting)
        return {name for name in resting if len(modules[self._tensors[name].module]) == 2}

    def _disconnected(self, record: FastRecord, asleep: frozenset[str], explained: set[str]) -> list[Finding]:
        missing = [n for n in self._tensors if n not in record.norms and n not in asleep and n not in explained]
        explained.update(missing)
        confirmed = self._streaks.see("disconnected", missing, DEAD_STEPS)
        halves = [name for name in confirmed if half_cut(name, missing, self._tensors)]
        if len(halves) == len(confirmed):
            return self._by_group("DISCONNECTED", halves, "between")
        return self._by_group("DISCONNECTED", confirmed, "")

    def _by_group(self, kind: str, names: Iterable[str], cause: str) -> list[Finding]:
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(self._tensors[name].group, []).append(name)
        return [
            Finding(kind, group, tuple(members), cause, numbers={"tensors": len(members)})
            for group, members in groups.items()
        ]


class NormRules:
    """EXPLODING by spikes, VANISHING by group medians, COLLAPSING: how the norms go on."""

    def __init__(
        self, tensors: Mapping[str, Tensor], config: HealthConfig, streaks: Streaks, thresholds: Thresholds
    ) -> None:
        self._tensors = tensors
        self._config = config
        self._streaks = streaks
        self._thresholds = thresholds
        self._groups = sorted({tensor.group for tensor in tensors.values()})
        self._logs: deque[float] = deque(maxlen=_HISTORY)
        self._spikes: deque[bool] = deque(maxlen=_SPIKE_WINDOW)
        self._losses: deque[float] = deque(maxlen=_SLOPE_STEPS)
        self._early_loss: list[float] = []
        self._norms = {group: deque[float](maxlen=_SLOPE_STEPS) for group in self._groups}
        self._early: dict[str, list[float]] = {group: [] for group in self._groups}
        self._applied = 0

    def look(self, record: FastRecord) -> list[Finding]:
        """Applied steps only; a rejected step has no norm to go by."""
        if not record.was_applied:
            return []
        found = self._spiking(record)
        self._remember(record)
        return found

    def declining(self, explained: set[str]) -> list[Finding]:
        """VANISHING by medians and COLLAPSING, looked at with the slow records: the slope costs a bootstrap."""
        return [*self._falling(explained), *self._collapsing(explained)]

    def _collapsing(self, explained: set[str]) -> list[Finding]:
        found = []
        improved = self._loss_ratio() < 0.9
        for group, norms in self._norms.items():
            early = self._early[group]
            if improved or len(norms) < _SLOPE_STEPS or len(early) < _ENOUGH or self._explained(group, explained):
                continue
            if statistics.median(list(norms)[-_ENOUGH:]) >= _COLLAPSED * statistics.median(early):
                continue
            slope, _, high = slope_interval(np.log10(np.maximum(np.array(norms), 1e-30)))
            if high < _SLOPE_LIMIT:
                found.append(Finding("COLLAPSING", group, self._names(group), numbers={"slope": slope}))
        return found

    def _spiking(self, record: FastRecord) -> list[Finding]:
        level = math.log10(record.grad_norm) if record.grad_norm > 0 else -30.0
        found: list[Finding] = []
        spike = False
        if len(self._logs) >= _ENOUGH:
            middle = statistics.median(self._logs)
            spread = max(1.4826 * statistics.median(abs(value - middle) for value in self._logs), _LEAST_SPREAD)
            above = level - middle
            self._thresholds.learn(record.step, "spike", above)
            spike = above > self._thresholds.spike and above / spread > self._config.spike_z
            if spike:
                times = 10**above
                found.append(
                    Finding("EXPLODING", "", (), "one spike", "info", {"times": times, "norm": record.grad_norm})
                )
        self._spikes.append(spike)
        self._logs.append(level)
        if sum(self._spikes) >= self._config.spikes:
            found = [
                Finding("EXPLODING", "", (), "spikes", numbers={"spikes": sum(self._spikes), "norm": record.grad_norm})
            ]
        return found

    def _remember(self, record: FastRecord) -> None:
        self._applied += 1
        early = _EARLY[0] < self._applied <= _EARLY[1]
        squares = dict.fromkeys(self._groups, 0.0)
        for name, norm in record.norms.items():
            tensor = self._tensors.get(name)
            if tensor is not None:
                squares[tensor.group] += norm * norm
        for group, square in squares.items():
            norm = math.sqrt(square)
            self._norms[group].append(norm)
            if early:
                self._early[group].append(norm)
        self._losses.append(record.loss)
        if early:
            self._early_loss.append(record.loss)

    def _falling(self, explained: set[str]) -> list[Finding]:
        """The norm of a group is a thousandth of what it was, and the loss has not fallen likewise."""
        if self._applied < _EARLY[1] + _HISTORY:
            return []
        found = []
        loss = self._loss_ratio()
        for group, norms in self._norms.items():
            early = self._early[group]
            # Medians of every group at every step would cost more than all other rules: first a cheap look.
            if len(early) < _ENOUGH or norms[-1] >= 10 * _VANISHED * max(early) or self._explained(group, explained):
                continue
            before, now = statistics.median(early), statistics.median(list(norms)[-_HISTORY:])
            if before > 0 and now < _VANISHED * before and loss > 10 * now / before:
                found.append(Finding("VANISHING", group, self._names(group), "median", numbers={"share": now / before}))
        return found

    def _loss_ratio(self) -> float:
        """Median loss now as a share of the early one."""
        if not self._early_loss or not self._losses:
            return 1.0
        early = statistics.median(self._early_loss)
        return statistics.median(list(self._losses)[-_HISTORY:]) / early if early > 0 else 1.0

    def _names(self, group: str) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self._tensors.values() if tensor.group == group)

    def _explained(self, group: str, explained: set[str]) -> bool:
        return bool(explained) and explained.issuperset(self._names(group))

    def state_dict(self) -> dict[str, Any]:
        return {
            "logs": list(self._logs),
            "spikes": list(self._spikes),
            "losses": list(self._losses),
            "early_loss": self._early_loss,
            "norms": {group: list(norms) for group, norms in self._norms.items()},
            "early": self._early,
            "applied": self._applied,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        def refill(values: deque[Any], stored: list[Any], kind: Callable[[Any], Any]) -> None:
            values.clear()
            values.extend(kind(value) for value in stored)

        refill(self._logs, state["logs"], float)
        refill(self._spikes, state["spikes"], bool)
        refill(self._losses, state["losses"], float)
        self._early_loss = [float(value) for value in state["early_loss"]]
        for group in self._groups:
            refill(self._norms[group], state["norms"].get(group, []), float)
            self._early[group] = [float(value) for value in state["early"].get(group, [])]
        self._applied = int(state["applied"])
