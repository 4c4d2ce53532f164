"""Config section of memory: how much a step may take, and what is done when it is too much."""

from __future__ import annotations

from dataclasses import dataclass

from .config_option import option

GRANULARITIES = ("layer", "module", "global")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """None of this changes what is computed: the same pictures, draws and mean over the whole step."""

    micro_batch: int = option(
        0, "samples in one forward and backward at most; the batch is cut, its result stays; 0 = the whole batch", min=0
    )
    mem_guard_threshold: float = option(
        0.85,
        "share of the device's memory above which activations are recomputed or moved away; 0 = off",
        min=0.0,
        max=1.0,
    )
    gc_granularity: str = option(
        "module",
        "how much the guard recomputes at a time: one layer, one UNet block, everything",
        choices=GRANULARITIES,
    )
    probe: str = option(
        "auto", "try the largest batch before the first step; auto = on a GPU", choices=("auto", "true", "false")
    )
    offload_activations: bool = option(
        False, "keep activations of 1 MiB and more in host memory between forward and backward: slow, saves most"
    )
    text_encoders: str = option(
        "auto",
        "where text encoders lie after caching: auto = in host memory once their outputs are cached; host = always "
        "there, not with trained ones",
        choices=("auto", "device", "host"),
        advanced=True,
    )
    latency_guard: bool = option(
        False, "tell when 20 steps in a row take 3 times as long as such steps did, with the cause", advanced=True
    )
    latency_split: bool = option(
        False, "with latency_guard: halve the micro-batch when the cause is paging; the step stays", advanced=True
    )
