"""Everything a run does about memory, in one place for the trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

import torch

from ..config_memory import MemoryConfig
from ..events import Event, Intervention, MemoryState
from .activations import Recompute
from .guard import MemoryReading, Pressure, PressureGuard, device_memory
from .ladder import MemoryLadder
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

    def context(self) -> AbstractContextManager[None]:
        """Around every forward."""
        return self.guard.context()

    def update(self, update: Callable[[], T], settle: Callable[[T], None]) -> T:
        """An update made whole or not at all; see `UpdateGuard`."""
        return self.updates.run(update, settle)

    def after_step(self) -> None:
        self.guard.after_step(self._step())

    def probed(self) -> None:
        """The largest batch was tried: say what it took."""
        self._state("the largest batch was tried before the first step")

    def _intervened(self, text: str) -> None:
        self._emit(Intervention(step=self._step(), action=text, reason="memory"))
        self._state(text)

    def _pressed(self, pressure: Pressure) -> None:
        share = pressure.reading.peak_allocated / pressure.reading.capacity
        text = f"{share:.0%} of the device's memory was needed: {pressure.action}"
        self._emit(Intervention(step=self._step(), action=text, reason="memory"))
        self._say(pressure.reading, text, pressure.evictable_tensors, pressure.evictable_bytes)

    def _state(self, text: str) -> None:
        reading = self._read()
        if reading is not None:
            self._say(reading, text)

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
    return RunMemory(
        parts.model,
        parts.optimizer,
        config.memory,
        parts.device,
        emit,
        step=step,
        recomputing=config.precision.gradient_checkpointing,
        ema=parts.live.ema,
    )
