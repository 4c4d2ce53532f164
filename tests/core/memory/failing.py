"""An allocator that fails where it is told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB (injected)"


class FailAt(TorchDispatchMode):
    """Raises torch's out-of-memory error at the operations for which `fails` says so; counts them from 0."""

    def __init__(self, fails: Callable[[int], bool] = lambda number: False) -> None:
        super().__init__()
        self.fails = fails
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "profiler":  # allocates nothing
            return func(*args, **(kwargs or {}))
        number, self.operations = self.operations, self.operations + 1
        if self.fails(number):
            raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))
