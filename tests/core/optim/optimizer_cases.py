"""Small trainings for optimizer tests: a LoRA pair with a fitting task, and every optimizer that is installed here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trainer_core.config import OptimizerConfig, ScheduleConfig
from trainer_core.config_optimizers import CATALOGUE, find_kind, install_command
from trainer_core.optim import LiveWeights, build_optimizer, learning_rate_factor, set_learning_rates

#: Beyond the catalogue: dotted classes with nested, shared or unusual state.
DOTTED = (
    "torch.optim.RAdam",
    "torch.optim.Adafactor",
    "torch.optim.ASGD",
    "pytorch_optimizer.SOAP",
    "pytorch_optimizer.Prodigy",
    "pytorch_optimizer.ScheduleFreeAdamW",
    "pytorch_optimizer.AdaFactor",
)


def is_missing(name: str) -> bool:
    """Whether the library of this optimizer is not installed here."""
    kind = find_kind(name)
    assert kind is not None
    return install_command(kind) is not None


def config_of(name: str, **options: Any) -> OptimizerConfig:
    kind = find_kind(name)
    assert kind is not None
    rate = 1.0 if kind.rate_free else 1e-3
    return OptimizerConfig(**{"type": name, "learning_rate": rate, "te1_lr": None, "te2_lr": None, **options})


ALL = (*CATALOGUE, *DOTTED)


@dataclass
class Task:
    """UNet: a linear pair large enough for 8-bit states (4096 numbers) and a convolution; te1: a small pair."""

    config: OptimizerConfig
    values: dict[str, torch.Tensor] | None = None
    total: int = 12

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        shapes = {
            "unet": {
                "lora_unet_a.lora_down.weight": (16, 320),
                "lora_unet_a.lora_up.weight": (320, 16),
                "lora_unet_c.lora_down.weight": (4, 8, 3, 3),
                "lora_unet_c.lora_up.weight": (8, 4, 1, 1),
            },
            "te1": {"lora_te1_b.lora_down.weight": (4, 12), "lora_te1_b.lora_up.weight": (12, 4)},
        }
        self.parameters: dict[str, torch.nn.Parameter] = {}
        by_part: dict[str, dict[str, torch.nn.Parameter]] = {}
        for part, named in shapes.items():
            by_part[part] = {}
            for name, shape in named.items():
                start = torch.randn(shape, generator=generator) * 0.1 * ("down" in name)
                value = start if self.values is None else self.values[name]
                parameter = torch.nn.Parameter(value.clone())
                self.parameters[name] = by_part[part][name] = parameter
        self.optimizer = build_optimizer(by_part, self.config)
        self.live = LiveWeights(self.optimizer, self.config)

    def gradients(self, step: int) -> None:
        """Gradients of a quadratic task plus noise that depends on the step alone."""
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in self.parameters.values():
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.grad = (parameter.detach() - 0.2) + noise

    def step(self, step: int) -> None:
        schedule = ScheduleConfig(warmup_steps=2)
        set_learning_rates(self.optimizer, learning_rate_factor(schedule, step, self.total))
        self.gradients(step)
        self.optimizer.step()
        self.live.after_update()

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.step(step)

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)
