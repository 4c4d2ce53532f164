"""Does an optimizer work here? Found out on two small tensors, at config check and not at step 0."""

from __future__ import annotations

import warnings

import torch

from ..config import OptimizerConfig
from ..config_optimizers import find_kind
from ..device import choose_device
from ..errors import CheckpointError, ConfigError, Problem
from .optimizers import build_optimizer
from .state import load_optimizer_state, optimizer_state

_STEPS = 3
# What foreign code raises when it is used in a way it was not made for.
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def try_optimizer(config: OptimizerConfig, device: str = "cpu") -> str:
    """Build the optimizer, make a few steps, store its state, and go on from that. Returns advice, or "".

    `device` is written as in run.device; one that does not exist here is told by another rule, and the CPU is taken.

    Raises:
        ConfigError: it does not exist, does not take these arguments, fails at a step, or cannot be stored.
    """
    kind = find_kind(config.type)
    name = config.type if kind is None else kind.path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            going_on, resumed = _compare(config, _device(device))
        except ConfigError:
            raise
        except CheckpointError as error:
            raise _refusal(config, f"{name} cannot be resumed: {error}") from None
        except _FAILURES as error:
            raise _refusal(config, f"{name} does not work with adapters: {type(error).__name__}: {error}") from None
    if not all(bool(torch.isfinite(value).all()) for value in going_on):
        raise _refusal(config, f"{name} turns numbers into NaN within {_STEPS} steps")
    if all(torch.equal(one, other) for one, other in zip(going_on, resumed, strict=True)):
        return ""
    return f"{name} does not go on exactly when a run is resumed: it keeps state outside its own record"


def _device(asked: str) -> torch.device:
    try:
        return choose_device(asked)
    except ConfigError:
        return torch.device("cpu")


def _compare(config: OptimizerConfig, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters after one more step: without a pause, and with the state stored and loaded in between."""
    first = _Pair(config, device)
    for _ in range(_STEPS):
        first.step()
    tensors, numbers = optimizer_state(first.optimizer)
    second = _Pair(config, device, first.values())
    load_optimizer_state(second.optimizer, tensors, numbers)
    first.step()
    second.step()
    return first.values(), second.values()


class _Pair:
    """A lora_down and a lora_up in two groups, with a fixed gradient."""

    def __init__(self, config: OptimizerConfig, device: torch.device, values: list[torch.Tensor] | None = None) -> None:
        down = torch.linspace(-0.5, 0.5, 32).view(4, 8)
        values = values or [down, torch.zeros(8, 4)]
        self.parameters = [torch.nn.Parameter(value.to(device, copy=True)) for value in values]
        parts = {"unet": {"a.lora_down.weight": self.parameters[0]}, "te1": {"b.lora_up.weight": self.parameters[1]}}
        plain = OptimizerConfig(
            type=config.type,
            args=config.args,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            te1_lr=None,
        )
        self.optimizer = build_optimizer(parts, plain)

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    @torch.enable_grad()
    def step(self) -> None:
        self.optimizer.zero_grad()
        down, up = self.parameters
        ((down - 0.25).square().sum() + 2.0 * (up - 0.25).square().sum()).backward()
        self.optimizer.step()


def _refusal(config: OptimizerConfig, why: str) -> ConfigError:
    fix = "Check optimizer.args, or use an optimizer of docs/optimizers.md."
    return ConfigError([Problem("optimizer.type", config.type, why, fix)])
