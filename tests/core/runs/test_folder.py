"""The run folder: names, config, lock, write test."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from trainer_core.errors import ConfigError, ResourceError
from trainer_core.runs import folder as module
from trainer_core.runs.folder import RunFolder, check_writable, free_name, new_run_id, release_name
from trainer_core.runs.platform import DurableIO, LockCalls, locked

ROOT = Path(__file__).resolve().parents[3]


def test_run_id_is_utc_and_sorts_by_time() -> None:
    berlin = datetime(2026, 11, 29, 18, 15, 0, tzinfo=timezone(timedelta(hours=1)))
    assert re.fullmatch(r"20261129T171500Z-[0-9a-f]{4}", new_run_id(berlin))
    assert new_run_id(berlin.timestamp())[:16] == "20261129T171500Z"
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{4}", new_run_id())
    moments = [berlin + timedelta(milliseconds=part) for part in range(0, 1000, 3)]
    ids = [new_run_id(moment) for moment in moments]
    assert ids == sorted(set(ids)), "two runs of one second: the later one sorts last"


def test_create_makes_the_layout_and_never_reuses_a_folder(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path / "out", "20261129T171500Z-1a2b")
    assert first.path == tmp_path / "out" / "safe_scaler" / "20261129T171500Z-1a2b"
    assert sorted(path.name for path in first.path.iterdir()) == ["checkpoints", "lora", "previews"]
    assert first.output_dir == (tmp_path / "out").resolve()
    names = (first.config_path, first.database_path, first.log_path, first.report_path)
    assert [path.name for path in names] == ["config.json", "run.db", "run.log", "report.html"]
    again = RunFolder.create(tmp_path / "out", "20261129T171500Z-1a2b")
    assert again.run_id == "20261129T171500Z-1a2b-2"


def test_config_round_trip_with_versions(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_config({"config": {"name": "Größe", "lr": 1e-4}})
    config = folder.read_config()
    assert config["config"] == {"name": "Größe", "lr": 1e-4}
    assert config["format_version"] == 1
    assert config["pack_version"]
    with pytest.raises(ValueError, match="not JSON compliant"):
        folder.write_config({"lr": float("nan")})
    assert folder.read_config() == config


def test_a_newer_config_is_refused_naming_both_versions(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config_path.write_text(json.dumps({"format_version": 2, "pack_version": "9.0"}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"written by pack 9\.0 in format 2; this is pack .*formats up to 1\. Update"):
        folder.read_config()


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "cannot be read"), ('{"format', "is damaged"), ("[]", "no settings"), ("{}", "format None")],
)
def test_a_config_that_is_none(tmp_path: Path, text: str | None, reason: str) -> None:
    folder = RunFolder(tmp_path)
    if text is not None:
        folder.config_path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=reason):
        folder.read_config()


def test_a_full_disk_keeps_the_old_config(tmp_path: Path) -> None:
    class Full(DurableIO):
        def write(self, fd: int, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = RunFolder(tmp_path)
    folder.write_config({"a": 1})
    with pytest.raises(ResourceError, match=r"config\.json cannot be written: No space left"):
        folder.write_config({"a": 2}, Full())
    assert folder.read_config()["a"] == 1


def test_two_writers_on_one_run_are_refused(tmp_path: Path) -> None:
    """C12, with a real second process; the refusal names the holder."""
    folder = RunFolder(tmp_path)
    code = (
        "import sys; from trainer_core.runs.folder import RunFolder\n"
        f"with RunFolder({str(tmp_path)!r}).lock():\n    print('held', flush=True); sys.stdin.read()\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout
    assert holder.stdout.readline().strip() == b"held"
    assert folder.is_locked()
    busy = f"being written by another process .pid {holder.pid} on "
    with pytest.raises(ResourceError, match=busy), folder.lock(patience=0.1):
        pass
    holder.communicate()
    assert not folder.is_locked()
    with folder.lock():
        assert folder.is_locked()


def test_two_looks_at_a_run_do_not_take_each_other_for_a_writer(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    held, go = threading.Event(), threading.Event()

    def another_look() -> None:
        with locked(folder.lock_path):
            held.set()
            go.wait(10)

    thread = threading.Thread(target=another_look)
    with folder.lock():
        pass
    thread.start()
    held.wait(10)
    threading.Timer(0.005, go.set).start()
    assert not folder.is_locked()
    thread.join()


def test_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    code = (
        "import os; from trainer_core.runs.folder import RunFolder\n"
        f"with RunFolder({str(tmp_path)!r}).lock():\n    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    folder = RunFolder(tmp_path)
    assert folder.lock_path.exists()
    assert not folder.is_locked()
    with folder.lock():
        pass


def test_a_file_system_without_locks_is_used_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def unsupported(_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with RunFolder(tmp_path).lock(LockCalls(unsupported, unsupported)):
        pass
    assert "cannot be locked (No locks available): do not start a second writer" in caplog.text


def test_a_folder_that_is_gone_cannot_be_held(tmp_path: Path) -> None:
    with (
        pytest.raises(ResourceError, match="cannot be written: No such file or directory"),
        RunFolder(tmp_path / "x").lock(),
    ):
        pass


def test_free_names_are_never_taken_twice(tmp_path: Path) -> None:
    (tmp_path / "cat.safetensors").touch()
    assert free_name(tmp_path, "cat", ".safetensors").name == "cat-2.safetensors"
    (tmp_path / "cat-2.safetensors").touch()
    assert free_name(tmp_path, "cat", ".safetensors").name == "cat-3.safetensors"
    assert free_name(tmp_path, "cat", ".toml").name == "cat.toml"


def test_names_reserved_for_a_run(tmp_path: Path) -> None:
    """Two runs that start together choose different names; nothing stands under a final name before it is whole."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    first = free_name(tmp_path, "cat", ".safetensors", owner=one)
    assert first.name == "cat.safetensors"
    assert not first.exists()
    assert free_name(tmp_path, "cat", ".safetensors", owner=two).name == "cat-2.safetensors"
    assert free_name(tmp_path, "cat", ".safetensors", owner=one) == first
    assert free_name(tmp_path, "cat", ".safetensors").name == "cat-3.safetensors"
    one.rmdir()  # the run was deleted: its reservation does not count
    assert free_name(tmp_path, "cat", ".safetensors", owner=two) == first
    release_name(first)
    release_name(first)
    assert free_name(tmp_path, "cat", ".safetensors", owner=tmp_path).name == "cat.safetensors"


def test_a_reservation_that_is_just_being_written_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".cat.x.reserved").touch()
    assert free_name(tmp_path, "cat", ".x", owner=tmp_path).name == "cat-2.x"
    monkeypatch.setattr(module, "_FRESH_S", -1.0)  # its writer died
    assert free_name(tmp_path, "cat", ".x", owner=tmp_path).name == "cat.x"


def test_the_write_test_leaves_nothing_and_names_the_reason(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=r"output folder .*file.* cannot be written: .*Give a folder you may write"):
        RunFolder.create(tmp_path / "file", "r")
