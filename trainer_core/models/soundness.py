"""Whether the weights of a loaded base model are finite: a damaged file is told when it is loaded.

Otherwise every step of the run would be rejected, and nothing would say why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import ModelFileError
from .sdxl import SDXLModel

_INFINITY_BITS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
"""Magnitude bits of infinity; every NaN is above it."""
_SIGN = 0x8000
_MOST_NAMES = 3
_PARTS = {"unet": "UNet", "te1": "text encoder 1", "te2": "text encoder 2", "vae": "VAE"}


def refuse_damaged(model: SDXLModel) -> None:
    """Look at every weight of the model once (about 0.2 s a GB on a CPU, less on a GPU).

    Raises:
        ModelFileError: some hold NaN or infinity; the parts, their number and the first names are told.
    """
    found = [
        (part, name)
        for part, module in (*model.parts.items(), ("vae", model.vae))
        for name in non_finite_tensors(module)
    ]
    if not found:
        return
    shown = ", ".join(f"{name} ({_PARTS[part]})" for part, name in found[:_MOST_NAMES])
    more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
    cause = "The file is damaged"
    if model.dtype == torch.float16 and any(part != "vae" for part, _ in found):
        cause = (
            "The file is damaged, or holds values above 65504 that fp16 cannot (then precision.compute = 'bf16' helps)"
        )
    raise ModelFileError(
        f"The base model '{model.source}' holds NaN or infinity in {len(found)} tensors: {shown}{more}. {cause}; "
        "nothing could be trained on it. Download it again, or use another one.",
        model.source,
    )


def non_finite_tensors(module: nn.Module) -> list[str]:
    """Names of floating-point parameters and buffers that hold NaN or infinity."""
    named = [(name, value.detach()) for name, value in _tensors(module) if value.is_floating_point() and value.numel()]
    if not named:
        return []
    if named[0][1].device.type == "cpu":
        return [name for name, value in named if not _finite_on_cpu(value)]
    largest = torch.stack([norm.float() for norm in torch._foreach_norm([value for _, value in named], math.inf)])
    flags = torch.isfinite(largest).tolist()
    return [name for (name, _), fine in zip(named, flags, strict=True) if not fine]


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _finite_on_cpu(value: torch.Tensor) -> bool:
    """Half precision is looked at as integers: 20 times faster than torch.isfinite there."""
    limit = _INFINITY_BITS.get(value.dtype)
    if limit is None or not value.is_contiguous():
        return bool(torch.isfinite(value).all())
    bits: Any = value.view(torch.int16).numpy()
    # As signed numbers positive values come out on top, as unsigned ones the negative ones.
    return int(bits.max()) < limit and (int(bits.view(np.uint16).max()) & ~_SIGN) < limit
