"""File operations that fail, lie or kill at a chosen place, for the fault tests of the store."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

from trainer_core.runs.platform import DurableIO


class KillAt(DurableIO):
    """SIGKILLs its own process before operation number `at` (from 0); a write is killed after half its bytes.

    `names` lists the operations met so far.
    """

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at = at
        self.names: list[str] = []

    def _count(self, name: str) -> bool:
        self.names.append(name)
        return self.at == len(self.names) - 1

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def make_folder(self, path: Path) -> None:
        if self._count("make_folder"):
            self._die()
        super().make_folder(path)

    def open(self, path: Path) -> int:
        if self._count(f"open {path.name}"):
            self._die()
        return super().open(path)

    def write(self, fd: int, data: memoryview) -> int:
        if self._count("write"):
            super().write(fd, data[: len(data) // 2])
            self._die()
        return super().write(fd, data)

    def sync(self, fd: int) -> None:
        if self._count("sync"):
            self._die()
        super().sync(fd)

    def sync_folder(self, path: Path) -> None:
        if self._count("sync_folder"):
            self._die()
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        if self._count(f"rename to {target.name.split('-')[0]}"):
            self._die()
        super().rename(source, target)

    def remove_file(self, path: Path) -> None:
        if self._count("remove_file"):
            self._die()
        super().remove_file(path)

    def remove_folder(self, path: Path) -> None:
        if self._count("remove_folder"):
            self._die()
        super().remove_folder(path)


class FailingWrites(DurableIO):
    """Takes `room` bytes in all, then fails like a full (or broken) disk until `room` is raised."""

    def __init__(self, room: int, number: int = errno.ENOSPC) -> None:
        super().__init__()
        self.room = room
        self.number = number

    def write(self, fd: int, data: memoryview) -> int:
        if self.room <= 0:
            raise OSError(self.number, os.strerror(self.number))
        written = super().write(fd, data[: self.room])
        self.room -= written
        return written


class LyingWrites(DurableIO):
    """Writes what `change` makes of the data and reports success: a disk that does not keep what it was given."""

    def __init__(self, change: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self.change = change

    def write(self, fd: int, data: memoryview) -> int:
        os.write(fd, self.change(bytes(data)))
        return len(data)
