"""The escalation ladder: what is tried, in which order, and how often. Pure: decides, does nothing.

Every rung starts from the last good checkpoint with new draws (PaLM, Chowdhery et al. 2022, section 5.1: restart about
100 steps before a spike and skip 200 to 500 batches; the same batches from another state did not spike, so new draws
matter more than blame). While a recovery is on, a trigger leads to the next rung. After one that held, a new fault
begins at the first rung again as long as its count allows it; what was changed for the old one (number format, learning
rate) stays changed. Counts are per run, so the ladder ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..config import SafetyConfig
from ..optim.phases import EXPLODING, NORM_OVERFLOW, Trigger
from ..optim.precision import SAFER

ROLLBACK, PRECISION, LEARNING_RATE = "rollback", "precision", "learning_rate"
RESET_OPTIMIZER, FREEZE_MODULE = "reset_optimizer", "freeze_module"


@dataclass(frozen=True)
class Rung:
    """What to change after going back. `compute`: the number format to move to, for the rung `precision`."""

    name: str
    compute: str = ""


@dataclass(frozen=True)
class Attempt:
    """One rung that was taken."""

    step: int
    back_to: int
    rung: str
    text: str
    trigger: str


@dataclass
class Ladder:
    """State of one run's ladder. In checkpoints under "ladder"; a rollback does not take it back.

    `place`: rung (by place in the config's list) of the recovery that is on; -1 for none. `formats`: the number formats
    that were moved to, in order.
    """

    config: SafetyConfig
    compute: str
    place: int = -1
    used: dict[str, int] = field(default_factory=dict)
    lr_factor: float = 1.0
    frozen: list[str] = field(default_factory=list)
    formats: list[str] = field(default_factory=list)
    history: list[Attempt] = field(default_factory=list)

    def next(
        self, trigger: Trigger, *, recovering: bool, cannot: Callable[[str], str], culprit: str = ""
    ) -> tuple[Rung | None, list[str]]:
        """The rung to take, and why each one before it was passed over. None: there is none left.

        Args:
            recovering: a recovery is on; else this is a new fault and the ladder begins anew.
            cannot: why a number format cannot be computed in here; empty when it can.
            culprit: the module that was hit first, for `freeze_module`.
        """
        passed: list[str] = []
        start = self.place if recovering else -1
        for place, name in enumerate(self.config.rungs):
            if place < start or (place == start and name != PRECISION):
                continue
            rung, why = self._try(name, trigger, cannot, culprit)
            if rung is not None:
                self.place = place
                return rung, passed
            passed.append(f"{name}: {why}")
        return None, passed

    def take(self, rung: Rung, *, culprit: str = "") -> str:
        """Count the rung and change what it changes here. Returns what it does, in words."""
        self.used[rung.name] = self.used.get(rung.name, 0) + 1
        if rung.name == PRECISION:
            before, self.compute = self.compute, rung.compute
            self.formats.append(rung.compute)
            return f"computing in {rung.compute} instead of {before}"
        if rung.name == LEARNING_RATE:
            self.lr_factor *= self.config.lr_cut
            return f"all learning rates times {self.config.lr_cut:g} (now {self.lr_factor:g} of the set ones)"
        if rung.name == RESET_OPTIMIZER:
            return "the optimizer's state is empty again"
        if rung.name == FREEZE_MODULE:
            self.frozen.append(culprit)
            return f"{culprit} is not trained any more"
        return "other noise and other pictures"

    def state_dict(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "used": dict(self.used),
            "lr_factor": self.lr_factor,
            "frozen": list(self.frozen),
            "formats": list(self.formats),
            "history": [vars(attempt) for attempt in self.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.formats = list(state["formats"])
        if self.formats:  # else the number format is the config's
            self.compute = self.formats[-1]
        self.place, self.used = int(state["place"]), dict(state["used"])
        self.lr_factor, self.frozen = float(state["lr_factor"]), list(state["frozen"])
        self.history = [Attempt(**attempt) for attempt in state["history"]]

    def _try(self, name: str, trigger: Trigger, cannot: Callable[[str], str], culprit: str) -> tuple[Rung | None, str]:
        most = {
            ROLLBACK: self.config.max_rollbacks,
            PRECISION: self.config.max_precision_moves,
            LEARNING_RATE: self.config.max_lr_cuts,
        }.get(name, 1)
        if self.used.get(name, 0) >= most:
            return None, f"taken {most} times already" if most else "off (its count is 0)"
        if name == PRECISION:
            return self._precision(trigger, cannot)
        if name == FREEZE_MODULE and (not culprit or culprit in self.frozen):
            return None, "no single module was hit first"
        return Rung(name), ""

    def _precision(self, trigger: Trigger, cannot: Callable[[str], str]) -> tuple[Rung | None, str]:
        if trigger.kind in (EXPLODING, NORM_OVERFLOW):
            return None, "finite gradients that grow are no matter of the number format"
        why, compute = "fp32 is the safest format already", SAFER.get(self.compute)
        while compute is not None:
            if not (why := cannot(compute)):
                return Rung(PRECISION, compute), ""
            compute = SAFER.get(compute)
        return None, why
