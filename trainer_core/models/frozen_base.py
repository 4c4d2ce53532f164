"""The frozen linear layers of the UNet's transformers kept in 8 bits, by torchao's weight-only formats.

Weights are rounded once, row by row with a scale of their own, and widened again when a layer computes; gradients of
the inputs are those of the rounded weights. What is trained stays fp32. For SDXL these 722 layers are 86 % of the UNet.
The rounding changes what the adapter is trained against, so this is an option, off by default.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import ResourceError

if TYPE_CHECKING:
    from .sdxl import SDXLModel

FORMATS = ("compute", "int8", "fp8")
INSTALL = "pip install torchao"


def is_available() -> bool:
    """Whether torchao is installed."""
    return find_spec("torchao") is not None


def store_base(model: SDXLModel, kind: str) -> int:
    """Round the linear layers inside the UNet's transformers to `kind`, in place; returns how many.

    Raises:
        ResourceError: torchao is missing, or cannot do it here.
    """
    if kind == "compute":
        return 0
    if not is_available():
        raise ResourceError(f"precision.base_format = {kind} needs torchao. Install it: {INSTALL}")
    from torchao.quantization import (  # pyright: ignore[reportMissingImports]
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    layers = {id(layer) for layer in transformer_layers(model.unet)}
    try:
        config = Int8WeightOnlyConfig() if kind == "int8" else Float8WeightOnlyConfig()
        quantize_(model.unet, config, filter_fn=lambda module, name: id(module) in layers)
    except (RuntimeError, NotImplementedError, AssertionError, TypeError) as error:
        raise ResourceError(
            f"torchao cannot keep the base in {kind} here: {str(error).splitlines()[0]} Use precision.base_format = "
            "compute, or the other format."
        ) from error
    for layer in transformer_layers(model.unet):
        layer.weight.requires_grad_(False)
        layer.register_forward_pre_hook(_in_weight_type)
    return len(layers)


def _in_weight_type(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Autocast does not reach into torchao's weights, so the input is cast here."""
    return (inputs[0].to(layer.weight.dtype), *inputs[1:])  # type: ignore[arg-type]


def transformer_layers(unet: nn.Module) -> list[nn.Linear]:
    """Linear layers inside the UNet's transformers: attention, feed-forward and projections."""
    return [module for path, module in unet.named_modules() if ".attentions." in path and isinstance(module, nn.Linear)]
