"""Everything a run does about memory, in one place for the trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..config_memory import MemoryConfig
from ..events import Event, Intervention, MemoryState, Warned
from ..models.frozen_base import store_base
from .activations import Held, Recompute, watched
from .guard import MemoryReading, Pressure, PressureGuard, device_memory
from .ladder import Area, MemoryLadder
from .latency import LatencyGuard, Shape, Slow, StepClock
from .machine import Paging, is_throttled
from .update_guard import UpdateGuard

if TYPE_CHECKING:
    from ..config import TrainConfig
    from ..models import SDXLModel
    from ..optim.ema import Ema
    from ..trainer import TrainerParts

T = TypeVar("T")


class RunMemory:
    """Ladder, pressure guard and update guard of one run.

    Args:
        emit: takes events; `step` is the number of decided steps.
        recomputing: activations are recomputed already.
        read: the device's numbers, None where there are none; a test injects its own.
    """

    def __init__(
        self,
        model: SDXLModel,
        optimizer: torch.optim.Optimizer,
        config: MemoryConfig,
        device: torch.device,
        emit: Callable[[Event], object],
        *,
        step: Callable[[], int],
        recomputing: bool = False,
        ema: Ema | None = None,
        read: Callable[[], MemoryReading | None] | None = None,
    ) -> None:
        self._emit = emit
        self._step = step
        self._device = device
        self._read = read or (lambda: device_memory(device))
        self.probes = config.probe == "true" or (config.probe == "auto" and device.type != "cpu")
        self.recompute = Recompute(model, config.gc_granularity, enabled=recomputing)
        self.ladder = MemoryLadder(
            micro_batch=config.micro_batch,
            recompute=self.recompute,
            offload=config.offload_activations,
            tell=self._intervened,
        )
        self.guard = PressureGuard(
            config.mem_guard_threshold,
            device,
            recompute=self.recompute,
            ladder=self.ladder,
            read=self._read,
            tell=self._pressed,
        )
        self.updates = UpdateGuard(optimizer, device, ema=ema, tell=self._intervened)
        self.on_counted: Callable[[Held], object] | None = None
        """Is given, once, the activations that the first forward kept for backward."""
        self._first = Held()
        self._counted_at = -1
        self.clock: StepClock | None = None
        """Takes the time of steps for the latency guard, where there is one."""
        self._latency = LatencyGuard()
        self._may_split = config.latency_split

    def context(self) -> AbstractContextManager[None]:
        """Around every forward; the first one is counted where somebody wants to know."""
        failures = self.ladder.failures
        if self.on_counted is not None and self._counted_at != failures and not self.ladder.offloading:
            self._counted_at, self._first = failures, Held()  # one that ran out of memory does not count
            return watched(self._first, smallest=0)
        return self.guard.context()

    def update(self, update: Callable[[], T], settle: Callable[[T], None]) -> T:
        """An update made whole or not at all; see `UpdateGuard`."""
        return self.updates.run(update, settle)

    def after_step(self) -> None:
        self._count()
        self.guard.after_step(self._step())
        if self.clock is not None and (took := self.clock.step()) is not None:
            slow = self._latency.observe(self._step(), *took)
            if slow is not None:
                self._slow(slow, took[0])

    def watch_latency(self, area: Callable[[Any], Area], load: Callable[..., T]) -> Callable[..., T]:
        """Switch the latency guard on. Returns `load`, the loader's, with its calls noted."""
        self.clock = StepClock(area, Paging(self._read), partial(is_throttled, self._device))
        return self.clock.timed(load)

    def _slow(self, slow: Slow, shape: Shape) -> None:
        """Say it and, where that is wanted and can help, cut the micro-batch."""
        self._emit(Warned(step=self._step(), topic="latency", message=slow.text))
        if not self._may_split or slow.cause != "paging":
            return
        area, samples = max(shape, key=lambda piece: piece[0][0] * piece[0][1] * piece[1])
        if self.ladder.split(samples, area):
            width, height = area
            self._intervened(
                f"Steps are slow because memory is paged: micro-batches of {width} x {height} are cut to "
                f"{self.ladder.limits[area]}; a step's pictures, draws and mean stay the same"
            )

    def probed(self) -> None:
        """The largest batch was tried: say what it took."""
        held = self._count()
        self._state("the largest batch was tried before the first step", held)

    def _count(self) -> Held:
        held = self._first
        if self.on_counted is not None and held.bytes:
            self.on_counted(held)
            self.on_counted = None
        return held

    def _intervened(self, text: str) -> None:
        self._emit(Intervention(step=self._step(), action=text, reason="memory"))
        self._state(text)

    def _pressed(self, pressure: Pressure) -> None:
        share = pressure.reading.peak_allocated / pressure.reading.capacity
        text = f"{share:.0%} of the device's memory was needed: {pressure.action}"
        self._emit(Intervention(step=self._step(), action=text, reason="memory"))
        self._say(pressure.reading, text, pressure.evictable_tensors, pressure.evictable_bytes)

    def _state(self, text: str, held: Held | None = None) -> None:
        reading, held = self._read(), held or Held()
        if reading is not None:
            self._say(reading, text, held.tensors, held.bytes)

    def _say(self, reading: MemoryReading, text: str, tensors: int = 0, size: int = 0) -> None:
        self._emit(
            MemoryState(
                step=self._step(),
                peak_allocated=reading.peak_allocated,
                current_reserved=reading.current_reserved,
                evictable_tensors=tensors,
                evictable_bytes=size,
                capacity=reading.capacity,
                detail=text,
            )
        )


def memory_of(
    parts: TrainerParts, config: TrainConfig, emit: Callable[[Event], object], step: Callable[[], int]
) -> RunMemory:
    """What the run of `config` does about memory; `step` tells the number of decided steps."""
    live = parts.loader.texts is None or bool({"te1", "te2"} & set(parts.network.parts))
    place_text_encoders(parts.model, config.memory.text_encoders, live=live)
    store_base(parts.model, config.precision.base_format)
    memory = RunMemory(
        parts.model,
        parts.optimizer,
        config.memory,
        parts.device,
        emit,
        step=step,
        recomputing=config.precision.gradient_checkpointing,
        ema=parts.live.ema,
    )
    if config.memory.latency_guard:
        plan = parts.plan
        parts.loader.load = memory.watch_latency(  # type: ignore[method-assign]
            lambda refs: plan.items[refs[0].item_index].bucket, parts.loader.load
        )
    return memory


def place_text_encoders(model: SDXLModel, where: str, *, live: bool) -> None:
    """Move the text encoders to host memory where `memory.text_encoders` says so. Captions are then encoded on the
    processor; what was cached stays as it is. `live`: they run, or may run, in every step."""
    if where == "host" or (where == "auto" and not live):
        for encoder in model.text_encoders:
            encoder.to("cpu")  # type: ignore[arg-type]  # transformers' own signature
