"""Where a chain of gradients is cut: the first module whose input needs a gradient and whose output does not.

A module also counts as one whose output must need a gradient when an adapter that is trained sits inside it. Modules
that run with gradients switched off (no_grad, or the forward pass of a reentrant checkpoint) are reported as the
outermost such module. Hooks on every module: for diagnosis, not for training.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..models import SDXLModel

_REENTRANT = "None of the inputs have requires_grad=True"


@dataclass(frozen=True)
class Break:
    """`module`: its path, with the part in front; `cause`: what happened there, in words; `kind`: off, cut,
    reentrant.
    """

    module: str
    cause: str
    kind: str


@dataclass(frozen=True)
class _Call:
    module: str
    grad_on: bool
    input_needs: bool
    output_needs: bool
    grad_fn: str


class Chain:
    """The calls of one forward pass, in the order in which modules began."""

    def __init__(self, adapted: frozenset[str]) -> None:
        self.calls: list[_Call] = []
        self.reentrant = False
        self._adapted = adapted

    def first_break(self) -> Break | None:
        """The place of the cut; None when the chain is whole as far as modules show it."""
        off = next((call for call in self.calls if not call.grad_on and self._trained_inside(call.module)), None)
        if off is not None:
            if self.reentrant:
                text = (
                    f"{off.module} runs inside a reentrant checkpoint whose inputs need no gradient, so nothing in it "
                    "gets one; use_reentrant=False has no such limit"
                )
                return Break(off.module, text, "reentrant")
            return Break(off.module, f"{off.module} is computed with gradients switched off", "off")
        for call in self.calls:
            must = call.input_needs or call.module in self._adapted
            if must and not call.output_needs:
                text = f"the input of {call.module} needs a gradient and its output does not (a detach inside it)"
                if not call.input_needs:
                    text = f"{call.module} has an adapter that is trained, and its output needs no gradient"
                return Break(call.module, text, "cut")
        return None

    def _trained_inside(self, module: str) -> bool:
        return any(path == module or path.startswith(module + ".") for path in self._adapted)


@contextmanager
def watch_chain(model: SDXLModel, live: Mapping[str, torch.nn.Parameter]) -> Iterator[Chain]:
    """Record every module's call inside the block. `live`: the trained tensors."""
    adapted = frozenset(
        f"{part}.{path}"
        for part, root in model.parts.items()
        for path, module in root.named_modules()
        if _adapter(module)
    )
    chain = Chain(adapted)
    handles: list[Any] = []
    for part, root in model.parts.items():
        if part == "vae":
            continue
        for path, module in root.named_modules():
            handles.append(_hook(chain, f"{part}.{path}" if path else part, module))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield chain
        finally:
            for before, after in handles:
                before.remove()
                after.remove()
    chain.reentrant = any(_REENTRANT in str(warning.message) for warning in caught)


def _hook(chain: Chain, name: str, module: torch.nn.Module) -> tuple[Any, Any]:
    places: list[int] = []

    def before(_module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        places.append(len(chain.calls))
        chain.calls.append(_Call(name, torch.is_grad_enabled(), _needs((args, kwargs)), True, ""))

    def after(_module: torch.nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        place = places.pop()
        begun = chain.calls[place]
        chain.calls[place] = _Call(name, begun.grad_on, begun.input_needs, _needs(output), _function(output))

    return (
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    )


def _adapter(module: torch.nn.Module) -> bool:
    """Whether an adapter of ours sits on this layer."""
    owner = getattr(module.__dict__.get("forward"), "__self__", None)
    return owner is not None and owner is not module and any(p.requires_grad for p in owner.parameters())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _needs(value: Any) -> bool:
    return any(tensor.requires_grad for tensor in _tensors(value))


def _function(value: Any) -> str:
    found = next((tensor.grad_fn for tensor in _tensors(value) if tensor.grad_fn is not None), None)
    return "" if found is None else found.name()
