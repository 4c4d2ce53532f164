"""Copies of a run's state that training cannot change, taken fast enough to sit inside a step.

Memory is taken once and used again (fresh pages cost more than the copy itself); tensors on a GPU are copied into
pinned memory, all started first and waited for once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from .state import RunState, encode

Buffers = dict[str, torch.Tensor]


class SnapshotPool:
    """Hands out snapshots and takes their memory back. At most `size` sets of buffers are kept (one being written, one
    waiting); more are made when needed and dropped afterwards."""

    def __init__(self, size: int = 2) -> None:
        self._size = size
        self._free: list[RunState] = []

    def take(self, state: RunState, step: int) -> RunState:
        """A copy of `state` on the CPU that shares nothing with it. Raises ValueError for NaN in its JSON part."""
        scalars = json.loads(encode(state.scalars, step))["scalars"]
        old = self._free.pop() if self._free else RunState({}, {})
        snapshot = RunState(_copy(state.adapter, old.adapter), _copy(state.optimizer, old.optimizer), scalars, step)
        devices = {tensor.device for tensor in (*state.adapter.values(), *state.optimizer.values()) if tensor.is_cuda}
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return snapshot

    def give_back(self, snapshot: RunState) -> None:
        """The snapshot is written (or replaced by a newer one): its memory may be used again."""
        if len(self._free) < self._size:
            self._free.append(snapshot)


def _copy(source: Mapping[str, torch.Tensor], old: Buffers) -> Buffers:
    copies: Buffers = {}
    for name, tensor in source.items():
        buffer = old.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name] = buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
    return copies
