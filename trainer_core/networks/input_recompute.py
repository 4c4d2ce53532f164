"""Adapters without the memory for their inputs.

The gradient of `lora_down` needs the layer's input, which a frozen layer alone does not keep. Most inputs are cheap
functions of something that is kept anyway: a layer norm's output of its input, GEGLU's of its projection, CLIP's
activation of its argument. Such inputs are computed again in the backward pass instead of being kept. The values are
the same, bit for bit, so gradients are too.

Under gradient checkpointing nothing is kept between blocks, so the inputs are not recomputed a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_ATTRIBUTE = "_safe_scaler_source"
Function = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Source:
    """How a tensor came about: `function(tensor)`, cheap and deterministic, with `tensor` kept by autograd anyway."""

    function: Function
    tensor: torch.Tensor


def source_of(x: torch.Tensor) -> Source | None:
    """Where `x` came from, None when that is not known or not needed (no gradients, torch.compile)."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    return getattr(x, _ATTRIBUTE, None)


class RecomputedLinear(torch.autograd.Function):
    """x @ weight.T that keeps the source of `x` for backward in place of `x`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor, function: Function
    ) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(kept, weight)
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        grad = grads[0]
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
        if ctx.needs_input_grad[1]:
            with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
                x = ctx.function(kept).to(grad.dtype)
            grad_weight = grad.flatten(0, -2).T @ x.flatten(0, -2)
        return grad_x, grad_weight, None, None


class InputSources:
    """Hooks on a model that note where the inputs of linear layers come from; `remove` takes them off."""

    def __init__(self, roots: list[nn.Module]) -> None:
        self._handles = [handle for root in roots for handle in _install(root)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _install(root: nn.Module) -> Iterator[Any]:
    for path, module in root.named_modules():
        if isinstance(module, nn.LayerNorm):
            switch = _Switch(root, path)
            yield module.register_forward_pre_hook(_widen_once(switch))
            yield module.register_forward_hook(_note(_norm_function(module), switch))
        elif _is_geglu(module):
            yield from _install_geglu(module, _Switch(root, path))
        elif path.endswith(".activation_fn"):
            yield module.register_forward_hook(_note(module.forward, _Switch(root, path)))


class _Switch:
    """Whether sources are wanted now: not where a module on the way to `path` recomputes everything anyway."""

    def __init__(self, root: nn.Module, path: str) -> None:
        parts = path.split(".")
        above = [root, *(root.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts) - 1))]
        self._holders = [module for module in above if hasattr(module, "gradient_checkpointing")]

    @property
    def on(self) -> bool:
        return torch.is_grad_enabled() and not any(holder.gradient_checkpointing for holder in self._holders)


def _note(function: Function, switch: _Switch) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if switch.on and not torch.compiler.is_compiling() and isinstance(output, torch.Tensor):
            setattr(output, _ATTRIBUTE, Source(function, inputs[0]))

    return hook


def _widen_once(switch: _Switch) -> Callable[..., tuple[Any, ...] | None]:
    """On CUDA autocast runs layer norms in float32 and keeps a float32 copy of their input: make that copy here, so
    that the adapters can keep the same one."""

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x = inputs[0] if inputs else None
        if not isinstance(x, torch.Tensor) or x.device.type != "cuda" or x.dtype == torch.float32:
            return None
        return (x.float(), *inputs[1:]) if torch.is_autocast_enabled("cuda") and switch.on else None

    return hook


def _norm_function(norm: nn.LayerNorm) -> Function:
    def function(x: torch.Tensor) -> torch.Tensor:
        # Autocast hands float32 weights to a float32 input; without autocast the types already agree.
        weight = None if norm.weight is None else norm.weight.to(x.dtype)
        bias = None if norm.bias is None else norm.bias.to(x.dtype)
        return functional.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)

    return function


def _is_geglu(module: nn.Module) -> bool:
    return type(module).__name__ == "GEGLU" and isinstance(getattr(module, "proj", None), nn.Linear)


def _install_geglu(module: nn.Module, switch: _Switch) -> Iterator[Any]:
    """GEGLU keeps its projection's output (as two halves); its own output is hidden * gelu(gate) of these."""
    last: list[torch.Tensor] = []

    def remember(projection: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        last[:] = [output] if switch.on and not torch.compiler.is_compiling() else []

    def function(projected: torch.Tensor) -> torch.Tensor:
        hidden, gate = projected.chunk(2, dim=-1)
        return hidden * functional.gelu(gate)

    def note(geglu: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        if last:
            setattr(output, _ATTRIBUTE, Source(function, last.pop()))

    yield module.get_submodule("proj").register_forward_hook(remember)
    yield module.register_forward_hook(note)
