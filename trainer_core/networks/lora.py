"""One LoRA adapter on a linear or convolution layer, and the kohya-compatible network made of them.

y = base(x) + multiplier * alpha / rank * up(down(x))      (Hu et al. 2021, arXiv:2106.09685, equation 3)

Adapter weights are float32 at every moment. Under autocast, or on a base in bf16 or fp16, they are cast once to the
type that is computed in; the input is never cast up. The adapter takes over the base layer's `forward` and holds no
copy of the base weights, so `detach` leaves the base as it was, bit for bit.

Shape letters: B rows, T tokens, D features, C channels, H W, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..errors import AdapterError
from .dropout import DropoutDraws, DropoutRates, apply_masks, draw_masks
from .input_recompute import RecomputedLinear, Source, source_of
from .targets import Target


class AdapterWeight(nn.Module):
    """Holder of one weight, so that parameter names read `lora_down.weight`."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))


class DropoutContext:
    """The dropout draws of the micro-batch that is being computed, shared by all modules of a network."""

    current: DropoutDraws | None = None


class LoraModule(nn.Module):
    """Adapter of one layer.

    Args:
        target: the layer; it must be a `Linear`, or a `Conv2d` without groups.
        rank: number of hidden features, at least 1.
        alpha: the scale is alpha / rank.
        rates: dropout probabilities.
        context: where the dropout masks of the current micro-batch come from.
    """

    alpha: torch.Tensor
    subtracted_down: torch.Tensor | None
    subtracted_up: torch.Tensor | None
    clamped: torch.Tensor
    seen: torch.Tensor

    def __init__(
        self,
        target: Target,
        rank: int,
        alpha: float,
        *,
        rates: DropoutRates | None = None,
        context: DropoutContext | None = None,
    ) -> None:
        super().__init__()
        base = target.module
        down_shape, up_shape = factor_shapes(base, rank, target.path)
        self.name, self.path, self.part = target.name, target.path, target.part
        self.rank = rank
        self.rates = rates or DropoutRates()
        self.multiplier = 1.0
        self.lr_factor = 1.0
        self.lora_down = AdapterWeight(down_shape, base.weight.device)
        self.lora_up = AdapterWeight(up_shape, base.weight.device)
        self.register_buffer("alpha", torch.tensor(float(alpha), dtype=torch.float32))
        self.scale = float(alpha) / rank
        self.register_buffer("subtracted_down", None)
        self.register_buffer("subtracted_up", None)
        # Limit on the adapter's output, 0 = off; counts of outputs beyond it, taken by `clamp_counts`.
        self.clamp = 0.0
        self.register_buffer("clamped", torch.zeros((), device=base.weight.device), persistent=False)
        self.register_buffer("seen", torch.zeros((), device=base.weight.device), persistent=False)
        self._context = context or DropoutContext()
        # In a tuple so that the base is not registered as a child: it is not ours to save, move or train.
        self._base = (base,)
        self._base_forward: Callable[..., torch.Tensor] | None = None
        self._base_had_own_forward = False

    @property
    def base(self) -> nn.Linear | nn.Conv2d:
        """The layer that is adapted."""
        return self._base[0]

    @property
    def attached(self) -> bool:
        return self._base_forward is not None

    def set_alpha(self, alpha: float) -> None:
        """Change alpha and with it the scale."""
        self.alpha.fill_(alpha)
        self.scale = float(alpha) / self.rank

    def subtract(self, down: torch.Tensor, up: torch.Tensor) -> None:
        """From now on subtract scale * up @ down, so that the adapter may begin with weights that are not zero."""
        self.subtracted_down = down.detach().clone()
        self.subtracted_up = up.detach().clone()

    @property
    def down_weight(self) -> torch.Tensor:
        """`lora_down` as a file holds it: with the subtracted part as further ranks."""
        own = self.lora_down.weight
        return own if self.subtracted_down is None else torch.cat([own, self.subtracted_down])

    @property
    def up_weight(self) -> torch.Tensor:
        """`lora_up` as a file holds it."""
        own = self.lora_up.weight
        return own if self.subtracted_up is None else torch.cat([own, -self.subtracted_up], dim=1)

    def export_tensors(self) -> dict[str, torch.Tensor]:
        """What a file holds for this layer, in kohya's order. The scale alpha / rank is the same with further ranks."""
        down = self.down_weight
        alpha = self.alpha if self.subtracted_down is None else torch.tensor(self.scale * down.shape[0])
        return {"alpha": alpha, "lora_down.weight": down, "lora_up.weight": self.up_weight}

    @torch.no_grad()
    def import_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `export_tensors`; keys may be missing."""
        if (down := tensors.get("lora_down.weight")) is not None:
            self.lora_down.weight.copy_(down[: self.rank])
            if self.subtracted_down is not None:
                self.subtracted_down.copy_(down[self.rank :])
        if (up := tensors.get("lora_up.weight")) is not None:
            self.lora_up.weight.copy_(up[:, : self.rank])
            if self.subtracted_up is not None:
                self.subtracted_up.copy_(-up[:, self.rank :])
        if (alpha := tensors.get("alpha")) is not None:
            self.set_alpha(float(alpha) / down_ranks(self) * self.rank)

    def attach(self) -> None:
        """Take over the base layer's forward."""
        if self.attached:
            return
        self._base_had_own_forward = "forward" in self.base.__dict__
        self._base_forward = self.base.forward
        self.base.forward = self.forward  # type: ignore[method-assign]

    def detach(self) -> None:
        """Give the base layer its own forward back.

        Raises:
            AdapterError: something else took the layer over since; it must let go first.
        """
        if self._base_forward is None:
            return
        current: Any = self.base.__dict__.get("forward")
        if getattr(current, "__self__", None) is not self:
            raise AdapterError(
                f"The adapter on '{self.path}' cannot be taken off: something else was put on top of it. "
                "Take that off first."
            )
        if self._base_had_own_forward:
            self.base.forward = self._base_forward  # type: ignore[method-assign]
        else:
            del self.base.__dict__["forward"]
        self._base_forward = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Output of the adapted layer for x (B, T, D), (B, D) or (B, C, H, W)."""
        assert self._base_forward is not None, "the adapter is not attached"
        if self.multiplier == 0.0:
            return self._base_forward(x)
        source = source_of(x)
        x = x.to(compute_dtype(x))
        return self._base_forward(x) + self.delta(x, source)

    def delta(self, x: torch.Tensor, source: Source | None = None) -> torch.Tensor:
        """What the adapter adds to the base layer's output, in the type of `x`.

        `source` says how `x` can be computed again, so that it need not be kept for the backward pass.
        """
        hidden = self._down(x, source)
        scale = self.multiplier * self.scale
        if self.training and self.rates.any:
            hidden = self._dropped(hidden)
        delta = self._up(hidden * scale if scale != 1.0 else hidden)
        # In training only: files cannot hold the limit, so validation, previews and the proof see what the file does.
        return self._limited(delta) if self.clamp > 0 and self.training else delta

    def _limited(self, delta: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.clamped += (delta.detach().abs() > self.clamp).sum()
            self.seen += delta.numel()
        return delta.clamp(-self.clamp, self.clamp)

    def _down(self, x: torch.Tensor, source: Source | None) -> torch.Tensor:
        weight = self.down_weight.to(x.dtype)
        base = self.base
        if isinstance(base, nn.Conv2d):
            return functional.conv2d(x, weight, None, base.stride, base.padding, base.dilation)
        if source is not None and weight.requires_grad:
            return RecomputedLinear.apply(x, weight, source.tensor, source.function)  # type: ignore[no-any-return]
        return functional.linear(x, weight)

    def _up(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.up_weight.to(hidden.dtype)
        return functional.conv2d(hidden, weight) if weight.dim() == 4 else functional.linear(hidden, weight)

    def _dropped(self, hidden: torch.Tensor) -> torch.Tensor:
        source = self._context.current
        if source is None:
            raise AdapterError(
                "Adapter dropout is on, but the network was not told which samples it computes: call set_draws() "
                "before the forward pass, or eval() for a pass without dropout."
            )
        return apply_masks(hidden, draw_masks(source, self.name, self.rates, hidden), self.rates)

    def delta_weight(self) -> torch.Tensor:
        """The change of the base weight at multiplier 1, scale * up @ down, float32 in the base weight's shape."""
        down, up = self.down_weight, self.up_weight
        return (self.scale * (up.flatten(1) @ down.flatten(1))).view(self.base.weight.shape)


def down_ranks(module: LoraModule) -> int:
    """Ranks of a module in a file: twice its own where it subtracts what it began with."""
    return module.rank * (1 if module.subtracted_down is None else 2)


def factor_shapes(base: nn.Module, rank: int, path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of `lora_down` and `lora_up` for a layer (kohya.md 2.1)."""
    if rank < 1:
        raise ValueError(f"rank {rank} for '{path}'")
    if isinstance(base, nn.Conv2d):
        if base.groups != 1 or base.padding_mode != "zeros":
            raise AdapterError(
                f"'{path}' is a convolution with {base.groups} groups and '{base.padding_mode}' padding; "
                "LoRA files have no form for that. Leave this layer out."
            )
        kernel = tuple(base.kernel_size)
        return (rank, base.in_channels, *kernel), (base.out_channels, rank, 1, 1)
    if isinstance(base, nn.Linear):
        return (rank, base.in_features), (base.out_features, rank)
    raise AdapterError(f"'{path}' is a {type(base).__name__}; LoRA adapts linear and 2-d convolution layers only.")


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Type that a layer computes in for input `x`: autocast's where it is on, else the input's own."""
    kind = x.device.type
    if kind == "meta":  # memory is estimated on it; it knows no autocast
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
