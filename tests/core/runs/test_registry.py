"""Which runs are found and what is said about them."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_core.events import EventBus, RunFinished, RunStarted
from trainer_core.runs.database import RunDatabase
from trainer_core.runs.folder import RunFolder
from trainer_core.runs.registry import config_hash, describe, list_runs, newest_with_hash

ROOT = Path(__file__).resolve().parents[3]


def make(output: Path, run_id: str, status: str | None = None, **config: object) -> RunFolder:
    folder = RunFolder.create(output, run_id)
    folder.write_config({"config": config, "config_hash": config_hash(config)})
    with RunDatabase(folder.database_path) as database:
        bus = EventBus(run_id)
        bus.subscribe(database)
        bus.emit(RunStarted(total_steps=7, parts=("unet",), device="cpu", precision="fp32", pictures=1))
        if status:
            bus.emit(RunFinished(step=7, status=status, message="why", applied=7, rejected=0))
    return folder


def test_states_newest_first(tmp_path: Path) -> None:
    for day, status in enumerate(["finished", "stopped", "failed", None], start=1):
        make(tmp_path, f"2026010{day}T000000Z-aaaa", status)
    make(tmp_path / "other", "20260201T000000Z-aaaa", "finished")
    (tmp_path / "safe_scaler" / "no-run").mkdir()
    runs = list_runs(tmp_path)
    assert [run.state for run in runs] == ["finished", "interrupted", "failed", "stopped", "finished"]
    assert runs[0].folder.output_dir.name == "other"
    assert runs[1].total_steps == 7
    assert runs[2].message == "why"
    assert list_runs(tmp_path / "nothing") == []


def test_a_run_that_is_being_written_is_running(tmp_path: Path) -> None:
    folder = make(tmp_path, "20260101T000000Z-aaaa")
    code = (
        "import sys; from trainer_core.runs.folder import RunFolder\n"
        f"with RunFolder({str(folder.path)!r}).lock():\n    print('held', flush=True); sys.stdin.read()\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout
    holder.stdout.readline()
    assert describe(folder).state == "running"
    holder.kill()
    holder.communicate()
    assert describe(folder).state == "interrupted"


def test_the_newest_run_of_a_config_is_found(tmp_path: Path) -> None:
    make(tmp_path, "20260101T000000Z-aaaa", None, rank=4)
    wanted = make(tmp_path, "20260102T000000Z-aaaa", None, rank=4)
    make(tmp_path, "20260104T000000Z-aaaa", None, rank=8)
    found = newest_with_hash(tmp_path, config_hash({"rank": 4}))
    assert found is not None
    assert (found.run_id, found.state) == (wanted.run_id, "interrupted")
    assert newest_with_hash(tmp_path, config_hash({"rank": 16})) is None


def test_a_damaged_run_is_listed_with_its_problem(tmp_path: Path) -> None:
    one = make(tmp_path, "20260101T000000Z-aaaa", "finished")
    one.config_path.write_text("{", encoding="utf-8")
    two = make(tmp_path, "20260102T000000Z-aaaa", "finished")
    with sqlite3.connect(two.database_path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    newer, damaged = list_runs(tmp_path)
    assert (damaged.state, newer.state) == ("finished", "interrupted")
    assert "is damaged" in damaged.problem
    assert "has format 99" in newer.problem


def test_config_hash_is_over_what_is_asked_for() -> None:
    base = {"lora": {"rank": 4, "parts": ("unet",)}, "run": {"seed": 1}}
    assert config_hash(base) == config_hash({"run": {"seed": 1}, "lora": {"parts": ["unet"], "rank": 4}})
    assert config_hash(base) == config_hash({**base, "pack_version": "9", "run_id": "x", "config_hash": "y"})
    assert config_hash(base) != config_hash({**base, "run": {"seed": 2}})
    assert config_hash(base, ignore=("run.seed",)) == config_hash({**base, "run": {}}, ignore=())
    with pytest.raises(ValueError, match="not JSON compliant"):
        config_hash({"lr": float("nan")})
