"""Silent corruption: one fixed micro-batch computed twice must give the same bits.

A device that computes wrong now and then raises no error (Dixit et al. 2021, "Silent Data Corruptions at Scale"). The
first look, before anything is judged, tells whether the kernels of this run repeat themselves at all here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..distributed.alignment import fingerprint
from ..events import Verdict, Warned
from . import HARDWARE

if TYPE_CHECKING:
    from ..trainer import Trainer

Print = tuple[int, int]


class Sentinel:
    """To be called after every step; looks at every `every`-th."""

    def __init__(self, trainer: Trainer, every: int) -> None:
        self._trainer = trainer
        self._every = every
        self._repeats: bool | None = None
        """Whether two computations of the first look were equal; None before it."""
        self._where = ""
        """In which processes they differed, where there are several."""

    def __call__(self) -> None:
        if self._trainer.state.step % self._every or self._repeats is False:
            return
        same = self._look()
        if self._repeats is None:
            self._repeats = same
            if not same:
                self._warn()
        elif not same:
            where = self._where
            self._tell(where, again_same=self._look())

    def _look(self) -> bool:
        with _deterministic():
            same = self._print() == self._print()
        processes = self._trainer.parts.processes
        if processes is None:
            return same
        told = processes.gather("same" if same else "other")
        differing = [str(rank) for rank, one in enumerate(told) if one != "same"]
        self._where = f" (process {', '.join(differing)})" if differing else ""
        return not differing

    def _print(self) -> Print:
        """128 bits over the gradients of the first micro-batch of epoch 0, as far as it fits. Leaves no gradients."""
        trainer = self._trainer
        optimizer, plan = trainer.parts.optimizer, trainer.parts.plan
        refs = plan.batches(0)[0]
        area = plan.items[refs[0].item_index].bucket
        refs = tuple(trainer.accumulation.ladder.pieces(refs, area)[0])
        with trainer.accumulation.context():
            loss_B = trainer.loss(0, trainer.load(0, refs))
        trainer.parts.precision.scaler.scale(loss_B.sum() / len(refs)).backward()
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        found = fingerprint(gradients)
        optimizer.zero_grad(set_to_none=True)
        return found

    def _warn(self) -> None:
        text = (
            "hardware.sentinel_every is off for this run: the same batch computed twice gave different bits at the "
            f"first look{self._where}. Either some kernels used here do not repeat themselves, or the device computes "
            "wrong."
        )
        self._trainer.bus.emit(Warned(step=self._trainer.state.step, topic="hardware", message=text))

    def _tell(self, where: str, *, again_same: bool) -> None:
        trainer = self._trainer
        if again_same:
            severity = "warning"
            text = (
                f"The same batch computed twice gave different bits once{where}, and equal ones at the next try: a "
                "transient fault of the device. Watch its temperature and memory errors."
            )
        else:
            severity = "error"
            trainer.guard.alarms.add(HARDWARE)
            text = (
                f"The same batch computed twice gave different bits, two times in a row{where}: this device computes "
                "wrong. Stop the run, test the device, and go on from a checkpoint that was written before."
            )
        trainer.bus.emit(Verdict(step=trainer.state.step, kind=HARDWARE, sentence=text, severity=severity))


@contextmanager
def _deterministic() -> Iterator[None]:
    """Kernels that repeat themselves, where torch has them."""
    was = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that have no such form: the first look finds out
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was, warn_only=warned_only)
