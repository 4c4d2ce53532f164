"""The train loop: one guarded step at a time.

draw -> forward -> per-sample loss / samples in the whole step -> backward (accumulate) -> unscale once -> measure ->
verdict -> apply | reject | halt. Everything a step needs is a function of its number, so a resumed run needs no stream
state: step s is group s % steps_per_epoch of epoch s // steps_per_epoch.

Counters: a *micro-batch* is one forward and backward; a *step* is one decision and counts whether it was applied or
rejected; an *applied step* drives the learning-rate schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .accumulation import Accumulation
from .config import TrainConfig
from .distributed.alignment import EVERY, check_weights
from .distributed.reduction import Reduction
from .draws import Draws
from .errors import ResourceError
from .events import EventBus, PhaseChanged, StepFinished, Verdict
from .memory.guard import memory_gib
from .networks import DropoutDraws, Network
from .optim import (
    LiveWeights,
    Precision,
    StepReading,
    StepVerdict,
    effective_rates,
    learning_rate_factor,
    set_learning_rates,
)
from .optim.clip_watch import ClipWatch
from .optim.phases import Trigger
from .step_guard import StepGuard
from .step_work import StepWork, plan_step

if TYPE_CHECKING:
    from .data import Batch, BatchLoader, BatchPlan, SampleRef
    from .distributed.processes import Processes
    from .health.engine import HealthEngine
    from .memory.run_memory import RunMemory
    from .models import SDXLModel
    from .objective import Objective
    from .optim.clipping import Clip

_AVERAGE_DECAY = 0.98


@dataclass
class TrainState:
    """Counters of a run. `loss_avg` is the mean over applied steps, from the 50th on an exponential one (decay 0.98).

    `skipped`: steps' worth of data that rollbacks left out; step s sees the data of position s + skipped.
    """

    step: int = 0
    applied: int = 0
    rejected: int = 0
    attempt: int = 0
    skipped: int = 0
    micro_batches: int = 0
    samples: int = 0
    loss_avg: float | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrainState:
        return cls(**data)


class Keeper(Protocol):
    """Something that learns while a run goes on and must be in its checkpoints: JSON-safe state under a name."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class TrainerParts:
    """Everything a step works with; `build.py` puts it together."""

    model: SDXLModel
    network: Network
    optimizer: torch.optim.Optimizer
    precision: Precision
    objective: Objective
    plan: BatchPlan
    loader: BatchLoader
    device: torch.device
    weights: LiveWeights | None = None
    memory: RunMemory | None = None
    processes: Processes | None = None

    @property
    def live(self) -> LiveWeights:
        """The adapter's weights: trained, or averaged where something judges the run by an average."""
        if self.weights is None:
            self.weights = LiveWeights(self.optimizer)
        return self.weights


