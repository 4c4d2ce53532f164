"""Activations that need not stay on the device between forward and backward: recomputed, or kept in host memory.

Recompute comes first: for SDXL it costs about 4.4 TFLOP a sample, while moving the same activations over PCIe and back
takes ten times longer. What is left afterwards are the boundaries between recomputed units, and those are worth moving.
Neither changes a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from ..models import SDXLModel

SMALLEST_BYTES = 1 << 20
"""Smaller tensors are not worth a transfer."""


class Recompute:
    """Switches recomputation on, unit by unit: the UNet's own checkpointing units, the largest first.

    Args:
        granularity: "layer" = one unit at a time, "module" = all units of one UNet block, "global" = everything,
            text encoders included.
    """

    def __init__(self, model: SDXLModel, granularity: str, *, enabled: bool = False) -> None:
        self._model = model
        self._steps = [] if enabled else _steps(model, granularity)
        self._prepared = enabled
        self.active = 0
        self.total = len(self._steps)

    @property
    def exhausted(self) -> bool:
        return self.active >= self.total

    def more(self) -> str:
        """Recompute one more step of units; returns what, in words. Nothing is left when `exhausted`."""
        name, units = self._steps[self.active]
        self.active += 1
        if not self._prepared:
            # Installs the recompute function everywhere and sets train mode; then all units off again.
            self._model.set_gradient_checkpointing(True, self._parts)
            for unit in _units(self._model.unet):
                unit.gradient_checkpointing = False  # type: ignore[assignment] - diffusers' flag
            self._prepared = True
        for unit in units:
            unit.gradient_checkpointing = True  # type: ignore[assignment]
        return name

    def everything(self) -> None:
        """Recompute all that is left."""
        while not self.exhausted:
            self.more()

    @property
    def _parts(self) -> tuple[str, ...]:
        whole = bool(self._steps) and self._steps[0][0] == _EVERYTHING
        return ("unet", "te1", "te2") if whole else ("unet",)


_EVERYTHING = "the whole model"


def _units(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.modules() if hasattr(child, "gradient_checkpointing")]


def _steps(model: SDXLModel, granularity: str) -> list[tuple[str, Sequence[nn.Module]]]:
    """Named steps of units. Outer blocks hold the largest pictures, so they come first."""
    unet: Any = model.unet
    if granularity == "global":
        return [(_EVERYTHING, _units(unet))]
    blocks: list[tuple[str, nn.Module]] = []
    downs, ups = list(unet.down_blocks), list(unet.up_blocks)
    for index, down in enumerate(downs):
        blocks.append((f"down_blocks.{index}", down))
        if index < len(ups):
            at = len(ups) - 1 - index
            blocks.append((f"up_blocks.{at}", ups[at]))
    if unet.mid_block is not None:
        blocks.append(("mid_block", unet.mid_block))
    if granularity == "module":
        return [(name, _units(block)) for name, block in blocks if _units(block)]
    names = {id(module): name for name, module in unet.named_modules()}
    return [(names[id(unit)], [unit]) for _, block in blocks for unit in _units(block)]


def _is_weight(tensor: torch.Tensor) -> bool:
    """A parameter, or a view of one (a linear layer keeps its weight transposed)."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


@dataclass
class Held:
    """Activations of the forwards under `watched`: how many tensors of 1 MiB and more, and their bytes."""

    tensors: int = 0
    bytes: int = 0


@contextmanager
def watched(held: Held, smallest: int = SMALLEST_BYTES) -> Iterator[None]:
    """Count the activations that are kept for backward, each storage once; changes nothing."""
    seen: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        identity = storage._cdata  # a meta tensor has no address; what is kept for backward stays alive meanwhile
        if not _is_weight(tensor) and storage.nbytes() >= smallest and identity not in seen:
            seen.add(identity)
            held.tensors += 1
            held.bytes += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


@contextmanager
def offloaded(smallest: int = SMALLEST_BYTES) -> Iterator[None]:
    """Keep activations of `smallest` bytes and more in host memory until backward asks for them.

    On a GPU the copies go to pinned memory. Parameters stay where they are: they are not activations. Slices and
    broadcasts are copied as they are looked at, so a tensor may take more room in host memory than on the device.
    """

    def pack(tensor: torch.Tensor) -> Any:
        if _is_weight(tensor) or tensor.numel() * tensor.element_size() < smallest:
            return tensor
        if not tensor.is_cuda:
            return tensor.device, tensor.detach().clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return tensor.device, host.copy_(tensor.detach(), non_blocking=True)

    def unpack(kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        device, host = kept
        if device.type == "cuda":
            return host.to(device, non_blocking=True)
        return host

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
