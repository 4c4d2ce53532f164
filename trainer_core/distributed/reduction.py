"""The sum over processes of a step's gradients and losses, in one go, after all have said how they fared.

LoRA gradients are small (93 MB at rank 16 on SDXL's attention), so one flat sum after the micro-batches is preferred
to DDP's buckets during backward: before it the processes exchange flags, so one that ran out of memory or was asked to
stop never leaves the others waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from .processes import Processes
from .shares import Piece, own_batches, share

T = TypeVar("T")


@dataclass(frozen=True)
class Agreed:
    """Whether any process ran out of memory, or was asked to stop."""

    out_of_memory: bool
    stop: bool


class Reduction:
    """Sums over `processes`. Used by `Accumulation` in the order own_share, prepare, agree, combine."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._pieces: list[Piece] = []
        self._samples = 0
        self._flat: torch.Tensor | None = None
        self._parameters: list[torch.nn.Parameter] = []

    def own_share(self, batches: Sequence[Sequence[T]]) -> list[Sequence[T]]:
        """What this process computes of the step."""
        sizes = [len(batch) for batch in batches]
        self._samples = sum(sizes)
        self._pieces = share(sizes, self._processes.count, self._processes.rank)
        return own_batches(batches, self._pieces)

    def prepare(self, optimizer: torch.optim.Optimizer, losses: Sequence[torch.Tensor]) -> None:
        """Lay out gradients, and losses at their places in the step, in one flat tensor."""
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        device = self._parameters[0].device
        sizes = [parameter.numel() for parameter in self._parameters]
        flat = torch.zeros(sum(sizes) + self._samples, dtype=torch.float32, device=device)
        *views, loss_S = flat.split([*sizes, self._samples])
        for parameter, view in zip(self._parameters, views, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad.detach().reshape(-1))
        own = torch.cat(list(losses)) if losses else loss_S[:0]
        at = 0
        for piece in self._pieces:
            size = piece.last - piece.first
            loss_S[piece.place : piece.place + size] = own[at : at + size].float()
            at += size
        self._flat = flat

    def agree(self, *, out_of_memory: bool, stop: bool) -> Agreed:
        """Exchange flags; every process gets the same answer."""
        oom, stopping = self._processes.any_of(out_of_memory, stop)
        return Agreed(oom, stopping)

    def combine(self) -> list[torch.Tensor]:
        """Sum what was prepared and put it back. Returns the losses of all samples of the step, in order.

        NaN and infinity of one process reach all of them in the sum, so all judge the step alike.
        """
        assert self._flat is not None, "prepared before"
        # Which gradients exist is the host's knowledge: exchanged on the CPU, the device is not read for it.
        there = self._processes.any_of(*(parameter.grad is not None for parameter in self._parameters))
        flat, self._flat = self._processes.sum(self._flat), None
        sizes = [parameter.numel() for parameter in self._parameters]
        *views, loss_S = flat.split([*sizes, self._samples])
        for parameter, view, exists in zip(self._parameters, views, there, strict=True):
            parameter.grad = view.view_as(parameter) if exists else None
        return [loss_S]

    def forget(self) -> None:
        """Drop what was prepared: the step is computed again."""
        self._flat = None
