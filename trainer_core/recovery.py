"""Taking a rung of the escalation ladder: back to the last good checkpoint, one thing changed, and on.

What a rollback takes back: weights, moments, averages, counters, schedule, signals. What it does not: the ladder
itself, the quarantine, and the number of the attempt, which draws everything random anew. The new state is written as a
checkpoint before training goes on, so that a process that is killed between two rungs goes on with the same one.

With several processes the first one decides, reads the checkpoint and writes; all do what was decided with the state
that it read.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .checkpoints.manifest import STATE
from .checkpoints.state import RunState
from .distributed.shared_state import share_state
from .errors import CheckpointError
from .events import Intervention
from .hardware import HARDWARE
from .hardware.watch import HardwareWatch, device_failed
from .health.goodness import is_good
from .health.ladder import RESET_OPTIMIZER, Attempt, Ladder, Rung
from .health.stop_report import StopFacts, stop_report
from .models.formats import convert_base, why_not
from .optim.phases import POISON, RECOVER, STOPPED, Trigger
from .optim.precision import COMPUTE_DTYPES, SAFER
from .optim.reading import named
from .resume import put_back
from .runs.platform import DurableIO

if TYPE_CHECKING:
    from .config import TrainConfig
    from .session import Session
    from .trainer import Trainer

log = logging.getLogger(__name__)

REPORT = "stop_report.md"


@dataclass(frozen=True)
class Decision:
    """What follows from a trigger: a rung (`place` is the ladder's), or why there is none (`stop`). `passed`: rungs
    that were passed over, with the reason."""

    rung: Rung | None = None
    stop: str = ""
    passed: tuple[str, ...] = ()
    place: int = -1
    culprit: str = ""


class Recovery:
    """The ladder of one run in this process; `trainer.recover` when `safety.ladder` is on."""

    def __init__(self, session: Session, trainer: Trainer, config: TrainConfig) -> None:
        self.session = session
        self.trainer = trainer
        self.config = config
        self.ladder = Ladder(config.safety, trainer.parts.precision.compute)
        trainer.keepers["ladder"] = self.ladder
        self.hardware: HardwareWatch | None = None
        self._start: RunState | None = None

    def begin(self, step: int) -> None:
        """The run begins, or goes on from a checkpoint: what the ladder changed before is changed again."""
        self._set()
        self.trainer.recover = self
        if self.config.safety.ladder and step == 0 and self.session.is_first:
            self._remember_start()

    def _remember_start(self) -> None:
        """Keep the untrained state in host memory until there is a good checkpoint: a run that fails before goes back
        to it."""
        state = self.session.capture()
        adapter, tensors = (
            {name: value.detach().to("cpu", copy=True) for name, value in live.items()}
            for live in (state.adapter, state.optimizer)
        )
        scalars = json.loads(json.dumps(state.scalars))
        self._start = RunState(adapter, tensors, scalars, step=0, name="the start of the run")
        self.session.bus.subscribe(self._forget_start)

    def __call__(self, trigger: Trigger) -> None:
        """Go back and take the next rung.

        Raises:
            NonFiniteError: nothing is left to try, there is no state to go back to, the data are at fault, or the
                ladder is off.
            HardwareError: the device fails.
        """
        self.session.checkpoints.close()
        if trigger.kind == HARDWARE:
            clean_at = 0.0 if self.hardware is None else self.hardware.clean_at
            raise device_failed(self.session, trigger, self.trainer.state.step, clean_at)
        if not self.config.safety.ladder:
            self.trainer.halt(trigger)
        decision = self._decision(trigger)
        if decision.rung is None:
            self._stop(trigger, decision.stop, decision.passed)
        self.ladder.place = decision.place
        processes = self.trainer.parts.processes
        good = self._good_state() if processes is None else share_state(processes, self._good_state)
        if good is None:
            why = "There is no good checkpoint to go back to (checkpoint.every_steps)."
            self._stop(trigger, why, decision.passed)
        self._take(trigger, decision.rung, good, decision.culprit)

    def _decision(self, trigger: Trigger) -> Decision:
        """The same in every process: the first one's, with what the number formats lack on any of them."""
        processes = self.trainer.parts.processes
        if processes is None:
            return self._decide(trigger, self._cannot)
        lacks: dict[str, str] = {}
        for told in processes.gather(json.dumps({compute: self._cannot(compute) for compute in SAFER.values()})):
            lacks.update({compute: why for compute, why in json.loads(told).items() if why})
        told = processes.share_json(lambda: asdict(self._decide(trigger, lambda compute: lacks.get(compute, ""))))
        return _read_decision(told)

    def _decide(self, trigger: Trigger, cannot: Callable[[str], str]) -> Decision:
        trainer, quarantine, safety = self.trainer, self.trainer.guard.quarantine, self.config.safety
        if trigger.kind == POISON and quarantine.share > safety.data_fault_share:
            many = f"{len(quarantine.excluded)} of {quarantine.pictures} pictures are quarantined"
            return Decision(stop=f"{many}: the data are at fault, and no rung of the ladder mends that.")
        culprit = self._culprit()
        recovering = trainer.parts.precision.phases.phase == RECOVER
        rung, passed = self.ladder.next(trigger, recovering=recovering, cannot=cannot, culprit=culprit)
        return Decision(rung, "There is no rung left on the ladder.", tuple(passed), self.ladder.place, culprit)

    def _take(self, trigger: Trigger, rung: Rung, good: RunState, culprit: str) -> None:
        trainer, session = self.trainer, self.session
        failed, attempt = trainer.state.step, trainer.state.attempt
        kept = {name: trainer.keepers[name].state_dict() for name in ("ladder", "quarantine")}
        put_back(good, session, trainer)
        for name, state in kept.items():
            trainer.keepers[name].load_state_dict(state)
        text = self.ladder.take(rung, culprit=culprit)
        back = trainer.state.step
        window = max(1, math.ceil((failed - back) * (1.0 + self.config.safety.skip_beyond)))
        trainer.state.attempt = attempt + 1
        trainer.state.skipped += window
        if rung.name == RESET_OPTIMIZER:
            trainer.parts.optimizer.state.clear()
            if trainer.health is not None:
                trainer.health.optimizer_was_reset()
        self.ladder.history.append(Attempt(failed, back, rung.name, text, f"{trigger.reason} ({trigger.kind})"))
        self._set()
        trainer.parts.precision.restart(self.ladder.compute)
        session.rolled_back(back)
        if session.is_first:
            session.checkpoints.save_now(back)  # the others wait at the gate of the next step
        reason = f"{trigger.reason} at step {failed} ({trigger.kind})"
        action = f"Went back from step {failed} to {good.name or back}: {text}; {window} steps' worth of data left out"
        log.warning("%s (%s)", action, reason)
        session.bus.emit(Intervention(step=back, action=action, reason=reason, attempt=trainer.state.attempt))
        if session.is_first:
            session.make_up_for(back)

    def _set(self) -> None:
        """Let the run be what the ladder says: number format, learning rate, frozen modules."""
        parts = self.trainer.parts
        if self.ladder.compute != parts.precision.compute:
            parts.precision.switch(self.ladder.compute)
        for compute in self.ladder.formats:  # one after the other, as it was: each move rounds
            convert_base(parts.model, COMPUTE_DTYPES[compute])
        if self.ladder.formats[-1:] == ["fp32"]:
            torch.set_float32_matmul_precision("highest")  # no TF32: the run came here for exactness
        self.trainer.lr_factor = self.ladder.lr_factor
        for module in self.ladder.frozen:
            freeze(parts.optimizer, module)
        if self.trainer.health is not None:
            frozen = [n for n, _ in named(parts.optimizer) if n.partition(".")[0] in self.ladder.frozen]
            self.trainer.health.expect_frozen(frozenset(frozen), "ladder")

    def _culprit(self) -> str:
        """The trained module that was hit first; empty when it was none (a layer of the base model in the forward)."""
        module = self.trainer.guard.last_where.partition(" ")[0]
        trained = {name.partition(".")[0] for name, _ in named(self.trainer.parts.optimizer)}
        return module if module in trained else ""

    def _cannot(self, compute: str) -> str:
        return why_not(self.trainer.parts.model, COMPUTE_DTYPES[compute])

    def _good_state(self) -> RunState | None:
        """The newest good state: a checkpoint that says so of itself and reads back whole, else the start."""
        store = self.session.store
        for saved in store.list():
            if saved.problem or not is_good(saved.path / STATE):
                continue
            try:
                return store.load(saved.name)
            except CheckpointError as error:
                log.warning("%s", error)
        return self._start

    def _forget_start(self, wire: dict[str, Any]) -> None:
        if wire["type"] == "CheckpointSaved" and self.session.checkpoints.good_name:
            self._start = None

    def _stop(self, trigger: Trigger, why: str, passed: Sequence[str]) -> NoReturn:
        """End the run with a report.

        Raises:
            NonFiniteError: always.
        """
        trainer, guard = self.trainer, self.trainer.guard
        trainer.parts.precision.phases.phase = STOPPED
        facts = StopFacts(
            step=trainer.state.step,
            trigger=trigger,
            why=why,
            compute=self.ladder.compute,
            passed=passed,
            history=self.ladder.history,
            rows=tuple(guard.rows),
            tensors=guard.tensor_hits,
            samples=guard.sample_hits,
            quarantined=guard.quarantine.excluded,
            learning_rate=self.config.optimizer.learning_rate * self.ladder.lr_factor,
        )
        path = self.session.folder.path / REPORT
        told = f"What was tried and what to change: {path}."
        try:
            if self.session.is_first:
                DurableIO().replace_file(path, stop_report(facts).encode("utf-8", "replace"))
        except OSError as error:
            told = f"The report of what was tried could not be written to {path} ({error.strerror})."
        raise guard.failure(trigger, f"{why} {told}")


def _read_decision(told: Mapping[str, Any]) -> Decision:
    rung = None if told["rung"] is None else Rung(**told["rung"])
    return Decision(rung, told["stop"], tuple(told["passed"]), told["place"], told["culprit"])


def freeze(optimizer: torch.optim.Optimizer, module: str) -> None:
    """Train the tensors of `module` no more: they get no gradient, so they neither move nor decay."""
    for name, parameter in named(optimizer):
        if name.partition(".")[0] == module:
            parameter.requires_grad_(False)
            parameter.grad = None
