"""Which weights the adapter holds: those that are trained, or those a run is judged by.

Two things are judged by other weights than they train: an EMA, and schedule-free optimizers (Defazio et al. 2024: steps
are taken at y, the result is the average x). Both are swapped in around validation, previews and exports. The trained
weights are kept as copies and put back bit for bit: converting x back to y would round, and a run with previews would
then differ from one without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from ..config import OptimizerConfig
from .ema import Ema

Purpose = Literal["validation", "preview", "export"]


class LiveWeights:
    """Swaps the parameters of `optimizer` in place; nothing else may write to them while they are swapped."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
        self._optimizer: Any = optimizer
        self._config = config or OptimizerConfig()
        self._kept: list[torch.Tensor] | None = None
        named = [pair for group in optimizer.param_groups for pair in zip(group["names"], group["params"], strict=True)]
        self.ema = Ema(dict(named), self._config.ema_decay) if self._config.ema_decay > 0 else None

    @property
    def swapped(self) -> bool:
        """Whether the parameters hold other weights than the trained ones now."""
        return self._kept is not None

    def after_update(self) -> None:
        """To be called once after every applied step."""
        if self.ema is not None:
            self.ema.update()

    @contextmanager
    def evaluation(self, purpose: Purpose) -> Iterator[None]:
        """The adapter holds the weights that `purpose` is to see. May be nested, for other purposes too."""
        wanted, swapped = self._is_averaged(purpose), self._kept is not None
        if wanted == swapped:
            yield
        elif wanted:
            self._swap_in()
            try:
                yield
            finally:
                self._swap_out()
        else:
            with self.training():
                yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """The adapter holds the trained weights, even inside `evaluation`: a checkpoint asked for there needs them."""
        if self._kept is None:
            yield
            return
        self._swap_out()
        try:
            yield
        finally:
            self._swap_in()

    def _is_averaged(self, purpose: Purpose) -> bool:
        if self.ema is None:
            return self._schedule_free
        return bool(getattr(self._config, f"ema_{purpose}"))

    @property
    def _schedule_free(self) -> bool:
        return hasattr(self._optimizer, "eval") and hasattr(self._optimizer, "train")

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _swap_in(self) -> None:
        self._kept = [parameter.detach().clone() for parameter in self._parameters()]
        if self.ema is not None:
            self.ema.copy_to_parameters()
        else:
            self._optimizer.eval()

    @torch.no_grad()
    def _swap_out(self) -> None:
        assert self._kept is not None, "swapped in before"
        if self.ema is None:
            self._optimizer.train()
        for parameter, kept in zip(self._parameters(), self._kept, strict=True):
            parameter.copy_(kept)
        self._kept = None