class Trainer:
    """Runs the steps of one run and tells the bus about each.

    Args:
        total_steps: planned steps; the learning-rate schedule's length.
        should_stop: polled between micro-batches; True drops the unfinished step.
        after_step: called after every decided step with its number (checkpoints, previews, validation).
    """

    def __init__(
        self,
        parts: TrainerParts,
        config: TrainConfig,
        bus: EventBus,
        *,
        total_steps: int,
        seed: int,
        should_stop: Callable[[], bool],
        after_step: Callable[[int], None],
    ) -> None:
        self.parts = parts
        self.config = config
        self.bus = bus
        self.total_steps = total_steps
        self.seed = seed
        self.should_stop = should_stop
        self.after_step = after_step
        self.state = TrainState()
        self.keepers: dict[str, Keeper] = {}
        """What else goes into checkpoints, by its name there ("health", "quarantine"); the loss scaler is "scaler"."""
        memory, processes = parts.memory, parts.processes
        self.accumulation = Accumulation(
            parts.precision,
            parts.optimizer,
            parts.device,
            compute_loss=self._compute_loss,
            area=self.area,
            should_stop=should_stop,
            ladder=None if memory is None else memory.ladder,
            context=None if memory is None else memory.context,
            reduction=None if processes is None else Reduction(processes),
        )
        self.measure: Callable[[StepWork], StepReading | None] = lambda work: self.accumulation.measure(work)
        """Gradients and reading of a step; `hardware/compile_check.py` puts its own in this place."""
        if memory is not None:
            self.keepers["memory"] = memory.ladder
        if config.lora.clamp > 0:
            parts.precision.read_along = parts.network.clamp_counts
        self.guard = StepGuard(self)
        self.clip_watch = ClipWatch()
        self.keepers["clip_watch"] = self.clip_watch
        self.health: HealthEngine | None = None
        """Watches gradients, weights and updates; see `health/engine.py`."""
        self.watches: list[Callable[[], None]] = []
        """Looks at the device, after every step."""
        self.lr_factor = 1.0
        """Factor of the escalation ladder on all learning rates."""
        self.recover: Callable[[Trigger], None] = self.halt
        """What to do between steps when they keep failing: go back and try a rung, or raise NonFiniteError."""

    @property
    def draws(self) -> Draws:
        """The draws of the present attempt; a rollback raises it."""
        return Draws(self.seed, self.state.attempt)

    def run(self) -> str:
        """Train to the planned end. Returns "finished" or "stopped".

        Raises:
            NonFiniteError: too many steps in a row had to be rejected.
        """
        self.bus.emit(PhaseChanged(step=self.state.step, phase="training", total=self.total_steps))
        self.parts.network.train()
        if self.parts.memory is not None and self.parts.memory.probes and self.state.step < self.total_steps:
            if self.parts.processes is not None:
                self.parts.processes.gate("probe")  # the first one may still be validating
            self.probe()
            self.parts.memory.probed()
        while self.state.step < self.total_steps:
            if self.parts.processes is not None:
                self.parts.processes.gate("step")
            if not self.train_step():
                return "stopped"
            self._look_around()
            trigger = self.guard.take_trigger()
            if trigger is None:
                self.after_step(self.state.step)
            else:
                self.recover(trigger)
        return "finished"

    def _look_around(self) -> None:
        """After a step: the device's health, memory under pressure, and whether all processes hold the same weights."""
        parts = self.parts
        for look in self.watches:
            look()
        if parts.memory is not None:
            parts.memory.after_step()
        if parts.processes is not None and self.state.applied % EVERY == 0:
            weights = [parameter for group in parts.optimizer.param_groups for parameter in group["params"]]
            check_weights(parts.processes, weights, self.state.step)

    def ask_for_recovery(self, trigger: Trigger) -> None:
        """Let the ladder act after the present step (for verdicts of gradient health)."""
        self.guard.trigger = trigger

    def halt(self, trigger: Trigger) -> None:
        """End the run.

        Raises:
            NonFiniteError: always.
        """
        raise self.guard.failure(
            trigger,
            "The adapter was not changed by these steps. Try precision.compute = 'bf16' (or 'fp32'), a lower learning "
            "rate, or leave out the pictures named here.",
        )

    def train_step(self) -> bool:
        """One step: accumulate, measure, decide. False when a stop was asked for; the step then never happened."""
        started = time.perf_counter()
        parts = self.parts
        epoch, group = self._position()
        work = self.guard.plan(epoch, group)
        while work.batches:
            reading = self.measure(work)
            if reading is None:
                parts.precision.abandon(parts.optimizer)
                self.guard.stopped()
                return False
            verdict = parts.precision.judge(parts.optimizer, reading)
            rest = self.guard.again(work, reading, verdict)
            if rest is None:
                self._decide(work, reading, verdict, started)
                return True
            parts.precision.redo(parts.optimizer, reading)
            work = rest
        self.guard.nothing_left(work, group)
        self.state.step += 1
        self.state.rejected += 1
        return True

    def _position(self) -> tuple[int, list[tuple[SampleRef, ...]]]:
        """Epoch and micro-batches of the next step. The last group of an epoch may be short."""
        accumulation = self.config.gradient.accumulation
        place = self.state.step + self.state.skipped
        epoch, index = divmod(place, self.parts.plan.steps_per_epoch(accumulation))
        batches = self.parts.plan.batches(epoch)
        return epoch, list(batches[index * accumulation : (index + 1) * accumulation])

    def probe(self) -> None:
        """Compute the largest batch once before the first step, so that memory ends now and not in an hour."""
        refs = self.parts.plan.largest_batch()
        self.accumulation.run(plan_step(0, [refs]))
        self.parts.precision.abandon(self.parts.optimizer)

    def area(self, refs: Sequence[SampleRef]) -> tuple[int, int]:
        return self.parts.plan.items[refs[0].item_index].bucket

    def _compute_loss(self, epoch: int, refs: Sequence[SampleRef]) -> torch.Tensor:
        return self.loss(epoch, self.load(epoch, tuple(refs)))

    def load(self, epoch: int, refs: tuple[SampleRef, ...]) -> Batch:
        """The micro-batch of `refs` as the present attempt sees it; the same again for the same arguments."""
        return self.parts.loader.load(
            epoch, refs, draws=self.draws, step=self.state.applied, total_steps=self.total_steps
        )

    def _decide(self, work: StepWork, reading: StepReading, verdict: StepVerdict, started: float) -> None:
        state, parts, before = self.state, self.parts, replace(self.state)
        if verdict.action != "apply":
            self.guard.rejected(work, reading, verdict)  # may compute the step again, so nothing is counted before
        state.step += 1
        state.micro_batches += len(work.batches)
        state.samples += len(work.refs)
        clip = None
        if verdict.action == "apply":
            try:
                clip = self._apply(work, reading, verdict, started)
            except ResourceError:
                self.state = before  # the step was not made, and a checkpoint of now must not say so
                raise
        else:
            parts.precision.reject(parts.optimizer, verdict, reading)
            state.rejected += 1
        self.guard.decided(verdict.kind, reading)
        if self.health is not None:
            self.health.observe(work, reading, verdict, clip)

    def loss(self, epoch: int, batch: Batch) -> torch.Tensor:
        """Weighted per-sample loss (B,) of a micro-batch, with gradients."""
        parts, draws = self.parts, self.draws
        parts.network.set_draws(DropoutDraws(draws, epoch, tuple(batch.sample_keys)))
        mean_BCHW, std_BCHW = batch.mean_BCHW.to(parts.device), batch.std_BCHW.to(parts.device)
        latents_BCHW = parts.objective.latents(mean_BCHW, std_BCHW, draws, epoch, batch.sample_keys)
        noised = parts.objective.noised(latents_BCHW, draws, epoch, batch.sample_keys)
        with parts.precision.autocast():
            context_BTD, pooled_BD = self._conditioning(batch)
            prediction_BCHW = parts.model.denoise(
                noised.noisy_BCHW, noised.timesteps_B, context_BTD, pooled_BD, batch.time_ids_B6.to(parts.device)
            )
        mask_B1HW = None if batch.masks_B1HW is None else batch.masks_B1HW.to(parts.device)
        return parts.objective.loss(prediction_BCHW, noised, batch.weights_B.to(parts.device), mask_B1HW)

    def _conditioning(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        if batch.context_BTD is not None and batch.pooled_BD is not None:
            return batch.context_BTD.to(self.parts.device), batch.pooled_BD.to(self.parts.device)
        from .models import encode_captions

        data = self.config.dataset
        embeds = encode_captions(
            self.parts.model,
            batch.captions,
            max_token_length=data.max_token_length,
            weighted=data.weighted_captions,
        )
        return embeds.context_BTD, embeds.pooled_BD

    def _update(self, reading: StepReading, verdict: StepVerdict) -> Clip:
        """Everything that an applied step changes in tensors, and nothing else: it may be made again."""
        parts = self.parts
        clip = parts.precision.update(parts.optimizer, reading, verdict)
        if self.config.lora.max_norm > 0:
            parts.network.apply_max_norm(self.config.lora.max_norm)
        parts.live.after_update()
        return clip

    def _apply(self, work: StepWork, reading: StepReading, verdict: StepVerdict, started: float) -> Clip:
        state, parts = self.state, self.parts
        base_rate = self.config.optimizer.learning_rate
        factor = learning_rate_factor(self.config.schedule, state.applied, self.total_steps, base_rate)
        set_learning_rates(parts.optimizer, factor * self.lr_factor)
        update = partial(self._update, reading, verdict)

        def settle(clip: Clip) -> None:
            parts.precision.settle(parts.optimizer, reading, clip, verdict)

        if parts.memory is not None:
            clip = parts.memory.update(update, settle)
        else:
            clip = update()
            settle(clip)
        state.applied += 1
        share = max(1.0 - _AVERAGE_DECAY, 1.0 / state.applied)  # else the first loss is a third of the mean after 50
        state.loss_avg = (1.0 - share) * (state.loss_avg or 0.0) + share * reading.loss
        seconds = time.perf_counter() - started
        state.seconds += seconds
        self.bus.emit(
            StepFinished(
                step=state.step,
                applied=state.applied,
                epoch=work.epoch,
                loss=reading.loss,
                loss_avg=state.loss_avg,
                grad_norm=reading.grad_norm,
                lr=effective_rates(parts.optimizer),
                loss_scale=reading.loss_scale,
                rejected_steps=state.rejected,
                samples_per_second=len(reading.loss_B) / seconds,
                seconds=seconds,
                eta_seconds=(self.total_steps - state.step) * state.seconds / state.applied,
                vram_gib=memory_gib(parts.device),
                clipped=clip.acted,
                clip_factor=clip.factor,
                left_out=self.guard.files(work.dropped) + verdict.left_out,
                phase=parts.precision.phases.phase,
                rejected_share=parts.precision.phases.rejected_share,
                clamp_rate=_share(reading.extra),
            )
        )
        share = clip.norm / reading.grad_norm if reading.grad_norm > 0 else 1.0
        for news in self.clip_watch.see(reading.grad_norm, share if clip.acted else 1.0):
            self.bus.emit(Verdict(step=state.step, kind=news.kind, sentence=news.sentence, severity=news.severity))
        return clip


def _share(counts: Sequence[float]) -> float | None:
    """Part of a whole from (part, whole); None when there is no whole."""
    return counts[0] / counts[1] if counts and counts[1] else None
