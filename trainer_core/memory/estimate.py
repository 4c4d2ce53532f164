"""How much memory a run will take, part by part, before anything is loaded.

peak = base model + text encoders (not when their outputs are cached) + VAE + 16 N (adapter weights, gradients and two
moments in fp32; 10 N with 8-bit moments) + 4 N (average) + a x batch x area + working space + context.
`a`, the activations of one sample at 1024 x 1024, was counted for SDXL as the saved tensors of a forward
(reference/diagnostics.md sections 0 and 13); for other models they are counted by `count_activations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from .activations import Held, watched

if TYPE_CHECKING:
    from ..models import SDXLModel

GIB = 2**30
RANKS = (4, 8, 16, 32, 128)

SDXL_UNET = 2_567_463_684
"""Parameters of SDXL's UNet."""
SDXL_TRANSFORMERS = 2_207_744_000
"""Of them the weights of linear layers inside its transformers."""

SDXL_SETS: Mapping[str, tuple[int, int]] = {
    "attention": (560, 1_451_520),
    "all transformer layers (kohya's set)": (722, 2_659_840),
    "all layers of the blocks, convolutions too": (788, 3_074_240),
}
"""Target sets of SDXL's UNet: modules, and adapter parameters for each unit of rank."""

_ACTIVATIONS = {
    # set: (kept whole at rank 0, more for each unit of rank, recomputed) in GiB for one sample of 1024 x 1024
    "attention": (6.78, 0.0, 0.71),
    "all transformer layers (kohya's set)": (7.79, 0.0061, 0.79),
    "all layers of the blocks, convolutions too": (7.79, 0.0061, 0.79),
}
_TRANSIENT_GIB, _CONTEXT_GIB = 0.75, 0.9
_TEXT_PARAMETERS, _VAE_PARAMETERS = 817_720_320, 83_653_863
_DTYPE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "nf4": 0.55}


@dataclass(frozen=True)
class MemoryNeed:
    """What one run needs. `parameters`: trained numbers by part of the model; bytes everywhere else.

    `moment_bytes`: of the optimizer for each trained number (8 for AdamW in fp32, 2 for its 8-bit kind).
    """

    base: float
    text: float
    vae: float
    parameters: int
    activations: float
    moment_bytes: float = 8.0
    average: bool = False
    overhead: float = 0.0

    @property
    def adapter(self) -> float:
        """Weights, gradients, moments and, where it is kept, the average."""
        return self.parameters * (8.0 + self.moment_bytes + (4.0 if self.average else 0.0))

    @property
    def total(self) -> float:
        return self.base + self.text + self.vae + self.adapter + self.activations + self.overhead

    def lines(self) -> list[str]:
        """One line a part, in GiB."""
        parts = (
            ("base model", self.base),
            ("text encoders", self.text),
            ("VAE", self.vae),
            (f"adapter, gradients, optimizer ({self.parameters:,} numbers)", self.adapter),
            ("activations", self.activations),
            ("working space and context", self.overhead),
        )
        return [f"{name}: {size / GIB:.2f} GiB" for name, size in parts if size] + [
            f"together: {self.total / GIB:.2f} GiB"
        ]


def sdxl_need(
    *,
    targets: str = "all transformer layers (kohya's set)",
    rank: int = 16,
    batch: int = 1,
    area: int = 1024 * 1024,
    compute: str = "bf16",
    recompute: bool = True,
    text_cached: bool = True,
    moment_bytes: float = 8.0,
    average: bool = False,
    eight_bit_base: bool = False,
) -> MemoryNeed:
    """The need of SDXL itself on a GPU. `area`: pixels of the largest bucket; `batch`: samples of a micro-batch."""
    width = _DTYPE_BYTES[compute]
    narrow = SDXL_TRANSFORMERS if eight_bit_base else 0
    whole, per_rank, recomputed = _ACTIVATIONS[targets]
    each = recomputed if recompute else whole + per_rank * rank
    return MemoryNeed(
        base=(SDXL_UNET - narrow) * width + narrow,
        text=0.0 if text_cached else _TEXT_PARAMETERS * width,
        vae=_VAE_PARAMETERS * 4.0,
        parameters=SDXL_SETS[targets][1] * rank,
        activations=each * GIB * batch * area / (1024 * 1024),
        moment_bytes=moment_bytes,
        average=average,
        overhead=(_TRANSIENT_GIB + _CONTEXT_GIB) * GIB,
    )


