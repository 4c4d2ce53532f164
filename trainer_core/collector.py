"""Python's cycle collector, switched off where thousands of objects are made and no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection in the block. Every few thousand new objects the collector may walk through all that the process
    holds, half a second where the libraries of training are loaded."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
