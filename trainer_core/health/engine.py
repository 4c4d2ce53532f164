"""Gradient health of a run: a fast record of every step, a full measurement of some, and what follows from them.

`observe` is called once after every decided step. It works on what the step's one reading brought, so it reads nothing
from the device; the full measurements are copied without waiting and looked at one step later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import HealthError
from ..events import Intervention, Verdict, Warned
from ..optim.phases import Trigger
from .alerts import Alerts, Transition
from .audit import AuditReport, audit
from .dynamic_range import ranges, unfit_text
from .exporters import Exports
from .facts import fast_record
from .findings import Finding, Streaks, Thresholds
from .fire_counters import FireCounters
from .freezing import Freezing
from .groups import Tensor, allowed_dead, describe
from .headroom import ForwardHeadroom, headroom_text
from .records import FastRecord, SlowRecord
from .repair import Repair, refusal, repair
from .ring import RingWriter
from .rows import Row, health_rows
from .rules_slow import SlowRules
from .rules_step import ConnectionRules, NormRules
from .sentences import over, sentence
from .signals import UpdateProbe

if TYPE_CHECKING:
    from ..optim.clipping import Clip
    from ..optim.precision import StepVerdict
    from ..optim.reading import StepReading
    from ..runs.database import RunDatabase
    from ..step_work import StepWork
    from ..trainer import Trainer

RING_NAME = "health.ring"

FAST_VERDICTS = ("TE1-DEAD", "TE2-DEAD", "DISCONNECTED", "FROZEN", "DTYPE-CHANGED", "MISSING-CONTRIBUTION")
SLOW_VERDICTS = ("STATE-LOST", "STALE", "IMBALANCED", "COLLAPSING")

RecordRows = Callable[[int, Sequence[tuple[str, Row]]], None]
"""Puts the rows of a measurement into the run's record (`RunDatabase.add_health`)."""


@dataclass(frozen=True)
class Measurement:
    """What exporters get: the newest fast record, and the rows of a full measurement where there is one."""

    fast: FastRecord
    rows: Sequence[tuple[str, Row]] = ()
    slow: SlowRecord | None = None


