"""The train loop: one guarded step at a time.

draw -> forward -> per-sample loss / samples in the whole step -> backward (accumulate) -> unscale once -> measure ->
verdict -> apply | reject | halt. Everything a step needs is a function of its number, so a resumed run needs no stream
state: step s is group s % steps_per_epoch of epoch s // steps_per_epoch.

Counters: a *micro-batch* is one forward and backward; a *step* is one decision and counts whether it was applied or
rejected; an *applied step* drives the learning-rate schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .config import TrainConfig
from .draws import Draws
from .errors import NonFiniteError
from .events import EventBus, PhaseChanged, StepFinished, StepRejected
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
from .optim.precision import bad_samples, nonfinite_parameters

if TYPE_CHECKING:
    from .data import Batch, BatchLoader, BatchPlan, SampleRef
    from .models import SDXLModel
    from .objective import Objective

_AVERAGE_DECAY = 0.98


@dataclass
class TrainState:
    """Counters of a run. `loss_avg` is an exponential mean over applied steps (decay 0.98, started at the first)."""

    step: int = 0
    applied: int = 0
    rejected: int = 0
    attempt: int = 0
    micro_batches: int = 0
    samples: int = 0
    loss_avg: float | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrainState:
        return cls(**data)


class Control(Protocol):
    """What may be asked of a running trainer; see `runs.protocol.Commands`."""

    @property
    def stop_requested(self) -> bool: ...

    def poll(self) -> None: ...


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
        while self.state.step < self.total_steps:
            if not self.train_step():
                return "stopped"
            self.after_step(self.state.step)
        return "finished"

    def train_step(self) -> bool:
        """One step: accumulate, measure, decide. False when a stop was asked for; the step then never happened."""
        started = time.perf_counter()
        parts = self.parts
        epoch, group = self._position()
        files = self._accumulate(epoch, group)
        if files is None:
            parts.precision.abandon(parts.optimizer)
            return False
        reading = parts.precision.read(parts.optimizer)
        verdict = parts.precision.judge(reading)
        self.state.step += 1
        self.state.micro_batches += len(group)
        self.state.samples += len(files)
        if verdict.action == "apply":
            self._apply(reading, epoch, started)
        else:
            self._reject(reading, verdict, epoch, files)
        return True

    def _position(self) -> tuple[int, list[tuple[SampleRef, ...]]]:
        """Epoch and micro-batches of the next step. The last group of an epoch may be short."""
        accumulation = self.config.gradient.accumulation
        epoch, index = divmod(self.state.step, self.parts.plan.steps_per_epoch(accumulation))
        batches = self.parts.plan.batches(epoch)
        return epoch, list(batches[index * accumulation : (index + 1) * accumulation])

    def _accumulate(self, epoch: int, group: list[tuple[SampleRef, ...]]) -> list[str] | None:
        """Forward and backward of every micro-batch. Returns the files in order, or None when asked to stop."""
        samples = sum(len(refs) for refs in group)
        files: list[str] = []
        for refs in group:
            if self.should_stop():
                return None
            batch = self.parts.loader.load(
                epoch, refs, draws=self.draws, step=self.state.applied, total_steps=self.total_steps
            )
            self.parts.precision.backward(self.loss(epoch, batch), samples)
            files.extend(batch.files)
        return files

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

        length = self.config.dataset.max_token_length
        embeds = encode_captions(self.parts.model, batch.captions, max_token_length=length)
        return embeds.context_BTD, embeds.pooled_BD

    def _apply(self, reading: StepReading, epoch: int, started: float) -> None:
        state, parts = self.state, self.parts
        base_rate = self.config.optimizer.learning_rate
        factor = learning_rate_factor(self.config.schedule, state.applied, self.total_steps, base_rate)
        set_learning_rates(parts.optimizer, factor)
        clipped = parts.precision.apply(parts.optimizer, reading, self.config.gradient.max_norm)
        rates = effective_rates(parts.optimizer)
        if self.config.lora.max_norm > 0:
            parts.network.apply_max_norm(self.config.lora.max_norm)
        parts.live.after_update()
        state.applied += 1
        before = reading.loss if state.loss_avg is None else state.loss_avg
        state.loss_avg = _AVERAGE_DECAY * before + (1.0 - _AVERAGE_DECAY) * reading.loss
        seconds = time.perf_counter() - started
        state.seconds += seconds
        self.bus.emit(
            StepFinished(
                step=state.step,
                applied=state.applied,
                epoch=epoch,
                loss=reading.loss,
                loss_avg=state.loss_avg,
                grad_norm=reading.grad_norm,
                lr=rates,
                loss_scale=reading.loss_scale,
                rejected_steps=state.rejected,
                samples_per_second=len(reading.loss_B) / seconds,
                seconds=seconds,
                eta_seconds=(self.total_steps - state.step) * state.seconds / state.applied,
                vram_gib=memory_gib(parts.device),
                clipped=clipped,
            )
        )

    def _reject(self, reading: StepReading, verdict: StepVerdict, epoch: int, files: list[str]) -> None:
        state, precision = self.state, self.parts.precision
        culprits = nonfinite_parameters(self.parts.optimizer)
        samples = bad_samples(reading, files) or tuple(dict.fromkeys(files))
        precision.reject(self.parts.optimizer, verdict, reading)
        state.rejected += 1
        self.bus.emit(
            StepRejected(
                step=state.step,
                applied=state.applied,
                epoch=epoch,
                reason=verdict.reason,
                loss=reading.loss,
                grad_norm=reading.grad_norm,
                loss_scale=reading.loss_scale,
                rejected_steps=state.rejected,
                in_a_row=precision.rejected_in_a_row,
                culprits=culprits,
                samples=samples[:8],
            )
        )
        if verdict.action == "halt":
            raise NonFiniteError(halt_text(state.step, verdict, culprits, samples), step=state.step, sample_ids=samples)


def halt_text(step: int, verdict: StepVerdict, culprits: tuple[str, ...], samples: tuple[str, ...]) -> str:
    """What the user reads when the run gives up."""
    where = f" First parameters hit: {', '.join(culprits[:3])}." if culprits else ""
    pictures = f" Pictures of the last step: {', '.join(samples[:3])}." if samples else ""
    return (
        f"Stopped at step {step}: {verdict.reason}.{where}{pictures} The adapter was not changed by these steps. "
        "Try precision.compute = 'bf16' (or 'fp32'), a lower learning rate, or leave out the pictures named here."
    )


def memory_gib(device: torch.device) -> float:
    """Peak memory in GiB: allocated on the device, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import psutil

    return psutil.Process().memory_info().rss / 2**30
