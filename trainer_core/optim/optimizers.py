"""The optimizer of a run, its groups by part, and its state by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..config import OptimizerConfig, part_rate
from ..errors import CheckpointError


def build_optimizer(
    parameters_by_part: Mapping[str, Mapping[str, torch.nn.Parameter]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019) with one group a part; every group carries `part`, `base_lr` and `names`.

    Raises ValueError when a parameter is not float32: half-precision adapters lose small updates.
    """
    groups = []
    for part, parameters in parameters_by_part.items():
        half = [name for name, parameter in parameters.items() if parameter.dtype != torch.float32]
        if half:
            raise ValueError(f"trained parameters must be float32, these are not: {half[:3]}")
        rate = part_rate(config, part)
        groups.append(
            {
                "params": list(parameters.values()),
                "names": list(parameters),
                "part": part,
                "base_lr": rate,
                "lr": rate,
            }
        )
    return torch.optim.AdamW(
        groups, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=config.weight_decay
    )


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> dict[str, float]:
    """Set every group's rate to its base rate times `factor`; returns the rates by part."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
    return {group["part"]: group["lr"] for group in optimizer.param_groups}


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """State by parameter name: tensors as `<entry>/<parameter>`, and one-element entries (step counts) as numbers."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for name, parameter in _named(optimizer):
        for entry, value in optimizer.state.get(parameter, {}).items():
            key = f"{entry}/{name}"
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                tensors[key] = value.detach().to("cpu", copy=True)
            else:
                numbers[key] = float(value)
    return tensors, numbers


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]
) -> None:
    """Put back what `optimizer_state` gave, by name. Learning rates and other group settings stay the config's.

    Raises CheckpointError listing names that lack a counterpart or have another shape; nothing is changed then.
    """
    parameters = dict(_named(optimizer))
    staged: dict[str, dict[str, Any]] = {}
    wrong: list[str] = []
    for key, value in [*tensors.items(), *numbers.items()]:
        entry, _, name = key.partition("/")
        parameter = parameters.get(name)
        if parameter is None:
            wrong.append(f"{name}: in the checkpoint only")
        elif isinstance(value, torch.Tensor) and value.shape != parameter.shape:
            wrong.append(f"{name}: {tuple(value.shape)} in the checkpoint, {tuple(parameter.shape)} now")
        else:
            staged.setdefault(name, {})[entry] = value
    if wrong:
        raise CheckpointError("The optimizer state does not fit the adapter.", differences=wrong)
    for name, entries in staged.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            entry: value.to(parameter.device, copy=True)
            if isinstance(value, torch.Tensor)
            else torch.tensor(float(value))
            for entry, value in entries.items()
        }


def _named(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    return [pair for group in optimizer.param_groups for pair in zip(group["names"], group["params"], strict=True)]
