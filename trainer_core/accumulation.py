"""Forward and backward of one step's micro-batches: this process's share of them, cut as memory allows.

The gradient of a step is the sum over its samples of weight x loss / divisor, so it does not matter how they are cut
into micro-batches or spread over processes; only rounding differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .errors import ResourceError
from .memory.ladder import Area, MemoryLadder
from .memory.shortage import first_line, is_out_of_memory, release

if TYPE_CHECKING:
    from .data.records import SampleRef
    from .distributed.reduction import Reduction
    from .optim.precision import Precision
    from .optim.reading import StepReading
    from .step_work import StepWork

Refs = Sequence["SampleRef"]

_TRIES = 3


@dataclass(frozen=True)
class _Try:
    """How one pass over the micro-batches went. `failed`: samples, bucket and the allocator's word."""

    stopped: bool = False
    failed: tuple[int, Area, str] | None = None


class Accumulation:
    """Adds up the gradients of a step.

    Args:
        compute_loss: weighted loss (B,) of samples in an epoch, with gradients.
        area: bucket of samples, for what is learnt about memory.
        should_stop: polled between micro-batches.
        context: around every forward (counting or moving activations); the ladder's own unless given.
        reduction: with several processes, the sum over them.
    """

    def __init__(
        self,
        precision: Precision,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        compute_loss: Callable[[int, Refs], torch.Tensor],
        area: Callable[[Refs], Area],
        should_stop: Callable[[], bool],
        ladder: MemoryLadder | None = None,
        context: Callable[[], AbstractContextManager[None]] | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        self._precision = precision
        self._optimizer = optimizer
        self._device = device
        self._compute_loss = compute_loss
        self._area = area
        self._should_stop = should_stop
        self.ladder = ladder or MemoryLadder()
        self.context = context or self.ladder.context
        self.reduction = reduction
        self.pieces = 0
        """Forwards that made up the last step here."""

    def measure(self, work: StepWork) -> StepReading | None:
        """`run`, then the step's one read from the device; None when asked to stop.

        Raises:
            ResourceError: memory ends again and again.
            ProcessError: another process is gone or failed.
        """
        said = ""
        for _ in range(_TRIES):
            if not self.run(work):
                return None
            try:
                return self._precision.read(self._optimizer)
            except (RuntimeError, MemoryError) as error:
                # With several processes the others have gone on by now, so this one cannot compute the step again.
                if not is_out_of_memory(error) or self.reduction is not None:
                    raise
                said = first_line(error)
            self._precision.unread(self._optimizer)
            release(self._device)
            self.ladder.again(said)
        raise ResourceError(
            f"There is no memory left to measure the gradients of a step: {said} The run is as it was before this "
            "step. Close other programs on the device, or use a lower rank, and resume."
        )

    def run(self, work: StepWork) -> bool:
        """Gradients and losses of the whole step, the same on every process. False when asked to stop.

        A pass that runs out of memory is undone and made again one rung lower, with the same samples and draws; with
        several processes all make it again, so that none waits for another.

        Raises:
            ResourceError: there is no lower rung.
            ProcessError: another process is gone or failed.
        """
        while True:
            tried = self._attempt(work)
            if tried.failed is not None:
                self._undo()
                self.ladder.climb(*tried.failed)
            if self.reduction is None:
                if tried.failed is None:
                    return not tried.stopped
                continue
            agreed = self.reduction.agree(out_of_memory=tried.failed is not None, stop=tried.stopped)
            if agreed.stop:
                return False
            if not agreed.out_of_memory:
                self._precision.losses = self.reduction.combine()
                return True
            if tried.failed is None:
                self._undo()

    def _attempt(self, work: StepWork) -> _Try:
        """One pass. What it holds of a failed forward is gone when this returns."""
        now: tuple[int, Area] = (0, (0, 0))
        self.pieces = 0
        try:
            for refs in self._own(work):
                area = self._area(refs)
                for piece in self.ladder.pieces(refs, area):
                    if self._should_stop():
                        return _Try(stopped=True)
                    now = len(piece), area
                    self.pieces += 1
                    with self.context():
                        loss_B = self._compute_loss(work.epoch, piece)
                    self._precision.backward(loss_B, work.divisor)
            if self.reduction is not None:
                self.reduction.prepare(self._optimizer, self._precision.losses)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return _Try(failed=(now[0], now[1], first_line(error)))
        return _Try()

    def _own(self, work: StepWork) -> Sequence[Refs]:
        return work.batches if self.reduction is None else self.reduction.own_share(work.batches)

    def _undo(self) -> None:
        """A backward that fails leaves gradients of some parameters behind: all go."""
        self._precision.abandon(self._optimizer)
        if self.reduction is not None:
            self.reduction.forget()
        release(self._device)
