"""The UNet's repeated blocks through torch.compile, switched on around a training step's passes and nowhere else.

Block by block and not the whole UNet: what stands between the blocks (recomputation, skips) stays Python, and equal
blocks share their graphs. Every shape gets graphs of its own (`dynamic=False`): which graph computes a step must not
depend on the shapes seen before it, or a resumed run would round otherwise than the unbroken one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_REPEATED = ("BasicTransformerBlock", "ResnetBlock2D")
_MANY = 1 << 14
"""Variants of a block's graph before torch would give up and run it as it is, without an error (its own limit is 8)."""


class CompiledBlocks:
    """Compiles the repeated blocks of `unet` with a back end of torch.compile; until `on` nothing is changed.

    Each block's `forward` is replaced, not its call, so that hooks on the block itself run as always.
    """

    def __init__(self, unet: nn.Module, backend: str) -> None:
        # Our own processes import torch with the compiler off (`libraries.py`), and torch asks again here.
        os.environ.pop("TORCHDYNAMO_DISABLE", None)
        torch.compiler.reset()  # graphs of an earlier run in this process would count as known, and not be compared
        self.backend = backend
        self._blocks = {name: block for name, block in unet.named_modules() if type(block).__name__ in _REPEATED}
        self._forwards: dict[str, Callable[..., Any]] = {
            name: torch.compile(block.forward, backend=backend, dynamic=False) for name, block in self._blocks.items()
        }
        self._before = _counts()

    @property
    def graphs(self) -> int:
        """Graphs compiled since this was made, by anyone in this process."""
        return _counts()[0] - self._before[0]

    @property
    def graph_breaks(self) -> int:
        """Places at which the compiler went back to Python."""
        return _counts()[1] - self._before[1]

    @contextmanager
    def on(self) -> Iterator[None]:
        """The blocks run compiled within, in forward and backward. A hook that was put on a layer inside of a block
        since it was compiled makes it be compiled again, with the hook."""
        from torch._dynamo import config

        settings: dict[str, Any] = {name: _MANY for name in _LIMITS if hasattr(config, name)}
        with config.patch({"skip_nnmodule_hook_guards": False, **settings}):
            for name, block in self._blocks.items():
                block.__dict__["forward"] = self._forwards[name]
            try:
                yield
            finally:
                for block in self._blocks.values():
                    block.__dict__.pop("forward", None)


# The names that torch has had for them.
_LIMITS = ("recompile_limit", "accumulated_recompile_limit", "cache_size_limit", "accumulated_cache_size_limit")


def _counts() -> tuple[int, int]:
    """Graphs and graph breaks of this process so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def compiler_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises for its own failures: back end, missing C++ compiler or Triton, code it cannot read."""
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException,)
