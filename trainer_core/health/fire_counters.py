"""How often each trained tensor gets a gradient within a step: finds a micro-batch that gave none.

For diagnosis only: one hook a tensor. The counts are host integers, nothing is read from the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .findings import Finding

if TYPE_CHECKING:
    import torch


class FireCounters:
    """Counts gradient arrivals of `parameters`; every forward pass of `unet` is a micro-batch."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], unet: torch.nn.Module) -> None:
        self._fires: dict[str, set[int]] = {name: set() for name in parameters}
        self._clock = 0
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._fires[name].add(self._clock))
            for name, parameter in parameters.items()
        ]
        self._handles.append(unet.register_forward_pre_hook(lambda *_: self._forward()))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def look(self, micro_batches: int, allowed: frozenset[str]) -> list[Finding]:
        """Tensors that some of the last `micro_batches` forward passes reached and others did not; counts anew."""
        passes = range(self._clock - micro_batches + 1, self._clock + 1)
        reached = {name: fires.intersection(passes) for name, fires in self._fires.items() if name not in allowed}
        for name in self._fires:
            self._fires[name] = set()
        short = tuple(name for name, fires in reached.items() if 0 < len(fires) < micro_batches)
        if not short:
            return []
        absent = [number for number, one in enumerate(passes, 1) if one not in reached[short[0]]]
        return [Finding("MISSING-CONTRIBUTION", "", short, numbers={"micro_batch": absent[0], "tensors": len(short)})]

    def _forward(self) -> None:
        self._clock += 1
