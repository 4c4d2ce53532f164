"""What every node's `execute` is wrapped in: nothing that ends threads may leave a node."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def contained(execute: Callable[P, R]) -> Callable[P, R]:
    """Turn `SystemExit` and `KeyboardInterrupt` into an ordinary error.

    Either of them, raised in a node (a library that parses arguments is enough), ends ComfyUI's prompt thread: the
    queue then never moves again until the server is restarted.
    """

    @functools.wraps(execute)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return execute(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(f"A library asked to end the program ({type(error).__name__}: {error}).") from error

    return run
