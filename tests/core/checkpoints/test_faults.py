"""The store under kills, full and lying disks (rows C1 to C13 of the fault matrix that concern the store)."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer_core.checkpoints import manifest as names
from trainer_core.checkpoints.state import RunState
from trainer_core.checkpoints.store import CheckpointStore
from trainer_core.errors import CheckpointError, ResourceError
from trainer_core.runs.platform import DurableIO

from .faulty_io import FailingWrites, KillAt, LyingWrites


def state(step: int) -> RunState:
    return RunState(
        {"a": torch.full((64,), float(step))},
        {"a.exp_avg": torch.full((128,), float(step))},
        {"step": step, "text": "x" * 99},
    )


def assert_whole(loaded: RunState) -> None:
    """Adapter, optimizer and JSON are of one step."""
    step = float(loaded.step)
    assert bool((loaded.adapter["a"] == step).all())
    assert bool((loaded.optimizer["a.exp_avg"] == step).all())
    assert loaded.scalars["step"] == loaded.step


def save_and_prune(folder: Path, io: DurableIO) -> None:
    """What every kill interrupts: step 6 saved beside 2 and 4, then pruned to one besides the protected 4."""
    store = CheckpointStore(folder, io=io)
    store.save(state(6), 6)
    store.prune(1, protect=(4,))


def kill_in_children(folder: Path, points: list[int]) -> None:
    """For each point a forked child saves into `folder/<point>` and kills itself there."""
    for point in points:
        child = os.fork()
        if child == 0:
            try:
                save_and_prune(folder / str(point), KillAt(point))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"point {point} was not reached"
        assert os.WTERMSIG(status) == signal.SIGKILL


def prepare(folder: Path) -> None:
    store = CheckpointStore(folder)
    store.save(state(2), 2)
    store.save(state(4), 4)


def operations(tmp_path: Path) -> list[str]:
    prepare(tmp_path / "count")
    io = KillAt()
    save_and_prune(tmp_path / "count", io)
    return io.names


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is a POSIX signal")
def test_killed_before_any_operation_the_newest_whole_one_loads(tmp_path: Path) -> None:
    """C1 to C7: SIGKILL before each file operation of save and prune, and in the middle of each write."""
    met = operations(tmp_path)
    assert {"make_folder", "open adapter.safetensors", "write", "sync", "open manifest.json", "sync_folder"} <= set(met)
    assert {"rename to step", "rename to .trash", "remove_file", "remove_folder"} <= set(met)
    points = list(range(len(met)))
    prepare(tmp_path / "fresh")
    for point in points:
        shutil.copytree(tmp_path / "fresh", tmp_path / str(point))
    kill_in_children(tmp_path, points)
    renamed = met.index("rename to step")
    for point in points:
        store = CheckpointStore(tmp_path / str(point))
        loaded = store.load("latest", set_aside=False)
        assert_whole(loaded)
        assert loaded.passed_over == (), met[point]
        # Killed before the rename the old one is newest; afterwards the new one.
        assert loaded.step == (4 if point <= renamed else 6), met[point]
        store.save(state(8), 8)
        assert not [path.name for path in store.folder.iterdir() if path.name.startswith(".")], met[point]
        assert store.load().step == 8


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.8, 0.99])
def test_a_full_disk_leaves_the_older_ones_and_nothing_half_written(
    tmp_path: Path, share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """C8, case B22: writes fail after a share of the bytes; a later save works when space is back."""
    prepare(tmp_path)
    count = FailingWrites(1 << 20)
    CheckpointStore(tmp_path_factory.mktemp("count"), io=count).save(state(6), 6)
    io = FailingWrites(int(share * ((1 << 20) - count.room)))
    store = CheckpointStore(tmp_path, io=io)
    with pytest.raises(
        ResourceError, match=r"step 6 does not fit \(No space left.*\): [\d,]+ bytes needed, [\d,]+ bytes free"
    ):
        store.save(state(6), 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]
    assert store.load().step == 4
    io.room = 1 << 20
    store.save(state(6), 6)
    assert_whole(store.load(6))


def test_the_rename_is_given_only_to_what_fits(tmp_path: Path) -> None:
    """Free space is looked at before a byte is written; the message has needed and free bytes."""

    class NoSpace(DurableIO):
        def free_bytes(self, path: Path) -> int:
            return 12_345

    with pytest.raises(ResourceError, match=r"[\d,]+ bytes needed, 12,345 bytes free") as caught:
        CheckpointStore(tmp_path, io=NoSpace()).save(state(6), 6)
    needed = int(re.findall(r"([\d,]+) bytes needed", str(caught.value))[0].replace(",", ""))
    assert needed > state(6).tensor_bytes()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no file-size limits")
def test_a_real_file_size_limit(tmp_path: Path) -> None:
    """Case B22 with RLIMIT_FSIZE, in a child because the limit holds for the whole process."""
    prepare(tmp_path)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = save_under_a_limit(tmp_path)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (tmp_path / "trouble").read_text(encoding="utf-8")
    assert "larger than this file system or a limit on the process allows" in (tmp_path / "trouble").read_text(
        encoding="utf-8"
    )
    assert_whole(CheckpointStore(tmp_path).load(6))


def save_under_a_limit(folder: Path) -> int:
    """Exit code 0 when the save failed as it should, left step 4 loadable, and worked again without the limit."""
    store = CheckpointStore(folder)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, hard))
    trouble = "no error"
    try:
        store.save(state(6), 6)
    except ResourceError as error:
        trouble = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    (folder / "trouble").write_text(trouble, encoding="utf-8")
    before = store.load().step
    store.save(state(6), 6)
    return 0 if before == 4 and store.load().step == 6 else 1


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES])
def test_a_failing_disk_is_named_and_leaves_the_older_ones(tmp_path: Path, number: int) -> None:
    prepare(tmp_path)
    store = CheckpointStore(tmp_path, io=FailingWrites(500, number))
    with pytest.raises(
        ResourceError, match=f"step 6 cannot be written to .*{os.strerror(number)}.*Older checkpoints are untouched"
    ):
        store.save(state(6), 6)
    assert store.load().step == 4


@pytest.mark.parametrize(
    "change", [lambda data: bytes(len(data)), lambda data: data[:-1], lambda data: data[:20] + b"\0" + data[21:]],
    ids=["zeros", "short", "one byte"],
)  # fmt: skip
def test_what_the_disk_did_not_keep_is_not_acknowledged(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    """C9: the file is read back after the rename; a wrong one is set aside, and the older one stays the newest."""
    prepare(tmp_path)
    store = CheckpointStore(tmp_path, io=LyingWrites(change))
    with pytest.raises(
        CheckpointError, match="step-00000006 was written and reads back wrong: .*older ones are untouched"
    ):
        store.save(state(6), 6)
    loaded = CheckpointStore(tmp_path).load()
    assert loaded.step == 4
    assert loaded.passed_over == ()


class LateRename(DurableIO):
    """A network drive (C13) that shows a new name only at the `at`-th look, after a stale handle."""

    def __init__(self, at: int) -> None:
        super().__init__(sleep=self.look)
        self.looks, self.at = 0, at
        self.renames: list[tuple[Path, Path]] = []

    def rename(self, source: Path, target: Path) -> None:
        self.renames.append((source, target))

    def look(self, seconds: float) -> None:
        self.looks += 1
        if self.looks == self.at:
            self.appear()

    def appear(self) -> None:
        for source, target in self.renames:
            os.rename(source, target)
        self.renames.clear()


def test_a_name_that_is_seen_late_is_waited_for(tmp_path: Path) -> None:
    prepare(tmp_path)
    store = CheckpointStore(tmp_path, io=LateRename(3))
    saved = store.save(state(6), 6)
    assert saved.verified
    assert_whole(store.load())
    assert store.load().step == 6


def test_a_name_that_is_not_seen_is_told_and_no_damage(tmp_path: Path) -> None:
    prepare(tmp_path)
    io = LateRename(10**6)
    with pytest.raises(CheckpointError, match="does not show it under its name: it may not last"):
        CheckpointStore(tmp_path, io=io).save(state(6), 6)
    assert CheckpointStore(tmp_path).load().step == 4
    io.appear()
    loaded = CheckpointStore(tmp_path).load()
    assert_whole(loaded)
    assert loaded.step == 6, "it came after all, and is whole"


def test_a_stale_handle_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([OSError(errno.ESTALE, os.strerror(errno.ESTALE)), None])
    stat = Path.stat

    def stale_once(path: Path, **options: bool) -> os.stat_result:
        if error := next(answers, None):
            raise error
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", stale_once)
    assert DurableIO(sleep=lambda _: None).sees(tmp_path)


def test_a_failed_flush_is_no_success(tmp_path: Path) -> None:
    """fsync errors (C9): the data may be lost although every write succeeded."""

    class FailingSync(DurableIO):
        def sync(self, fd: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    prepare(tmp_path)
    with pytest.raises(ResourceError, match="Input/output error"):
        CheckpointStore(tmp_path, io=FailingSync()).save(state(6), 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]


def test_a_read_only_folder_can_be_loaded_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The damaged one cannot be set aside; it is passed over all the same. Deleting old ones fails without harm."""

    class ReadOnly(DurableIO):
        def rename(self, source: Path, target: Path) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    prepare(tmp_path)
    store = CheckpointStore(tmp_path, io=ReadOnly())
    assert store.prune(1) == []
    assert "step-00000002 cannot be deleted: Read-only file system" in caplog.text
    (tmp_path / "step-00000004" / names.STATE).write_bytes(b"{}")
    assert store.load().step == 2
    assert "step-00000004 cannot be set aside: Read-only file system" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]


def test_files_are_flushed_before_the_manifest_and_the_rename(tmp_path: Path) -> None:
    """The order of the protocol: every file synced, manifest last, folder synced, rename, parent synced."""
    prepare(tmp_path)
    io = KillAt()
    CheckpointStore(tmp_path, io=io).save(state(6), 6)
    order = [name for name in io.names if name != "write"]
    assert order == [
        "make_folder", "open adapter.safetensors", "sync", "open optimizer.safetensors", "sync", "open state.json",
        "sync", "open manifest.json", "sync", "sync_folder", "rename to step", "sync_folder", "open verified", "sync",
    ]  # fmt: skip
