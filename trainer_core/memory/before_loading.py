"""The estimate of a run, told before its model is loaded; one that cannot fit is refused with the cheapest change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..config import TrainConfig, part_rank, trained_parts
from ..errors import ResourceError
from ..events import Event, Warned
from ..models import inspect_model
from .estimate import GIB, SDXL_UNET, MemoryNeed, cheaper, sdxl_need

REFUSED_ABOVE = 1.15
"""Share of the device's memory above which the estimate, which is good to about a tenth, is believed to be right."""


def check_need(config: TrainConfig, device: torch.device, compute: str, emit: Callable[[Event], object]) -> None:
    """Say what the run of `config` will take on a GPU.

    Raises:
        ResourceError: it is far more than the device has, with what would bring it down.
    """
    if device.type != "cuda":
        return
    info = inspect_model(config.model.path, config_dir=config.model.config_dir)
    if info.parameters.get("unet") != SDXL_UNET:
        return
    capacity = torch.cuda.get_device_properties(device).total_memory
    asked = asked_of(config, compute, info.native_size)
    emit(Warned(topic="memory", message=told(sdxl_need(**asked), capacity)))
    refuse(asked, capacity)


def asked_of(config: TrainConfig, compute: str, native_size: int) -> dict[str, Any]:
    """The arguments of `sdxl_need` for a config."""
    side = config.dataset.resolution or (native_size, native_size)
    batch = config.dataset.batch_size
    wide = config.lora.preset == "attention"
    return {
        "targets": "attention" if wide else "all transformer layers (kohya's set)",
        "rank": part_rank(config.lora, "unet"),
        "batch": min(batch, config.memory.micro_batch or batch),
        "area": side[0] * side[1],
        "compute": compute,
        "recompute": config.precision.gradient_checkpointing,
        "text_cached": not {"te1", "te2"} & set(trained_parts(config)),
        "moment_bytes": 2.0 if "8bit" in config.optimizer.type else 8.0,
        "average": config.optimizer.ema_decay > 0,
        "eight_bit_base": config.precision.base_format != "compute",
    }


def told(need: MemoryNeed, capacity: float) -> str:
    """The estimate in a sentence, by part."""
    return f"Estimated memory: {'; '.join(need.lines())}, of {capacity / GIB:.1f} GiB on the device."


def refuse(asked: dict[str, Any], capacity: float) -> None:
    """ResourceError when the estimate is far above `capacity`."""
    need = sdxl_need(**asked)  # type: ignore[arg-type]
    if need.total <= REFUSED_ABOVE * capacity:
        return
    changes = cheaper(partial(sdxl_need), capacity, **asked)
    ways = "; ".join(f"{text}: {total / GIB:.1f} GiB" for text, total in changes) or "a smaller resolution or rank"
    raise ResourceError(
        f"This run needs about {need.total / GIB:.1f} GiB on the device, which has {capacity / GIB:.1f} GiB. "
        f"In order, each with the ones before it: {ways}."
    )
