"""The pressure guard: acts before memory ends, by giving up what can be computed or fetched again.

Above the threshold it first recomputes activations, unit by unit, then moves those left to host memory, and gives
cached blocks back. Batch size, rank and resolution are never touched: no number changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from .activations import Held, watched
from .ladder import MemoryLadder, Recomputing
from .shortage import release

_AGAIN_AFTER = 50
"""Steps between two releases of cached blocks."""


@dataclass(frozen=True)
class MemoryReading:
    """Bytes. `peak_allocated`: the most this process's tensors took since the last reset; `current_reserved`: what its
    allocator holds; `device_used`: what all programs hold on the device; `capacity`: what the device has."""

    peak_allocated: int
    current_reserved: int
    device_used: int
    capacity: int


@dataclass(frozen=True)
class Pressure:
    """What the guard found and did. `evictable_tensors`: activations of 1 MiB and more of one micro-batch."""

    reading: MemoryReading
    evictable_tensors: int
    evictable_bytes: int
    action: str


class PressureGuard:
    """Looks at the device's memory after every step.

    Args:
        threshold: share of the capacity above which it acts; 0 = off.
        read: the present numbers; None where there are none (CPU).
        tell: is given every `Pressure`.
    """

    def __init__(
        self,
        threshold: float,
        device: torch.device,
        *,
        recompute: Recomputing,
        ladder: MemoryLadder,
        read: Callable[[], MemoryReading | None] | None = None,
        tell: Callable[[Pressure], object] = lambda pressure: None,
    ) -> None:
        self._threshold = threshold
        self._device = device
        self._recompute = recompute
        self._ladder = ladder
        self._read = read or (lambda: device_memory(device))
        self._tell = tell
        self._held: Held | None = None
        self._released = -_AGAIN_AFTER
        self._given_up = False

    def context(self) -> AbstractContextManager[None]:
        """Around every forward. Counts activations in the step before the guard acts."""
        if self._held is not None and not self._ladder.offloading:
            self._held.tensors = self._held.bytes = 0
            return watched(self._held)
        return self._ladder.context()

    def after_step(self, step: int) -> None:
        """Act when the step took too much. The first step above the threshold is followed by one that is counted."""
        if self._threshold <= 0 or self._given_up:
            return
        reading = self._read()
        if reading is None:
            return
        limit = self._threshold * reading.capacity
        if reading.peak_allocated > limit:
            if self._held is None:
                self._held = Held()
            else:
                self._act(reading)
            self._reset_peak()
        elif reading.device_used > limit and step - self._released >= _AGAIN_AFTER:
            self._released = step
            release(self._device)
            self._say(reading, "cached blocks are given back to the device")

    def _act(self, reading: MemoryReading) -> None:
        if not self._recompute.exhausted:
            action = f"activations of {self._recompute.more()} are recomputed from now on"
        elif not self._ladder.offloading:
            self._ladder.offloading = True
            action = "activations that are left wait in host memory from now on"
        else:
            self._given_up = True
            action = "everything that can be recomputed or moved already is; the run goes on close to the limit"
        release(self._device)
        self._say(reading, action)
        self._held = None

    def _say(self, reading: MemoryReading, action: str) -> None:
        held = self._held or Held()
        self._tell(Pressure(reading, held.tensors, held.bytes, action))

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)


def device_memory(device: torch.device) -> MemoryReading | None:
    """The allocator's numbers and the device's (NVML's where it is installed); None where there are none."""
    if device.type != "cuda":
        return None
    free, capacity = torch.cuda.mem_get_info(device)
    return MemoryReading(
        peak_allocated=torch.cuda.max_memory_allocated(device),
        current_reserved=torch.cuda.memory_reserved(device),
        device_used=_nvml_used(device) or capacity - free,
        capacity=capacity,
    )


def memory_gib(device: torch.device) -> float:
    """Peak memory in GiB: allocated on the device, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import psutil

    return psutil.Process().memory_info().rss / 2**30


def _nvml_used(device: torch.device) -> int | None:
    handle = nvml_handle(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    if handle is None:
        return None
    import pynvml  # pyright: ignore[reportMissingModuleSource]

    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


@functools.cache
def nvml_handle(uuid: str) -> Any:
    """NVML's handle of a device; None where NVML is not installed or does not know it."""
    try:
        import pynvml  # pyright: ignore[reportMissingModuleSource]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except (pynvml.NVMLError, AttributeError):
        return None
