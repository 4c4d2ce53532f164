"""Computing a model in float32 without holding it in float32: each layer's weights are widened while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def computing_in_float32(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the block all layers of `roots` compute in float32; their weights stay as they are.

    At most one layer's weights are held twice. For passes without gradients only. Layers that another object took
    over (adapters) must be free: adapters go on top, inside the block.
    """
    with ExitStack() as stack:
        for root in roots:
            for module in root.modules():
                if any(_is_narrow(weight) for weight in module._parameters.values()):
                    stack.enter_context(_widened(module))
        yield


def _is_narrow(weight: torch.Tensor | None) -> bool:
    return weight is not None and weight.is_floating_point() and weight.dtype != torch.float32


@contextmanager
def _widened(module: nn.Module) -> Iterator[None]:
    had_own = "forward" in module.__dict__
    original: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        narrow = dict(module._parameters)
        for name, weight in narrow.items():
            if weight is not None and _is_narrow(weight):
                module._parameters[name] = nn.Parameter(_float32(weight.detach()), requires_grad=False)
        try:
            return original(*(_wide(value) for value in args), **{key: _wide(value) for key, value in kwargs.items()})
        finally:
            module._parameters.update(narrow)

    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if had_own:
            module.forward = original  # type: ignore[method-assign]
        else:
            del module.__dict__["forward"]


def _float32(weight: torch.Tensor) -> torch.Tensor:
    """`weight` in float32; one that torchao keeps in 8 bits is widened first, as its own `float()` may not."""
    return (weight.dequantize() if hasattr(weight, "__tensor_flatten__") else weight).float()


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
