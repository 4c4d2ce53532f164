"""What a bad step leads to, and what the user reads about it.

A poisoned picture is left out and the step computed again; the first hit of anything else is looked for; a second
failure of a picture puts it into quarantine. Every decision is an event with names in it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .distributed.together import agreed_trigger
from .errors import NonFiniteError
from .events import Intervention, StepRejected, Verdict
from .hardware.recheck import SpikeRecheck
from .health.culprit import FirstHit, bad_inputs, first_backward_hit, first_forward_hit, timestep_of
from .health.quarantine import Quarantine
from .health.stop_report import StepRow
from .optim.phases import ALERT, CALIBRATE, NORM_OVERFLOW, NORMAL, POISON, WEIGHTS, Change, Trigger
from .optim.reading import StepReading, nonfinite_weights
from .step_work import StepWork, plan_step

if TYPE_CHECKING:
    from .data.records import SampleRef
    from .optim.precision import StepVerdict
    from .trainer import Trainer

_MOST_NAMES = 8
_ROWS = 64
QUARANTINED = "QUARANTINED"


class StepGuard:
    """Looks after the bad steps of one trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.safety = trainer.config.safety
        self.quarantine = Quarantine(self.safety, len(trainer.parts.plan.items))
        trainer.keepers["quarantine"] = self.quarantine
        self.recheck = SpikeRecheck(trainer)
        self._before_step: dict[str, Any] | None = None
        """The quarantine before the present step, once that has counted something."""
        self.trigger: Trigger | None = None
        self.last_where = ""
        self.last_culprits: tuple[str, ...] = ()
        self.last_samples: tuple[str, ...] = ()
        self.tensor_hits: Counter[str] = Counter()
        self.sample_hits: Counter[str] = Counter()
        self.rows: deque[StepRow] = deque(maxlen=_ROWS)
        self.alarms: set[str] = set()
        """Open verdicts above a warning, by name: a checkpoint taken meanwhile is none to go back to."""

    def plan(self, epoch: int, group: list[tuple[SampleRef, ...]]) -> StepWork:
        """The next step, without quarantined pictures."""
        return plan_step(epoch, group, self.quarantine.excludes)

    def again(self, work: StepWork, reading: StepReading, verdict: StepVerdict) -> StepWork | None:
        """What to compute again before the step is decided: the same step when its gradients are suspicious, or what is
        left of it without pictures whose loss is not finite; None when it is to be decided as it is."""
        if self.recheck.wanted(reading, verdict):
            return work
        return self._without_poison(work, reading, verdict)

    def _without_poison(self, work: StepWork, reading: StepReading, verdict: StepVerdict) -> StepWork | None:
        """With an `agree` between processes nothing is left out: every rank would have to compute again."""
        bad = reading.bad_losses
        if verdict.kind != POISON or not self.safety.drop_samples or self.trainer.parts.precision.agree is not None:
            return None
        if len(bad) == len(work.refs):
            return None
        if self._before_step is None:
            self._before_step = self.quarantine.state_dict()
        for index in bad:
            ref = work.refs[index]
            cause = bad_inputs(self.trainer, work.epoch, ref)
            text = f"its {cause} hold NaN or infinity" if cause else "its loss is not finite, the others' are"
            self._hit(work, ref, text, dropped=True)
        return work.without(bad)

    def stopped(self) -> None:
        """The step was dropped half-way, as if it had never been begun: a resumed run counts its pictures again."""
        self.recheck.stopped()
        if self._before_step is not None:
            self.quarantine.load_state_dict(self._before_step)
            self._before_step = None

    def rejected(self, work: StepWork, reading: StepReading, verdict: StepVerdict) -> None:
        """Say that the step is rejected, with everything that is known about the cause.

        Before it is counted, and before its gradients go: the step may be computed again to find where it fails.
        """
        trainer = self.trainer
        state, phases = trainer.state, trainer.parts.precision.phases
        hit = self._first_hit(work, verdict)
        places = list(reading.bad_losses) or self._micro_batch_places(work, hit)
        refs = [work.refs[index] for index in places]
        if verdict.kind == POISON:
            self._count_poison(work, refs)
        reason = verdict.reason
        if hit is not None and not hit.reproduced:
            reason += "; computed again it was finite, so a transient fault (memory, heat, driver) is likely"
        where = hit.where if hit is not None else ""
        if where or phases.rejected_in_a_row == 0:  # the first of a row was looked at, and speaks for the rest of it
            self.last_where = where
        self.last_culprits = self._culprits(reading, verdict)
        self.last_samples = tuple(dict.fromkeys(self._file(ref) for ref in refs))
        self.tensor_hits.update(self.last_culprits)
        self.sample_hits.update(self.last_samples)
        trainer.bus.emit(
            StepRejected(
                step=state.step + 1,
                applied=state.applied,
                epoch=work.epoch,
                reason=reason,
                loss=reading.loss,
                grad_norm=reading.grad_norm,
                loss_scale=reading.loss_scale,
                rejected_steps=state.rejected + 1,
                in_a_row=phases.rejected_in_a_row + 1,
                culprits=self.last_culprits,
                samples=self.last_samples[:_MOST_NAMES],
                kind=verdict.kind,
                where=where,
                micro_batch=_micro_batch(work, reading, hit),
                timesteps=tuple(timestep_of(trainer, work.epoch, ref) for ref in refs[:_MOST_NAMES]),
                phase=phases.phase,
                rejected_share=phases.rejected_share,
            )
        )

    def nothing_left(self, work: StepWork, group: list[tuple[SampleRef, ...]]) -> None:
        """Every picture of the step is quarantined: it is told and counts as rejected, and says nothing about numbers.
        Before it is counted."""
        self._before_step = None
        trainer = self.trainer
        state, phases = trainer.state, trainer.parts.precision.phases
        files = tuple(dict.fromkeys(self._file(ref) for refs in group for ref in refs))
        trainer.bus.emit(
            StepRejected(
                step=state.step + 1,
                applied=state.applied,
                epoch=work.epoch,
                reason="every picture of this step is quarantined",
                loss=math.nan,
                grad_norm=math.nan,
                loss_scale=1.0,
                rejected_steps=state.rejected + 1,
                in_a_row=phases.rejected_in_a_row,
                samples=files[:_MOST_NAMES],
                kind=QUARANTINED,
                phase=phases.phase,
                rejected_share=phases.rejected_share,
            )
        )
        if self.quarantine.share > 0.5:
            kind = f"{len(self.quarantine.excluded)} of {self.quarantine.pictures} pictures are quarantined"
            self.trigger = Trigger(POISON, kind, state.step + 1)

    def decided(self, kind: str, reading: StepReading) -> None:
        """Let the phases know how the step was decided, and tell what that led to."""
        self._before_step = None
        trainer, state = self.trainer, self.trainer.state
        row = StepRow(state.step, state.attempt, kind, reading.loss, reading.grad_norm, reading.loss_scale)
        self.rows.append(row)
        change = trainer.parts.precision.phases.record(kind, reading.loss_scale)
        self._tell(change, reading, kind)
        if change.trigger is not None:
            self.trigger = replace(change.trigger, step=trainer.state.step)

    def failure(self, trigger: Trigger, more: str) -> NonFiniteError:
        """The error of a run that ends here."""
        step = self.trainer.state.step
        hit = self.last_where or ", ".join(self.last_culprits[:3])
        where = f" First hit: {hit}." if hit else ""
        pictures = f" Pictures of the last step: {', '.join(self.last_samples[:3])}." if self.last_samples else ""
        return NonFiniteError(
            f"Stopped at step {step}: {trigger.reason} ({trigger.kind}).{where}{pictures} {more}",
            step=step,
            sample_ids=self.last_samples,
        )

    def take_trigger(self) -> Trigger | None:
        """The trigger that waits, once; with several processes the same in all of them."""
        trigger, self.trigger = self.trigger, None
        processes = self.trainer.parts.processes
        return trigger if processes is None else agreed_trigger(processes, trigger)

    def files(self, refs: tuple[SampleRef, ...]) -> tuple[str, ...]:
        """Picture files of samples, in order."""
        return tuple(self._file(ref) for ref in refs)

    def _tell(self, change: Change, reading: StepReading, kind: str) -> None:
        step, bus = self.trainer.state.step, self.trainer.bus
        if change.entered == ALERT:
            where = self.last_where or ", ".join(self.last_culprits[:3])
            told = f" First hit: {where}." if where else ""
            pictures = f" Pictures: {', '.join(self.last_samples[:3])}." if self.last_samples else ""
            sentence = f"A step was rejected ({kind}).{told}{pictures} The next steps are watched closely."
            bus.emit(Verdict(step=step, kind="NON-FINITE", where=where, sentence=sentence, severity="warning"))
            if kind == NORM_OVERFLOW:
                sentence = "Gradients are finite and too large to be measured: training is exploding."
                bus.emit(Verdict(step=step, kind="EXPLODING", where=where, sentence=sentence, severity="warning"))
        elif change.entered == NORMAL:
            sentence = "Steps are applied again without trouble." if kind == "" else ""
            bus.emit(Verdict(step=step, kind="NON-FINITE", sentence=sentence, severity="ok"))
        if change.scale_alarm is not None:
            self._tell_scale(change.scale_alarm, reading)

    def _tell_scale(self, alarm: bool, reading: StepReading) -> None:
        phases = self.trainer.parts.precision.phases
        if not alarm:
            sentence, severity = f"The loss scale has come back to {reading.loss_scale:g}.", "ok"
        else:
            severity = "warning"
            sentence = (
                f"The loss scale is collapsing: {reading.loss_scale:g} now, {phases.reference_scale:g} when it was "
                "healthy. fp16 gradients overflow again and again; small ones are lost at such a scale. Try "
                "precision.compute = 'bf16', or a lower learning rate."
            )
        step = self.trainer.state.step
        self.trainer.bus.emit(Verdict(step=step, kind="SCALE-COLLAPSING", sentence=sentence, severity=severity))

    def _first_hit(self, work: StepWork, verdict: StepVerdict) -> FirstHit | None:
        """Compute the step again to find where it fails: outside the calibration, for the first of a row."""
        phases = self.trainer.parts.precision.phases
        if not self.safety.diagnose or phases.phase == CALIBRATE or phases.rejected_in_a_row > 0:
            return None
        if verdict.kind in (WEIGHTS, NORM_OVERFLOW):
            return None
        look = first_forward_hit if verdict.kind == POISON else first_backward_hit
        return look(self.trainer, work)

    def _micro_batch_places(self, work: StepWork, hit: FirstHit | None) -> list[int]:
        """Samples of the micro-batch that was hit, or all."""
        everything = range(len(work.refs))
        if hit is None or hit.micro_batch is None:
            return list(everything)
        return [place for place in everything if work.micro_batch_of(place) == hit.micro_batch]

    def _culprits(self, reading: StepReading, verdict: StepVerdict) -> tuple[str, ...]:
        if verdict.kind == WEIGHTS:
            return nonfinite_weights(self.trainer.parts.optimizer)[:_MOST_NAMES]
        return reading.bad_gradients[:_MOST_NAMES]

    def _count_poison(self, work: StepWork, refs: list[SampleRef]) -> None:
        """Every picture of the step failed. Bad inputs are a picture's own; with good ones it counts only after an
        applied step, because steps that fail one after the other (or right after a rung) are no picture's fault."""
        first = self.trainer.parts.precision.phases.applied_in_a_row > 0
        for ref in refs:
            cause = bad_inputs(self.trainer, work.epoch, ref)
            if cause:
                self._hit(work, ref, f"its {cause} hold NaN or infinity", dropped=False)
            elif first:
                self._hit(work, ref, "its loss is not finite", dropped=False)

    def _hit(self, work: StepWork, ref: SampleRef, reason: str, *, dropped: bool) -> None:
        hit = self.quarantine.hit(ref.key, self._file(ref))
        bus, step = self.trainer.bus, self.trainer.state.step + 1
        timestep = timestep_of(self.trainer, work.epoch, ref)
        if dropped:
            action = f"{hit.file} was left out of this step, which was computed again without it"
            bus.emit(Intervention(step=step, action=action, reason=f"{reason}; timestep {timestep}"))
        if hit.excluded:
            action = f"{hit.file} is quarantined: it is left out for the rest of the run"
            bus.emit(Intervention(step=step, action=action, reason=f"{reason}, {hit.count} times"))

    def _file(self, ref: SampleRef) -> str:
        return self.trainer.parts.plan.items[ref.item_index].file


def _micro_batch(work: StepWork, reading: StepReading, hit: FirstHit | None) -> int | None:
    """Number (from 1) of the micro-batch that failed first."""
    if hit is not None and hit.micro_batch is not None:
        return hit.micro_batch + 1
    return work.micro_batch_of(reading.bad_losses[0]) + 1 if reading.bad_losses else None
