"""What differs between operating systems: file locks, flushing, renames, child processes, stop signals.

Each function chooses its branch by `system` (a value of `sys.platform`) and reaches the operating system through
injected calls, so that the Windows branches are unit-tested on any machine.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

WINDOWS = "win32"

_LOCK_OFFSET = 1 << 30
"""Byte that is locked on Windows: far past the text, which other processes must be able to read."""

_BUSY = frozenset({errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK, errno.EDEADLK})
_NETWORK_FILE_SYSTEMS = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "fuse.sshfs",
    "afs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
)

Load = Callable[[str], ModuleType]


@dataclass(frozen=True)
class LockCalls:
    """Take and give back an exclusive lock on an open file; `take` raises OSError when another process holds it."""

    take: Callable[[int], None]
    give: Callable[[int], None]


def lock_calls(system: str = sys.platform, load: Load = importlib.import_module) -> LockCalls:
    """The lock calls of `system`: flock, or byte-range locking on Windows."""
    if system == WINDOWS:
        msvcrt: Any = load("msvcrt")

        def at(fd: int, mode: int) -> None:
            os.lseek(fd, _LOCK_OFFSET, os.SEEK_SET)
            msvcrt.locking(fd, mode, 1)

        return LockCalls(lambda fd: at(fd, msvcrt.LK_NBLCK), lambda fd: at(fd, msvcrt.LK_UNLCK))
    fcntl: Any = load("fcntl")
    return LockCalls(
        lambda fd: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB), lambda fd: fcntl.flock(fd, fcntl.LOCK_UN)
    )


class LockBusy(OSError):
    """Another process holds the lock."""


class LockUnsupported(OSError):
    """The file system has no locks."""


@contextlib.contextmanager
def locked(path: Path, calls: LockCalls | None = None) -> Generator[int, None, None]:
    """Hold the lock file `path` and yield its descriptor.

    Raises LockBusy when another process holds it, LockUnsupported, or another OSError when it cannot be opened.
    """
    calls = calls or lock_calls()
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            calls.take(fd)
        except OSError as error:
            kind = LockBusy if error.errno in _BUSY else LockUnsupported
            raise kind(error.errno, error.strerror) from error
        try:
            yield fd
        finally:
            calls.give(fd)
    finally:
        os.close(fd)


class DurableIO:
    """The file operations of saving, one method each, so that tests can fail or kill any of them."""

    def __init__(self, system: str = sys.platform, sleep: Callable[[float], None] = time.sleep) -> None:
        self.system = system
        self._sleep = sleep

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True)

    def open(self, path: Path) -> int:
        """Open a new file for writing; FileExistsError when the name is taken."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """Flush a folder's entries. Windows cannot open folders; NTFS journals renames itself."""
        if self.system == WINDOWS:
            return
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Give `source` its final name. On Windows scanners hold fresh files open for moments: tried for 2 s."""
        self._patiently(lambda: os.rename(source, target))

    def replace(self, source: Path, target: Path) -> None:
        """Like `rename`, for files, over an existing one."""
        self._patiently(lambda: os.replace(source, target))

    def remove_file(self, path: Path) -> None:
        self._patiently(lambda: os.unlink(path))

    def remove_folder(self, path: Path) -> None:
        self._patiently(lambda: os.rmdir(path))

    def sees(self, path: Path) -> bool:
        """Whether a file that was given its name is there; looked for during 5 s."""
        for left in reversed(range(50)):
            try:
                path.stat()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
                if left:
                    self._sleep(0.1)
            else:
                return True
        return False

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free

    def write_all(self, fd: int, data: memoryview | bytes, chunk: int = 4 << 20) -> Iterator[memoryview]:
        """Write `data` piece by piece, yielding each piece after it was handed to the system (for digests)."""
        view = memoryview(data).cast("B")
        while len(view):
            written = self.write(fd, view[:chunk])
            if written <= 0:
                raise OSError(errno.EIO, "the file system took no bytes")
            yield view[:written]
            view = view[written:]

    def write_file(self, path: Path, data: bytes) -> None:
        """A new file with `data`, flushed to the disk."""
        fd = self.open(path)
        try:
            for _ in self.write_all(fd, data):
                pass
            self.sync(fd)
        finally:
            self.close(fd)

    def replace_file(self, path: Path, data: bytes) -> None:
        """`data` under the name `path`, whole or not at all: temporary file, flush, rename, flush of the folder."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with contextlib.suppress(FileNotFoundError):
            self.remove_file(temporary)
        try:
            self.write_file(temporary, data)
            self.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                self.remove_file(temporary)
            raise
        self.sync_folder(path.parent)

    def _patiently(self, call: Callable[[], None], tries: int = 20) -> None:
        for left in reversed(range(tries if self.system == WINDOWS else 1)):
            try:
                call()
            except PermissionError:
                if not left:
                    raise
                self._sleep(0.1)
            else:
                return


def is_network_path(path: Path, partitions: Callable[[], list[tuple[str, str]]] | None = None) -> bool:
    """Whether `path` lies on a network file system, where SQLite's WAL and flock do not hold."""
    mounts = (partitions or _partitions)()
    text = str(path.resolve())
    inside = [(mount, kind) for mount, kind in mounts if text == mount or text.startswith(mount.rstrip("/\\") + os.sep)]
    if not inside:
        return text.startswith("\\\\")
    _, kind = max(inside, key=lambda pair: len(pair[0]))
    return kind.lower().startswith(_NETWORK_FILE_SYSTEMS)


def _partitions() -> list[tuple[str, str]]:
    import psutil

    return [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]


class ChildOptions(NamedTuple):
    """`subprocess.Popen` options of the same names."""

    creationflags: int
    start_new_session: bool


def child_options(system: str = sys.platform) -> ChildOptions:
    """Options that keep a terminal's Ctrl-C away from the worker: its supervisor forwards it as a command."""
    if system == WINDOWS:
        new_group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0x00000200)
        return ChildOptions(new_group | getattr(subprocess, "CREATE_NO_WINDOW", 0x08000000), False)
    return ChildOptions(0, True)


def end_child(process: subprocess.Popen[bytes], grace: float = 5.0, system: str = sys.platform) -> int:
    """End a child that no longer answers: politely where the system knows how, then by force. Returns its exit code."""
    if process.poll() is None:
        if system != WINDOWS:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(grace)
        process.kill()
    return process.wait()


def stop_signals(system: str = sys.platform, source: Any = signal) -> tuple[int, ...]:
    """Signals that mean "stop": SIGINT, SIGTERM and, on Windows, SIGBREAK (Ctrl-Break, sent by process groups)."""
    names = ("SIGINT", "SIGTERM", "SIGBREAK") if system == WINDOWS else ("SIGINT", "SIGTERM")
    return tuple(int(getattr(source, name)) for name in names if hasattr(source, name))


_PAGE = 4096


def fill_holes(path: Path) -> None:
    """Give every page of a file its place on the disk; the content stays. OSError when there is no room.

    A byte of each page is written over with itself, which every file system understands. A file in use by this process
    alone may be mapped meanwhile.
    """
    with path.open("r+b", buffering=0) as file:
        for start in range(0, path.stat().st_size, _PAGE):
            file.seek(start)
            byte = file.read(1)
            file.seek(start)
            file.write(byte)
        os.fsync(file.fileno())
