"""Exponential moving average of the trained parameters.

Source: Polyak & Juditsky 1992 for the idea; the rising decay (1 + n) / (10 + n) of the first updates is TensorFlow's
ExponentialMovingAverage, so that a short run is not dominated by its start.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import CheckpointError


class Ema:
    """Averages of named float32 parameters, on their device. Updated once an applied step, and at no other time."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"the decay of an average must lie between 0 and 1, got {decay}")
        self.decay = decay
        self.updates = 0
        self._parameters = dict(parameters)
        self.averages = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """average += (1 - decay) (parameter - average)."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        torch._foreach_lerp_(list(self.averages.values()), [p.detach() for p in self._parameters.values()], 1.0 - decay)

    @torch.no_grad()
    def copy_to_parameters(self) -> None:
        """Overwrite the parameters with their averages; the caller keeps the old ones (see `LiveWeights`)."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self.averages[name])

    def state(self) -> tuple[dict[str, torch.Tensor], int]:
        """Averages on the CPU and the number of updates."""
        return {name: value.to("cpu", copy=True) for name, value in self.averages.items()}, self.updates

    @torch.no_grad()
    def load_state(self, averages: Mapping[str, torch.Tensor], updates: int) -> None:
        """Put back what `state` gave.

        Raises:
            CheckpointError: names or shapes differ; nothing is changed then.
        """
        wrong = [f"{name}: in the checkpoint only" for name in averages if name not in self.averages]
        for name, value in self.averages.items():
            stored = averages.get(name)
            if stored is None:
                wrong.append(f"{name}: no average in the checkpoint")
            elif stored.shape != value.shape:
                wrong.append(f"{name}: {tuple(stored.shape)} in the checkpoint, {tuple(value.shape)} now")
        if wrong:
            raise CheckpointError("The averaged adapter does not fit this run.", differences=wrong)
        for name, value in self.averages.items():
            value.copy_(averages[name])
        self.updates = updates
