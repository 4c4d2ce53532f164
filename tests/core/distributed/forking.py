"""The processes of one group, forked from one that has done its imports."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable


def fork_ranks(count: int, work: Callable[[int, int], None]) -> list[int]:
    """Fork `count` processes, each of which does `work(rank, port)` with one free port for all; their ids."""
    with socket.socket() as stream:
        stream.bind(("127.0.0.1", 0))
        port = int(stream.getsockname()[1])
    pids: list[int] = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            try:
                work(rank, port)
            except BaseException:  # noqa: BLE001 - a forked process must not go on as its parent
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    return pids
