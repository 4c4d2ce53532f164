"""An update that is made whole or not at all, also when memory ends in the middle of it.

An optimizer that fails half-way has moved some parameters and not others, and nothing tells which. So where memory is
scarce a copy of everything an update changes is kept in host memory while it is made; after a failure it is put back,
and the update is made again from the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import ResourceError
from ..optim.state import load_optimizer_state, optimizer_state
from .shortage import first_line, is_out_of_memory, release

if TYPE_CHECKING:
    from ..optim.ema import Ema

T = TypeVar("T")

_TRIES = 3


@dataclass
class _Kept:
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    state: tuple[dict[str, torch.Tensor], dict[str, Any]]
    groups: list[dict[str, Any]]
    averages: tuple[dict[str, torch.Tensor], int] | None


class UpdateGuard:
    """Guards the updates of one optimizer.

    Args:
        room: bytes that could be allocated on the device now; None when that is not known.
        tell: says what happened, in words.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        ema: Ema | None = None,
        room: Callable[[], int | None] | None = None,
        tell: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._optimizer = optimizer
        self._device = device
        self._ema = ema
        self._bytes = sum(parameter.numel() * 4 for parameter in self._parameters())
        self._room = room or (lambda: free_bytes(device))
        self._tell = tell
        self.whole = True
        """Whether the state is that after a decided step: not while an update is made, nor after one that failed."""

    def run(self, update: Callable[[], T], settle: Callable[[T], None] = lambda result: None) -> T:
        """`update()`, which changes parameters, gradients, optimizer state and averages and nothing else; then
        `settle` with its result, which may be called again after a failure.

        Raises:
            ResourceError: it ran out of memory, again and again, or without a copy to go back to.
        """
        self.whole = False
        result = self._make(update)
        said = ""
        for _ in range(_TRIES):
            try:
                settle(result)
                self.whole = True
                return result
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                said = first_line(error)
            release(self._device)
            self._tell(f"Memory ended after the update was made; its end is tried again: {said}")
        raise self._given_up(said)

    def _make(self, update: Callable[[], T]) -> T:
        said = ""
        for _ in range(_TRIES):
            kept: _Kept | None = None
            copying = self._is_needed() or bool(said)
            try:
                if copying:
                    kept = self._keep()
                    copying = False
                return update()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                said = first_line(error)
            # Outside the except block: the frames of the failed update are gone now.
            if copying:  # nothing was changed yet
                release(self._device)
                self._tell(f"Memory ended before the update began; it is tried again: {said}")
                continue
            if kept is None:
                raise ResourceError(
                    f"The update ran out of memory: {said} It may be half made, so it is not kept. "
                    "Resume from the last checkpoint; close other programs on the device first."
                )
            self._optimizer.zero_grad(set_to_none=True)
            self._optimizer.state.clear()
            release(self._device)
            self._put_back(kept)
            self._tell(f"The update ran out of memory and is made again from the same gradients: {said}")
        self.whole = True  # nothing was changed, or it was put back
        raise self._given_up(said)

    def _given_up(self, said: str) -> ResourceError:
        return ResourceError(
            f"The update ran out of memory {_TRIES} times: {said} Close other programs on the device, or use an "
            "optimizer with less state (adamw8bit, adafactor), and resume."
        )

    def _is_needed(self) -> bool:
        """Whether an update might not fit: new moments on the first step, and about one temporary of each parameter."""
        room = self._room()
        if room is None:
            return True
        return room < (2 if self._optimizer.state else 4) * self._bytes

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _keep(self) -> _Kept:
        parameters = self._parameters()
        return _Kept(
            parameters=[parameter.detach().to("cpu", copy=True) for parameter in parameters],
            gradients=[None if p.grad is None else p.grad.to("cpu", copy=True) for p in parameters],
            state=optimizer_state(self._optimizer),
            groups=[
                {k: v for k, v in group.items() if not isinstance(v, torch.Tensor) and k != "params"}
                for group in self._optimizer.param_groups
            ],
            averages=None if self._ema is None else self._ema.state(),
        )

    @torch.no_grad()
    def _put_back(self, kept: _Kept) -> None:
        for parameter, value, gradient in zip(self._parameters(), kept.parameters, kept.gradients, strict=True):
            parameter.copy_(value)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
        for group, values in zip(self._optimizer.param_groups, kept.groups, strict=True):
            group.update(values)
        load_optimizer_state(self._optimizer, *kept.state)
        if self._ema is not None and kept.averages is not None:
            self._ema.load_state(*kept.averages)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that could be allocated on `device`: free ones, and those torch holds without need. None = not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu":
        import psutil

        return int(psutil.virtual_memory().available)
    return None
