"""Copies of a run's state that training cannot change, taken fast enough to sit inside a step.

Memory is taken once and used again: touching fresh pages costs several times the copy itself, so the first set can be
made ready beside the training. Tensors on a GPU are copied into pinned memory, all started first and waited for once.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping

import torch

from ..collector import collector_paused
from .state import RunState, encode

Buffers = dict[str, torch.Tensor]

_ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every element's size."""


class SnapshotPool:
    """Hands out snapshots and takes their memory back. At most `size` sets of buffers are kept (one being written, one
    waiting); more are made when needed and dropped afterwards."""

    def __init__(self, size: int = 2) -> None:
        self._size = size
        self._free: list[RunState] = []

    def prepare(self, like: RunState) -> None:
        """Have memory for one snapshot of such a state ready, if there is none. Of `like` only names, shapes and types
        are read, so that another thread may do this while its values change."""
        if not self._free:
            with collector_paused():  # it would hold the interpreter's lock, and with it the training
                self._free.append(RunState(_room(like.adapter, touch=True), _room(like.optimizer, touch=True)))

    def take(self, state: RunState, step: int) -> RunState:
        """A copy of `state` on the CPU that shares nothing with it. Raises ValueError for NaN in its JSON part."""
        scalars = json.loads(encode(state.scalars, step))["scalars"]
        old = self._free.pop() if self._free else RunState(_room(state.adapter), _room(state.optimizer))
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


def _room(like: Mapping[str, torch.Tensor], *, touch: bool = False) -> Buffers:
    """Uninitialised buffers in one piece of memory, pinned when a tensor is on a GPU; its pages are there at once with
    `touch`."""
    ends: dict[str, int] = {}
    end = 0
    for name, tensor in like.items():
        end += math.ceil(tensor.numel() * tensor.element_size() / _ALIGNMENT) * _ALIGNMENT
        ends[name] = end
    memory = torch.empty(end, dtype=torch.uint8, pin_memory=any(tensor.is_cuda for tensor in like.values()))
    if touch:
        memory.numpy()[:: mmap.PAGESIZE] = 0  # numpy: in this thread alone, without the interpreter's lock
    buffers: Buffers = {}
    begin = 0
    for name, tensor in like.items():
        size = tensor.numel() * tensor.element_size()
        buffers[name] = memory[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        begin = ends[name]
    return buffers