class HealthEngine:
    """Watches the steps of one trainer. In checkpoints under "health".

    Args:
        record_rows: where rows go; None = nowhere.
        folder: the run folder, for the flight recorder; None = none is kept.
    """

    def __init__(self, trainer: Trainer, *, record_rows: RecordRows | None = None, folder: Path | None = None) -> None:
        self.trainer = trainer
        self.config = trainer.config.health
        self.record_rows = record_rows
        self.listeners: list[Callable[[Measurement], None]] = []
        self._frozen_by: dict[str, frozenset[str]] = {}
        self.expected_frozen: frozenset[str] = frozenset()
        """Tensors that are frozen on purpose (`freezing.py`)."""
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.tensors: dict[str, Tensor] = {}
        self._refresh()
        self._dtypes = {name: parameter.dtype for name, parameter in self.parameters.items()}
        self.allowed = allowed_dead(
            list(self.tensors.values()), layers=_layers(trainer), pooled_cached=trainer.parts.loader.texts is not None
        )
        self.alerts = Alerts(self.config.ignore)
        self.streaks = Streaks()
        self.thresholds = Thresholds(self.config)
        self.connections = ConnectionRules(self.tensors, self.allowed, self.streaks)
        self.norms = NormRules(self.tensors, self.config, self.streaks, self.thresholds)
        self.slow = SlowRules(self.tensors, self.config, self.streaks, self.thresholds)
        self.latest: Measurement | None = None
        self._watch_until = 0
        self._epoch = (-1, 0, 0, 0)
        self.ring = self._open_ring(folder)
        every = self.config.headroom_every
        self.headroom = ForwardHeadroom(trainer.parts.model.unet, every) if every else None
        self._told: set[str] = set()
        self.freezing = self._freezing()
        self._exports = Exports(self.config, folder, trainer.bus)
        self.listeners.append(self._exports.measured)
        self.probe = UpdateProbe(self._live(), trainer.parts.optimizer)
        self.probe.due = True
        unet = trainer.parts.model.unet
        self.fires = FireCounters(self.parameters, unet) if self.config.fire_counters else None

    def close(self) -> None:
        """Look at what still waits, take the hooks off, and let go of the flight recorder's file."""
        self._look_at_waiting(everything=True)
        self.probe.close()
        if self.freezing is not None:
            self.freezing.close()
        if self.headroom is not None:
            self.headroom.close()
        if self.fires is not None:
            self.fires.close()
        if self.ring is not None:
            self.ring.close()
            self.ring = None
        self._exports.close()

    def observe(self, work: StepWork, reading: StepReading, verdict: StepVerdict, clip: Clip | None) -> None:
        """Take in a decided step. `clip`: how an applied one was clipped.

        Raises:
            HealthError: a verdict of `health.stop_on` was raised.
        """
        record = fast_record(self.trainer, self.parameters, work, reading, verdict, clip)
        self._count(work.epoch, record)
        if self.ring is not None:
            self.ring.write(record)
        self._look_at_waiting()
        self._queue(record)
        explained: set[str] = set()
        findings = self._changed_types()
        if record.was_applied:
            if self.fires is not None:
                findings += self.fires.look(self.trainer.accumulation.pieces, self.allowed | self.expected_frozen)
            findings += self.connections.look(record, self.expected_frozen, explained)
            norm_findings = self.norms.look(record)
            self._speak(record.step, (*FAST_VERDICTS, "EXPLODING"), findings + norm_findings)
        else:
            self._speak(record.step, (), findings)
        if self.headroom is not None:
            self._tell_once("headroom", record.step, headroom_text(self.headroom.turn(record.step)))
        self.thresholds.settle(record.step)
        self.latest = Measurement(record)
        for listener in self.listeners:
            listener(self.latest)
        self._look_at_waiting()
        self._schedule()

    def audit(self) -> AuditReport | None:
        """Look whether everything that is trained learns, mend what can be mended, and tell; None when it is off.

        Raises:
            HealthError: something does not learn and cannot be mended (with `health.audit = "repair"`), or a text
                encoder that is to be trained is not reached (always).
        """
        if self.config.audit == "off":
            return None
        repairs: tuple[Repair, ...] = ()
        report = audit(self.trainer, self._awake(), self.allowed)
        if not report.sound and self.config.audit == "repair":
            report, repairs = repair(self.trainer, self._awake(), self.allowed, report)
            self.rebase()
        step, bus = self.trainer.state.step, self.trainer.bus
        for one in repairs:
            bus.emit(Intervention(step=step, action=one.action, reason="the check before the first step"))
        dead = any(finding.kind in ("TE1-DEAD", "TE2-DEAD") for finding in report.findings)
        if not report.sound and (dead or self.config.audit == "repair"):
            raise refusal(report, repairs)
        for finding in report.findings:
            self._tell(step, Transition(finding, over=False))
        return report

    def optimizer_was_reset(self) -> None:
        """The optimizer's state is dropped on purpose (a rung of the ladder): no STATE-LOST follows."""
        self.slow.optimizer_was_reset()

    def refresh(self) -> None:
        """Trained tensors were replaced."""
        self._refresh()
        self.probe.live = self._live()

    def expect_frozen(self, names: frozenset[str], source: str = "freezing") -> None:
        """Tensors that `source` keeps from moving on purpose: no FROZEN or DISCONNECTED follows."""
        self._frozen_by[source] = names
        self.expected_frozen = frozenset(name for group in self._frozen_by.values() for name in group)

    def rebase(self) -> None:
        """What is trained now counts as the run's beginning: tensors and their number formats."""
        self.refresh()
        self._dtypes = {name: parameter.dtype for name, parameter in self.parameters.items()}

    def verdicts(self) -> list[Finding]:
        """Open verdicts, the gravest first."""
        return sorted((held.finding for held in self.alerts.open.values()), key=lambda finding: finding.rank)

    def state_dict(self) -> dict[str, Any]:
        """JSON-safe. A measurement that still waits is looked at first."""
        self._look_at_waiting(everything=True)
        return {
            "alerts": self.alerts.state_dict(),
            "streaks": self.streaks.state_dict(),
            "thresholds": self.thresholds.state_dict(),
            "norms": self.norms.state_dict(),
            "slow": self.slow.state_dict(),
            "watch_until": self._watch_until,
            "epoch": list(self._epoch),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.probe.forget(everything=True)
        self.alerts.load_state_dict(state["alerts"])
        self.streaks.load_state_dict(state["streaks"])
        self.thresholds.load_state_dict(state["thresholds"])
        self.norms.load_state_dict(state["norms"])
        self.slow.load_state_dict(state["slow"])
        self._watch_until = int(state["watch_until"])
        epoch, steps, clipped, rejected = state["epoch"]
        self._epoch = (int(epoch), int(steps), int(clipped), int(rejected))
        self.probe.due = True

    # ------------------------------------------------------------------------------------------------ measuring

    def _refresh(self) -> None:
        network = self.trainer.parts.network
        parts = {name: part for part in network.parts for name in network.parameters_of(part)}
        self.parameters = {name: p for part in network.parts for name, p in network.parameters_of(part).items()}
        if self.tensors.keys() != parts.keys():
            self.tensors.clear()
            self.tensors.update({name: describe(name, part) for name, part in parts.items()})

    def _awake(self) -> dict[str, Tensor]:
        """Tensors that are not frozen on purpose."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.expected_frozen}

    def _live(self) -> list[tuple[Tensor, torch.nn.Parameter]]:
        return [(self.tensors[name], parameter) for name, parameter in self.parameters.items()]

    def _open_ring(self, folder: Path | None) -> RingWriter | None:
        if folder is None or self.config.ring_steps == 0:
            return None
        config = self.trainer.config
        losses = config.dataset.batch_size * config.gradient.accumulation
        return RingWriter(folder / RING_NAME, list(self.parameters), slots=self.config.ring_steps, losses=losses)

    def _freezing(self) -> Freezing | None:
        trainer, config = self.trainer, self.trainer.config.freezing
        if config.rule == "off" and not config.stop_after:
            return None
        freezing = Freezing(
            config,
            trainer.parts.optimizer,
            self.tensors,
            trainer.bus,
            total_steps=trainer.total_steps,
            step=lambda: trainer.state.step,
            tell_engine=self.expect_frozen,
        )
        self.listeners.append(freezing.measured)
        trainer.keepers["freezing"] = freezing
        return freezing

    def _schedule(self) -> None:
        """Whether the next step is measured in full."""
        config, coming = self.config, self.trainer.state.step + 1
        every = config.slow_every_early if coming <= config.early_steps else config.slow_every
        watched = coming <= self._watch_until or self.trainer.parts.precision.phases.watching
        if watched or coming % every == 0:
            self.probe.due = True
        if self.probe.due:
            self.refresh()

    def _queue(self, record: FastRecord) -> None:
        """Keep the measurement of this step until it can be read."""
        if not self.probe.waiting:
            return
        if record.captions_dropped:
            self.probe.forget()  # says nothing: cross-attention and text encoders may rightly have no gradient
            self.probe.due = True
            return
        self.probe.bind(record)

    def _look_at_waiting(self, *, everything: bool = False) -> None:
        for record, slow in self.probe.ready(everything=everything):
            self._look_slowly(record, slow)

    def _look_slowly(self, record: FastRecord, slow: SlowRecord) -> None:
        explained: set[str] = set()
        for held in self.alerts.open.values():
            if held.finding.kind in FAST_VERDICTS:
                explained.update(held.finding.tensors)
        for rule in ("disconnected", "frozen", "frozen rate"):
            explained |= self.streaks.suspects(rule)
        silent = {part for part in ("te1", "te2") if self.streaks.count(f"{part} dead", part)}
        explained.update(name for name, tensor in self.tensors.items() if tensor.part in silent)
        findings = self.slow.look(slow, record, self.expected_frozen | self.allowed, explained)
        findings += self.norms.declining(explained)
        self._speak(record.step, (*SLOW_VERDICTS, "VANISHING"), findings)
        if self.trainer.parts.precision.scaled:
            unfit = [one for one in ranges(slow, self.tensors) if one.overflows_fp16 and not one.suits_fp16]
            self._tell_once("range", record.step, unfit_text(unfit))
        rows = health_rows(slow, self.tensors, self.alerts, *self._ratios())
        if self.record_rows is not None:
            self.record_rows(record.step, rows)
        self.latest = Measurement(record, rows, slow)
        for listener in self.listeners:
            listener(self.latest)

    def _changed_types(self) -> list[Finding]:
        """Trained tensors whose number format is another than at the start."""
        changed = [name for name, p in self.parameters.items() if p.dtype is not self._dtypes.get(name, p.dtype)]
        if not changed:
            return []
        return [Finding("DTYPE-CHANGED", "", tuple(changed), numbers={"tensors": len(changed)})]

    def _count(self, epoch: int, record: FastRecord) -> None:
        known, steps, clipped, rejected = self._epoch
        if known != epoch:
            steps = clipped = rejected = 0
        self._epoch = (epoch, steps + 1, clipped + (record.clip < 1.0), rejected + (not record.was_applied))

    def _ratios(self) -> tuple[float, float]:
        """Clipped and rejected share of the epoch's steps so far."""
        _, steps, clipped, rejected = self._epoch
        return (clipped / steps, rejected / steps) if steps else (0.0, 0.0)

    # ------------------------------------------------------------------------------------------------- speaking

    def _speak(self, step: int, looked: Sequence[str], findings: Sequence[Finding]) -> None:
        for transition in self.alerts.update(step, looked, findings):
            self._tell(step, transition)

    def _tell(self, step: int, transition: Transition) -> None:
        finding = transition.finding
        where = ", ".join(dict.fromkeys(name.partition(".")[0] for name in finding.tensors)) or finding.subject
        if transition.over:
            text, severity = over(finding), "ok"
        else:
            text, severity = sentence(finding), finding.severity
        self.trainer.bus.emit(Verdict(step=step, kind=finding.kind, where=where, sentence=text, severity=severity))
        if transition.over or severity == "info":
            return
        self._watch_until = step + self.config.watch_steps
        if finding.kind in self.config.stop_on:
            raise HealthError(f"Stopped at step {step}, as health.stop_on asks for {finding.kind}. {text}")
        if finding.kind == "EXPLODING":
            self._ask_for_recovery(step, text)

    def _tell_once(self, topic: str, step: int, text: str) -> None:
        """A warning that is no verdict, once a run."""
        if text and topic not in self._told:
            self._told.add(topic)
            self.trainer.bus.emit(Warned(step=step, topic=topic, message=text))

    def _ask_for_recovery(self, step: int, text: str) -> None:
        """Only where there is a ladder to climb: without one an exploding run would end here."""
        trainer = self.trainer
        has_ladder = trainer.config.safety.ladder and trainer.recover != trainer.halt
        if self.config.act and has_ladder and trainer.guard.trigger is None:
            trainer.ask_for_recovery(Trigger("EXPLODING", text, step))


def health_of(trainer: Trainer, database: RunDatabase | None, folder: Path) -> HealthEngine:
    """The engine of a run; a process without a record (not the first of several) keeps nothing on disk."""
    if database is None:
        return HealthEngine(trainer)
    return HealthEngine(trainer, record_rows=database.add_health, folder=folder)


def _layers(trainer: Trainer) -> dict[str, int]:
    encoders = trainer.parts.model.text_encoders
    return {f"te{number + 1}": int(encoder.config.num_hidden_layers) for number, encoder in enumerate(encoders)}
