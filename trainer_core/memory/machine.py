"""What the machine says about slow moments: memory that is paged, a GPU that lowers its clock."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from .guard import MemoryReading, nvml_handle

_FAULTS_A_STEP = 64
"""Pages read back from disk in one step, above which the machine is paging."""
_FULL = 0.97
_HARMLESS_REASONS = 0x1 | 0x2
"""NVML's clock reasons that are no throttling: idle, and clocks set by an application."""


class Paging:
    """Whether the last step was slowed by paging: major page faults of this process (not on Windows, which counts
    others too), or a device so full that its driver may move memory to the host."""

    def __init__(self, read: Callable[[], MemoryReading | None], faults: Callable[[], int] | None = None) -> None:
        self._read = read
        self._faults = faults or major_faults
        self._before = self._faults()

    def __call__(self) -> bool:
        """Asked once a step."""
        now = self._faults()
        grown, self._before = now - self._before, now
        reading = self._read()
        full = reading is not None and reading.device_used > _FULL * reading.capacity
        return grown > _FAULTS_A_STEP or full


def major_faults() -> int:
    """Pages that this process had to wait for on disk so far; 0 where it is not known."""
    if sys.platform == "win32":
        return 0
    import resource

    return int(resource.getrusage(resource.RUSAGE_SELF).ru_majflt)


def is_throttled(device: torch.device) -> bool:
    """Whether NVML gives a reason why the GPU's clock is low; False without NVML."""
    if device.type != "cuda":
        return False
    handle = nvml_handle(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    if handle is None:
        return False
    import pynvml  # pyright: ignore[reportMissingModuleSource]

    try:
        reasons = int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    except pynvml.NVMLError:
        return False
    return bool(reasons & ~_HARMLESS_REASONS)