def cheaper(need: Callable[..., MemoryNeed], capacity: float, **asked: object) -> list[tuple[str, float]]:
    """What would bring a run under `capacity` bytes, each on top of the ones before: (change, bytes then).

    In the order of what it costs: text outputs cached, activations recomputed, smaller micro-batch (equal effective
    batch), 8-bit moments, frozen base in 8 bits. Empty when it fits already.
    """
    changes: list[tuple[str, dict[str, object]]] = [
        ("cache the text encoders' outputs (dataset.cache_text = true)", {"text_cached": True}),
        ("recompute activations (precision.gradient_checkpointing = true)", {"recompute": True}),
        ("one picture at a time, the same step (memory.micro_batch = 1)", {"batch": 1}),
        ("8-bit moments (optimizer.type = adamw8bit)", {"moment_bytes": 2.0}),
        ("the frozen base in 8 bits, rounded (precision.base_format = int8, needs torchao)", {"eight_bit_base": True}),
    ]
    found: list[tuple[str, float]] = []
    now = dict(asked)
    if need(**now).total <= capacity:
        return found
    for text, change in changes:
        before, now = need(**now).total, {**now, **change}
        if need(**now).total < before:
            found.append((text, need(**now).total))
        if need(**now).total <= capacity:
            break
    return found


def rank_table(sets: Mapping[str, tuple[int, int]] = SDXL_SETS, base: int = SDXL_UNET) -> list[str]:
    """Adapter parameters by rank for each target set, with their share of the base's."""
    lines: list[str] = []
    for name, (modules, per_rank) in sets.items():
        cells = [f"r{rank} {per_rank * rank / 1e6:.1f} M ({per_rank * rank / base:.2%})" for rank in RANKS]
        lines.append(f"{name}, {modules} layers: {', '.join(cells)}")
    return lines


def per_rank(module: nn.Module) -> int:
    """Adapter parameters of a linear or convolution layer for each unit of rank."""
    outside, inside, *kernel = (int(side) for side in module.weight.shape)  # type: ignore[union-attr]
    return inside * torch.Size(kernel).numel() + outside


def set_of(modules: Iterable[nn.Module]) -> tuple[int, int]:
    """(modules, parameters for each unit of rank) of a target set; works on the meta device."""
    sizes = [per_rank(module) for module in modules]
    return len(sizes), sum(sizes)


def model_need(
    model: SDXLModel, trained: Iterable[torch.Tensor], activations: int, *, text_cached: bool, average: bool = False
) -> MemoryNeed:
    """The need of any model, from its tensors (also on the meta device) and counted activations; for a CPU, so
    without working space and context. `trained`: the adapter's tensors."""
    return MemoryNeed(
        base=_bytes([model.unet]),
        text=0.0 if text_cached else _bytes(model.text_encoders),
        vae=_bytes([model.vae]),
        parameters=sum(tensor.numel() for tensor in trained),
        activations=activations,
        average=average,
    )


def count_activations(forward: Callable[[], torch.Tensor]) -> int:
    """Bytes that `forward` keeps for backward, each storage once, parameters apart. Works on the meta device too."""
    held = Held()
    with watched(held, smallest=0):
        forward()
    return held.bytes


def _bytes(modules: Iterable[nn.Module]) -> float:
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    # Adapters hang on the layers and are counted apart.
    return float(sum(stored_bytes(tensor) for tensor in tensors if not tensor.requires_grad))


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes; of one in a torchao format those of its parts."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.numel() * tensor.element_size()
    names, _ = flatten()
    return sum(stored_bytes(getattr(tensor, name)) for name in names)
