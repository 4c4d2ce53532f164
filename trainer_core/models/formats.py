"""Changing the number format of a loaded base model, and whether a device can compute in it."""

from __future__ import annotations

import torch
from torch import nn

from .cpu_convolution import compute_convolutions_in_fp32, has_native
from .sdxl import SDXLModel

_SPARE = 1.1
"""Free memory wanted for a larger format, as a multiple of what it adds."""


def convert_base(model: SDXLModel, dtype: torch.dtype) -> None:
    """Give UNet and text encoders another type, in place. What is trained stays float32, wherever it is attached.

    The same from a loaded file and from a running model: types are changed step by step from the loaded one.
    """
    if model.dtype == dtype:
        return
    for part in model.parts.values():
        for module in part.modules():
            _convert(module, dtype)
    model.dtype = dtype
    if model.device.type == "cpu" and not has_native(dtype):
        compute_convolutions_in_fp32(model.unet)


def why_not(model: SDXLModel, dtype: torch.dtype) -> str:
    """Why the device cannot compute in `dtype` with this model; empty when it can."""
    device = model.device
    if (
        dtype == torch.bfloat16
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        return f"{torch.cuda.get_device_name(device)} has no bf16"
    size = torch.finfo(dtype).bits // 8 - torch.finfo(model.dtype).bits // 8
    if size <= 0:
        return ""
    more = size * sum(value.numel() for part in model.parts.values() for value in _own(part))
    free = _free_bytes(device)
    if free is not None and more * _SPARE > free:
        return f"it needs {more / 2**30:.1f} GiB more memory, {free / 2**30:.1f} GiB are free"
    return ""


def _own(part: nn.Module) -> list[torch.Tensor]:
    """Frozen floating-point weights and buffers."""
    frozen = [parameter for parameter in part.parameters() if not parameter.requires_grad]
    return [value for value in (*frozen, *part.buffers()) if value.is_floating_point()]


def _convert(module: nn.Module, dtype: torch.dtype) -> None:
    for parameter in module.parameters(recurse=False):
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            setattr(module, name, buffer.to(dtype))


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    if device.type == "cpu":
        import psutil

        return int(psutil.virtual_memory().available)
    return None
