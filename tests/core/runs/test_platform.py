"""Both branches of everything that differs between systems, the Windows ones with injected calls."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trainer_core.runs.platform import (
    WINDOWS,
    DurableIO,
    LockBusy,
    LockCalls,
    LockUnsupported,
    child_options,
    end_child,
    fill_holes,
    is_network_path,
    lock_calls,
    locked,
    stop_signals,
)


class FakeMsvcrt(ModuleType):
    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self, busy: bool = False) -> None:
        super().__init__("msvcrt")
        self.calls: list[tuple[int, int, int]] = []
        self.busy = busy

    def locking(self, fd: int, mode: int, count: int) -> None:
        self.calls.append((os.lseek(fd, 0, os.SEEK_CUR), mode, count))
        if self.busy and mode == self.LK_NBLCK:
            raise OSError(errno.EACCES, "Permission denied")


def test_windows_locks_one_byte_far_past_the_text(tmp_path: Path) -> None:
    msvcrt = FakeMsvcrt()
    asked: list[str] = []
    calls = lock_calls(WINDOWS, lambda name: asked.append(name) or msvcrt)
    with locked(tmp_path / "lock", calls):
        pass
    assert asked == ["msvcrt"]
    assert msvcrt.calls == [(1 << 30, 2, 1), (1 << 30, 0, 1)]


def test_a_busy_windows_lock_is_told_from_a_broken_one(tmp_path: Path) -> None:
    calls = lock_calls(WINDOWS, lambda _: FakeMsvcrt(busy=True))
    with pytest.raises(LockBusy, match="Permission denied"), locked(tmp_path / "lock", calls):
        pass
    with pytest.raises(IsADirectoryError), locked(tmp_path, calls):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="flock is POSIX")
def test_a_second_flock_is_refused_and_a_freed_one_taken(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"), pytest.raises(LockBusy), locked(tmp_path / "lock"):
        pass
    with locked(tmp_path / "lock"):
        pass


def test_windows_renames_patiently_and_posix_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virus scanner holds a fresh file open: the third try succeeds."""
    failures = iter([PermissionError(13, "in use"), PermissionError(13, "in use"), None])
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if error := next(failures):
            raise error
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    (tmp_path / "a").touch()
    slept: list[float] = []
    DurableIO(WINDOWS, slept.append).rename(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").exists()
    assert slept == [0.1, 0.1]
    failures = iter([PermissionError(13, "in use")])
    with pytest.raises(PermissionError):
        DurableIO("linux", slept.append).rename(tmp_path / "b", tmp_path / "c")


def test_windows_gives_up_after_two_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "in use")

    monkeypatch.setattr(os, "rename", refuse)
    slept: list[float] = []
    with pytest.raises(PermissionError):
        DurableIO(WINDOWS, slept.append).rename(tmp_path / "a", tmp_path / "b")
    assert sum(slept) == pytest.approx(1.9)


def test_windows_flushes_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda *arguments: opened.append(arguments) or real(*arguments))
    DurableIO(WINDOWS).sync_folder(tmp_path)
    assert opened == []
    if sys.platform != "win32":
        DurableIO("linux").sync_folder(tmp_path)
        assert opened == [(tmp_path, os.O_RDONLY)]


def test_replace_file_leaves_the_old_one_when_it_fails(tmp_path: Path) -> None:
    class Full(DurableIO):
        def write(self, fd: int, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    DurableIO().replace_file(tmp_path / "x", b"old")
    with pytest.raises(OSError, match="No space left"):
        Full().replace_file(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    DurableIO().replace_file(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"


def test_short_writes_are_continued_and_no_progress_is_an_error(tmp_path: Path) -> None:
    class Short(DurableIO):
        def __init__(self, most: int) -> None:
            super().__init__()
            self.most = most

        def write(self, fd: int, data: memoryview) -> int:
            return super().write(fd, data[: self.most])

    Short(3).write_file(tmp_path / "x", b"0123456789")
    assert (tmp_path / "x").read_bytes() == b"0123456789"
    with pytest.raises(OSError, match="took no bytes"):
        Short(0).write_file(tmp_path / "y", b"0123456789")


@pytest.mark.skipif(sys.platform == "win32", reason="paths of POSIX mounts")
@pytest.mark.parametrize(
    ("path", "network"),
    [("/", False), ("/data/x", True), ("/data/local/x", False), ("/database", False), ("/srv/share/run", True)],
)
def test_network_file_systems_are_known_by_the_longest_mount(path: str, network: bool) -> None:
    mounts = [("/", "ext4"), ("/data", "nfs4"), ("/data/local", "xfs"), ("/srv/share", "fuse.sshfs")]
    assert is_network_path(Path(path), lambda: mounts) is network


def test_child_options_of_both_systems() -> None:
    assert child_options("linux") == (0, True)
    assert child_options(WINDOWS) == (0x00000200 | 0x08000000, False)


class FakeChild:
    def __init__(self, obeys: bool) -> None:
        self.obeys, self.code, self.calls = obeys, None, []

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.calls.append("terminate")
        self.code = -15 if self.obeys else None

    def kill(self) -> None:
        self.calls.append("kill")
        self.code = -9

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None:
            raise subprocess.TimeoutExpired("x", timeout or 0)
        return self.code


@pytest.mark.parametrize(
    ("system", "obeys", "calls", "code"),
    [
        ("linux", True, ["terminate"], -15),
        ("linux", False, ["terminate", "kill"], -9),
        (WINDOWS, True, ["kill"], -9),  # terminate and kill are the same there
    ],
)
def test_ending_a_child(system: str, obeys: bool, calls: list[str], code: int) -> None:
    child: Any = FakeChild(obeys)
    assert end_child(child, 0.01, system) == code
    assert child.calls == calls


def test_stop_signals_of_both_systems() -> None:
    assert stop_signals("linux") == (signal.SIGINT, signal.SIGTERM)
    windows = SimpleNamespace(SIGINT=2, SIGTERM=15, SIGBREAK=21)
    assert stop_signals(WINDOWS, windows) == (2, 15, 21)
    assert stop_signals("linux", windows) == (2, 15)


def test_lock_calls_without_locks_are_not_busy(tmp_path: Path) -> None:
    def unsupported(_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with pytest.raises(LockUnsupported, match="No locks"), locked(tmp_path / "x", LockCalls(unsupported, print)):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="files are without holes there")
def test_a_file_with_holes_gets_its_places(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(b"begin")
        file.seek(300_000)
        file.write(b"middle")
        file.truncate(1_000_001)
    before = path.read_bytes()
    assert path.stat().st_blocks * 512 < 500_000, "this file system makes holes"
    fill_holes(path)
    assert path.stat().st_blocks * 512 >= 1_000_001
    assert path.read_bytes() == before
