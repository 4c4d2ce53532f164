"""What is measured of a step, all of it in one transfer from the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

Agree = Callable[[torch.Tensor], None]
"""Reduces a tensor over all processes in place, to the largest value (torch.distributed.all_reduce with MAX)."""

_SQUARE_LIMIT = math.sqrt(torch.finfo(torch.float32).max)
"""A norm above this (1.8e19) overflows fp32 when it is squared, in Adam's second moment too."""


@dataclass(frozen=True)
class StepReading:
    """What one device read told about a step.

    `loss_B`: loss of every sample of every micro-batch, in order. `grad_norm`: global L2 norm of the unscaled gradients
    before clipping, summed in float64. `loss_scale`: the scale they had. `names`, `norms`: L2 norm of each gradient
    that exists, in the optimizer's order. `weight_norms`: the parameters' own, where clipping needs them.
    `weights_finite`: None when weights and moments were not looked at. `other_loss`, `other_gradient`: some process
    (this one included) has a loss or gradient that is not finite. `extra`: what somebody else had read along.
    """

    loss_B: tuple[float, ...]
    grad_norm: float
    loss_scale: float
    names: tuple[str, ...] = ()
    norms: tuple[float, ...] = ()
    weight_norms: tuple[float, ...] = ()
    weights_finite: bool | None = None
    other_loss: bool = False
    other_gradient: bool = False
    extra: tuple[float, ...] = ()

    @property
    def loss(self) -> float:
        """Mean over the samples of the step; NaN for none."""
        return math.fsum(self.loss_B) / len(self.loss_B) if self.loss_B else math.nan

    @property
    def bad_losses(self) -> tuple[int, ...]:
        """Places in `loss_B` that are not finite."""
        return tuple(index for index, loss in enumerate(self.loss_B) if not math.isfinite(loss))

    @property
    def bad_gradients(self) -> tuple[str, ...]:
        """Names of the parameters whose gradient norm is not finite, in the optimizer's order."""
        return tuple(name for name, norm in zip(self.names, self.norms, strict=True) if not math.isfinite(norm))

    @property
    def norm_is_sound(self) -> bool:
        """Whether the global norm is finite and its square fits fp32 (a NaN compares as false)."""
        return self.grad_norm <= _SQUARE_LIMIT


def take_reading(
    optimizer: torch.optim.Optimizer,
    losses: Sequence[torch.Tensor],
    scale: torch.Tensor,
    *,
    with_weights: bool = False,
    check_weights: bool = False,
    agree: Agree | None = None,
    extra: torch.Tensor | None = None,
) -> StepReading:
    """Measure the unscaled gradients of `optimizer` and read everything in one transfer.

    `with_weights`: also the norm of every parameter that has a gradient. `check_weights`: also whether parameters and
    optimizer state are finite. `extra` (n,): numbers that come along.
    """
    pairs = [(name, parameter) for name, parameter in named(optimizer) if parameter.grad is not None]
    gradients = [parameter.grad for _, parameter in pairs if parameter.grad is not None]
    losses_B = torch.cat([loss.reshape(-1).float() for loss in losses]) if losses else scale.new_zeros(0)
    norms = _norms(gradients, scale)
    pieces = [losses_B, norms]
    if with_weights:
        pieces.append(_norms([parameter.detach() for _, parameter in pairs], scale))
    if check_weights:
        pieces.append(largest(trained_tensors(optimizer), scale).view(1))
    if agree is not None:
        pieces.append(_agreed(losses_B, norms, agree))
    others = [] if extra is None else [extra.float()]
    values: list[float] = torch.cat([*pieces, scale.float().view(1), *others]).tolist()
    return _parse(values, len(losses_B), [name for name, _ in pairs], with_weights, check_weights, agree is not None)


def _parse(
    values: list[float], samples: int, names: list[str], with_weights: bool, checked: bool, agreed: bool
) -> StepReading:
    rest = iter(values)

    def take(count: int) -> tuple[float, ...]:
        return tuple(next(rest) for _ in range(count))

    loss_B, norms = take(samples), take(len(names))
    weight_norms = take(len(names)) if with_weights else ()
    largest_weight = take(1)[0] if checked else None
    bad_loss, bad_gradient = take(2) if agreed else (0.0, 0.0)
    return StepReading(
        loss_B=loss_B,
        grad_norm=total_norm(norms),
        loss_scale=take(1)[0],
        names=tuple(names),
        norms=norms,
        weight_norms=weight_norms,
        weights_finite=None if largest_weight is None else math.isfinite(largest_weight),
        other_loss=bad_loss > 0,
        other_gradient=bad_gradient > 0,
        extra=tuple(rest),
    )


def total_norm(norms: Sequence[float]) -> float:
    """L2 norm of tensors from their norms, in float64, where no fp32 value overflows when squared."""
    if all(math.isfinite(norm) for norm in norms):
        return math.sqrt(math.fsum(norm * norm for norm in norms))
    return math.nan if any(math.isnan(norm) for norm in norms) else math.inf


def _norms(tensors: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    if not tensors:
        return like.new_zeros(0, dtype=torch.float32)
    return torch.stack([norm.float() for norm in torch._foreach_norm(tensors)])


def _agreed(losses_B: torch.Tensor, norms: torch.Tensor, agree: Agree) -> torch.Tensor:
    """(bad loss, bad gradient) over all processes, as 0 or 1."""
    flags = torch.stack([~torch.isfinite(losses_B).all(), ~torch.isfinite(norms).all()]).float()
    agree(flags)
    return flags


def largest(tensors: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Largest absolute value of all tensors (0-dim, float32): finite exactly when every element is. No host read."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floating:
        return like.new_zeros((), dtype=torch.float32)
    return torch.stack([norm.float().to(like.device) for norm in torch._foreach_norm(floating, math.inf)]).amax()


def trained_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters and everything the optimizer keeps for them."""
    found: list[torch.Tensor] = []
    for _, parameter in named(optimizer):
        found.append(parameter.detach())
        found.extend(value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, torch.Tensor))
    return found


def weights_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Whether parameters and optimizer state are finite. Reads the device: for rejected steps and checkpoints."""
    tensors = trained_tensors(optimizer)
    return not tensors or math.isfinite(float(largest(tensors, tensors[0])))


def nonfinite_weights(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of parameters that are not finite themselves, or whose optimizer state is not. Reads the device."""
    names: list[str] = []
    for name, parameter in named(optimizer):
        state = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, torch.Tensor)]
        if not math.isfinite(float(largest([parameter.detach(), *state], parameter.detach()))):
            names.append(name)
    return tuple(names)


def gradients_finite(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every element of every gradient is finite: a norm may overflow though they are. Reads the device."""
    found = gradients(optimizer)
    return not found or math.isfinite(float(largest(found, found[0])))


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All gradients that exist, in the optimizer's order. Text encoder 1's last layer never has one."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) of everything the optimizer trains, in its order."""
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)
