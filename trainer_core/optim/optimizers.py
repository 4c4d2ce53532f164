"""The optimizer of a run, its groups by part, and their learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..config import OptimizerConfig, part_rate
from ..config_optimizers import find_kind
from ..errors import ConfigError, Problem
from .classes import optimizer_arguments, optimizer_class
from .state import load_optimizer_state, optimizer_state, remember_fresh

__all__ = [
    "build_optimizer",
    "effective_rates",
    "load_optimizer_state",
    "loraplus_ratio",
    "optimizer_state",
    "set_learning_rates",
]


def build_optimizer(
    parameters_by_part: Mapping[str, Mapping[str, torch.nn.Parameter]],
    config: OptimizerConfig,
    rate_factors: Mapping[str, float] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of `config` with one group a part, or two under LoRA+ (the second holds the lora_up tensors).

    `rate_factors` multiplies the rate of single parameters, by name (target rules, kohya's block rates); every other
    factor than 1 makes groups of its own, labelled `<label>x<factor>`. Every group carries `part`, `label` (the part,
    or `<part>_up`), `base_lr` and `names`.

    Raises:
        ValueError: a parameter is not float32: half-precision adapters lose small updates.
        ConfigError: the optimizer does not exist here or does not take these arguments.
    """
    groups: list[dict[str, Any]] = []
    for part, parameters in parameters_by_part.items():
        half = [name for name, parameter in parameters.items() if parameter.dtype != torch.float32]
        if half:
            raise ValueError(f"trained parameters must be float32, these are not: {half[:3]}")
        groups.extend(_split_by_factor(_groups(part, parameters, config), rate_factors or {}))
    optimizer = _make(groups, config)
    # Schedule-free optimizers start in neither mode and raise at the first step without this.
    if hasattr(optimizer, "train"):
        optimizer.train()  # type: ignore[attr-defined]
    remember_fresh(optimizer)
    return optimizer


def loraplus_ratio(config: OptimizerConfig, part: str) -> float | None:
    """Factor on the rate of lora_up in `part` (Hayou et al. 2024, LoRA+); None = off."""
    own = config.loraplus_unet_ratio if part == "unet" else config.loraplus_te_ratio
    return config.loraplus_ratio if own is None else own


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> dict[str, float]:
    """Set every group's rate to its base rate times `factor`; returns the rates by label."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
    return {group["label"]: group["lr"] for group in optimizer.param_groups}


def effective_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Rates by label after a step: the group's rate, times `d`, the step size that Prodigy and D-Adapt estimate."""
    free = _finds_its_rate(optimizer)
    return {
        group["label"]: float(group["lr"]) * (float(group["d"]) if free else 1.0) for group in optimizer.param_groups
    }


def _finds_its_rate(optimizer: torch.optim.Optimizer) -> bool:
    kind = find_kind(f"{type(optimizer).__module__}.{type(optimizer).__name__}")
    return kind is not None and kind.rate_free and all("d" in group for group in optimizer.param_groups)


def _groups(part: str, parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig) -> list[dict[str, Any]]:
    rate, ratio = part_rate(config, part), loraplus_ratio(config, part)
    if ratio is None:
        return [_group(part, part, rate, parameters)]
    ups = {name: parameter for name, parameter in parameters.items() if ".lora_up" in name}
    others = {name: parameter for name, parameter in parameters.items() if name not in ups}
    if not ups:
        why = f"LoRA+ raises the rate of lora_up, and the adapter of {part} has no such tensors"
        raise ConfigError([Problem("optimizer.loraplus_ratio", ratio, why, "Unset the LoRA+ ratios.")])
    split = [_group(part, part, rate, others)] if others else []
    return [*split, _group(part, f"{part}_up", rate * ratio, ups)]


def _split_by_factor(groups: list[dict[str, Any]], factors: Mapping[str, float]) -> list[dict[str, Any]]:
    split: list[dict[str, Any]] = []
    for group in groups:
        by_factor: dict[float, dict[str, torch.nn.Parameter]] = {}
        for name, parameter in zip(group["names"], group["params"], strict=True):
            by_factor.setdefault(factors.get(name, 1.0), {})[name] = parameter
        for factor, parameters in sorted(by_factor.items(), reverse=True):
            label = group["label"] if factor == 1.0 else f"{group['label']}x{factor:g}"
            split.append(_group(group["part"], label, group["base_lr"] * factor, parameters))
    return split


def _group(part: str, label: str, rate: float, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
    return {
        "params": list(parameters.values()),
        "names": list(parameters),
        "part": part,
        "label": label,
        "base_lr": rate,
        "lr": rate,
    }


def _refuse_several_rates(groups: list[dict[str, Any]], config: OptimizerConfig) -> None:
    """Prodigy and D-Adapt find one rate: parts, LoRA+ and target rules may not ask for others."""
    kind = find_kind(config.type)
    rates = {group["label"]: group["lr"] for group in groups if group["lr"] > 0}
    if kind is not None and kind.rate_free and len(set(rates.values())) > 1:
        told = ", ".join(f"{label} {rate:g}" for label, rate in rates.items())
        why = f"finds one rate for everything, several are asked for ({told})"
        fix = "Give all parts and targets the same rate, without LoRA+, or use adamw."
        raise ConfigError([Problem("optimizer.type", config.type, why, fix)])


def _make(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    cls = optimizer_class(config)
    _refuse_several_rates(groups, config)
    # Some classes demand a rate even where every group has one.
    arguments = {"lr": groups[0]["lr"], **optimizer_arguments(config, cls)}
    if cls is torch.optim.AdamW and not {"fused", "foreach", "capturable", "differentiable"} & set(arguments):
        try:
            return cls(groups, **arguments, fused=True)
        except RuntimeError:  # torch says so where the device has no fused kernel
            return cls(groups, **arguments)
    return cls(groups, **arguments)
