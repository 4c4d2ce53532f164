"""A small network trained by the product's own accumulation, precision and update guard."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer_core.accumulation import Accumulation
from trainer_core.config import OptimizerConfig, PrecisionConfig
from trainer_core.memory.ladder import MemoryLadder
from trainer_core.memory.update_guard import UpdateGuard
from trainer_core.optim import Precision, build_optimizer
from trainer_core.optim.ema import Ema
from trainer_core.step_work import StepWork

WIDTH = 6


class SmallStep:
    """Steps of 4 samples on a frozen layer with an adapter. Samples are numbers; draws depend on them alone."""

    def __init__(self, *, scaled: bool = False, optimizer: str = "adamw", room: int | None = 0) -> None:
        generator = torch.Generator().manual_seed(3)
        self.frozen = torch.randn(WIDTH, WIDTH, generator=generator)
        self.down = nn.Parameter(torch.randn(2, WIDTH, generator=generator))
        self.up = nn.Parameter(torch.randn(WIDTH, 2, generator=generator) * 0.1)
        self.told: list[str] = []
        device = torch.device("cpu")
        named = {"down": self.down, "up": self.up}
        self.optimizer = build_optimizer({"unet": named}, OptimizerConfig(type=optimizer, learning_rate=1e-2), {})
        compute = "fp16" if scaled else "fp32"
        self.precision = Precision(PrecisionConfig(initial_loss_scale=8.0), compute, device)
        self.ema = Ema(named, 0.9)
        self.ladder = MemoryLadder(offload=False, tell=self.told.append)
        self.accumulation = Accumulation(
            self.precision, self.optimizer, device, compute_loss=self._loss, area=lambda refs: (64, 64),
            should_stop=lambda: False, ladder=self.ladder,
        )  # fmt: skip
        self.guard = UpdateGuard(self.optimizer, device, ema=self.ema, room=lambda: room, tell=self.told.append)
        self.losses: list[float] = []
        self.seen: list[tuple[int, ...]] = []

    def _loss(self, epoch: int, refs: Any) -> torch.Tensor:
        rows = [torch.sin(torch.arange(WIDTH) * (ref + 1.0) + epoch) for ref in refs]
        x_BD = torch.stack(rows)
        y_BD = x_BD @ self.frozen.T + (x_BD @ self.down.T) @ self.up.T
        weights_B = torch.tensor([1.0 + ref % 2 for ref in refs])
        self.seen.append(tuple(refs))
        return (torch.tanh(y_BD) - x_BD).pow(2).mean(1) * weights_B

    def step(self, number: int) -> None:
        refs = tuple(range(number * 3, number * 3 + 3))
        work: Any = StepWork(number, (refs, (number + 50,)), 4)
        reading = self.accumulation.measure(work)
        assert reading is not None
        self.losses.extend(reading.loss_B)
        self.guard.run(lambda: self._update(reading), lambda clip: self.precision.settle(self.optimizer, reading, clip))

    def _update(self, reading: Any) -> Any:
        clip = self.precision.update(self.optimizer, reading)
        self.ema.update()
        return clip

    def result(self) -> list[torch.Tensor]:
        """Everything that must be as in the undisturbed run."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [self.down.detach(), self.up.detach(), *self.ema.averages.values(), *moments, torch.tensor(self.losses)]
