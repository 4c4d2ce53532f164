"""run.db: what is recorded, resume, crashes, full disks, versions; read back through the read API."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainer_core.errors import CheckpointError, ResourceError
from trainer_core.events import (
    CheckpointSaved,
    Event,
    EventBus,
    Heartbeat,
    Intervention,
    PhaseChanged,
    PreviewReady,
    Resumed,
    RunFinished,
    RunStarted,
    StepFinished,
    StepRejected,
    ValidationFinished,
    Warned,
)
from trainer_core.runs.database import SCHEMA_VERSION, RunDatabase
from trainer_core.runs.record import open_readonly

ROOT = Path(__file__).resolve().parents[3]


def started() -> RunStarted:
    return RunStarted(
        total_steps=10, parts=("unet", "te1"), device="cpu", precision="fp32", pictures=4, config_hash="h"
    )


def step(number: int, loss: float = 0.5) -> StepFinished:
    return StepFinished(
        step=number, applied=number, epoch=0, loss=loss, loss_avg=loss, grad_norm=1.5, lr={"unet": 1e-4, "te1": 5e-5},
        loss_scale=1.0, rejected_steps=0, samples_per_second=2.0, seconds=0.5, eta_seconds=3.0, vram_gib=0.25,
        clipped=True,
    )  # fmt: skip


def rejected(number: int) -> StepRejected:
    return StepRejected(
        step=number, applied=number - 1, epoch=0, reason="overflow", loss=float("nan"), grad_norm=float("inf"),
        loss_scale=512.0, rejected_steps=1, in_a_row=1, samples=("a.png",),
    )  # fmt: skip


def ended(number: int, status: str = "finished") -> RunFinished:
    return RunFinished(step=number, status=status, message="done", applied=number, rejected=0, lora="x.safetensors")


def record(path: Path, *events: Event, seq: int = 0, **options: Any) -> RunDatabase:
    database = RunDatabase(path, **options)
    bus = EventBus("r", seq=seq)
    bus.subscribe(database)
    for event in events:
        bus.emit(event)
    return database


def test_everything_that_is_recorded_reads_back(tmp_path: Path) -> None:
    database = record(
        tmp_path / "run.db", started(), PhaseChanged(phase="training"), step(1), rejected(2), step(3, 0.25),
        ValidationFinished(step=3, validation_loss=0.4, bands=(0.1, 0.7), pictures=2, seconds=0.1),
        PreviewReady(step=3, file="previews/a.png", prompt="a ✓", index=1, seed=7),
        CheckpointSaved(step=3, name="step-00000003", bytes=10, seconds=0.1), Heartbeat(step=3),
        Warned(step=3, topic="memory", message="tight"), ended(3),
    )  # fmt: skip
    with open_readonly(tmp_path / "run.db") as view:
        first, second, third = view.steps()
        assert (first["step"], first["loss"], first["lr"], first["rejected"]) == (
            1,
            0.5,
            {"unet": 1e-4, "te1": 5e-5},
            False,
        )
        assert (first["grad_norm"], first["seconds"], first["vram_gib"], first["clipped"]) == (1.5, 0.5, 0.25, 1)
        assert (second["rejected"], second["reason"], second["loss"], second["loss_scale"]) == (
            True,
            "overflow",
            None,
            512.0,
        )
        assert third["loss_avg"] == 0.25
        assert [row["step"] for row in view.steps(after=1)] == [2, 3]
        (validation,) = view.validation()
        assert (validation["step"], validation["mean"], validation["bands"]) == (3, 0.4, [0.1, 0.7])
        (preview,) = view.previews()
        assert (preview["file"], preview["prompt"], preview["index"], preview["seed"]) == (
            "previews/a.png",
            "a ✓",
            1,
            7,
        )
        (checkpoint,) = view.checkpoints()
        assert (checkpoint["name"], checkpoint["bytes"], checkpoint["state"]) == ("step-00000003", 10, "good")
        types = [event["type"] for event in view.events()]
        assert types == [
            "RunStarted", "PhaseChanged", "StepRejected", "ValidationFinished", "PreviewReady", "CheckpointSaved",
            "Warned", "RunFinished",
        ]  # fmt: skip
        assert view.events("StepRejected")[0]["data"]["nonfinite"] == ["loss", "grad_norm"]
        assert [event["type"] for event in view.events(after_seq=9)] == ["Warned", "RunFinished"]
        summary = view.summary()
        wanted = {
            "status": "finished", "total_steps": 10, "parts": ["unet", "te1"], "step": 3, "applied": 3,
            "loss_avg": 0.25, "best_validation": 0.4, "best_validation_step": 3, "warnings": 1,
            "lora": "x.safetensors", "pictures": 4,
        }  # fmt: skip
        assert {key: summary[key] for key in wanted} == wanted
        assert view.meta()["pack_version"]
    database.close()


def test_a_reader_follows_a_running_run(tmp_path: Path) -> None:
    database = record(tmp_path / "run.db", started(), step(1))
    with open_readonly(tmp_path / "run.db") as view:
        assert [row["step"] for row in view.steps()] == [1]
        assert view.summary()["status"] is None
        EventBusAt(database, 2).emit(step(2))
        assert [row["step"] for row in view.steps()] == [1, 2]
    database.close()


class EventBusAt(EventBus):
    def __init__(self, database: RunDatabase, seq: int) -> None:
        super().__init__("r", seq=seq)
        self.subscribe(database)


def test_progress_inside_a_phase_is_not_kept(tmp_path: Path) -> None:
    events = [PhaseChanged(phase="caching", done=done, total=50) for done in range(51)]
    with (
        record(tmp_path / "run.db", *events, PhaseChanged(phase="training")),
        open_readonly(tmp_path / "run.db") as view,
    ):
        kept = [(event["data"]["phase"], event["data"]["done"]) for event in view.events()]
    assert kept == [("caching", 0), ("caching", 50), ("training", 0)]


def test_each_preview_between_steps_is_a_phase_of_its_own(tmp_path: Path) -> None:
    previews = [PhaseChanged(step=number, phase="previewing", total=1) for number in (1, 2)]
    with (
        record(tmp_path / "run.db", PhaseChanged(phase="training"), step(1), previews[0], step(2), previews[1]),
        open_readonly(tmp_path / "run.db") as view,
    ):
        kept = [(event["data"]["phase"], event["step"]) for event in view.events()]
    assert kept == [("training", 0), ("previewing", 1), ("previewing", 2)]


@pytest.mark.parametrize("wal", [True, False])
def test_both_journals_keep_everything(tmp_path: Path, wal: bool) -> None:
    database = record(tmp_path / "run.db", started(), *(step(number) for number in range(1, 6)), wal=wal)
    assert database.journal == ("wal" if wal else "delete")
    database.close()
    assert [path.name for path in tmp_path.iterdir()] == ["run.db"]
    with open_readonly(tmp_path / "run.db") as view:
        assert len(view.steps()) == 5


def test_gathered_commits_come_within_a_second(tmp_path: Path) -> None:
    database = record(tmp_path / "run.db", started(), step(1), wal=False)
    with open_readonly(tmp_path / "run.db") as view:
        deadline = time.monotonic() + 10
        while not view.steps() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(view.steps()) == 1
    database.close()


def kill_while_writing(path: Path, wal: bool) -> None:
    """Run by a child: 20 steps, a saved checkpoint, then SIGKILL."""
    import os
    import signal

    record(
        path,
        started(),
        *(step(number) for number in range(1, 21)),
        CheckpointSaved(step=20, name="c", bytes=1, seconds=0),
        wal=wal,
    )
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("wal", [True, False])
def test_a_kill_loses_nothing_up_to_a_checkpoint(tmp_path: Path, wal: bool) -> None:
    code = "from pathlib import Path; from tests.core.runs.test_database import kill_while_writing\n"
    code += f"kill_while_writing(Path({str(tmp_path / 'run.db')!r}), {wal})"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == -9
    with RunDatabase(tmp_path / "run.db", wal=wal) as database, open_readonly(tmp_path / "run.db") as view:
        assert len(view.steps()) == 20
        assert database.last_seq() == 22


def test_resume_deletes_what_comes_after_and_numbers_go_on_rising(tmp_path: Path) -> None:
    """Case B65: rising x axis, no gaps, no doubles after a resume."""
    restart = Warned(step=6, topic="restart", message="died")
    steps = [step(number) for number in range(1, 7)]
    later = [
        ValidationFinished(step=6, validation_loss=0.4, bands=(0.1,), pictures=2, seconds=0.1),
        PreviewReady(step=6, file="b.png", prompt="", index=0, seed=0),
        CheckpointSaved(step=6, name="step-00000006", bytes=1, seconds=0.1),
        Warned(step=6, topic="memory", message="gone"),
    ]
    record(tmp_path / "run.db", started(), *steps, *later, restart).close()
    database = RunDatabase(tmp_path / "run.db")
    assert database.last_seq() == 12
    assert database.resume_at(4, attempt=0) == 9
    assert database.last_seq() == 12
    bus = EventBusAt(database, database.last_seq())
    bus.emit(Resumed(step=4, checkpoint="step-00000004", attempt=0))
    bus.emit(step(5, 0.9))
    with open_readonly(tmp_path / "run.db") as view:
        assert [row["step"] for row in view.steps()] == [1, 2, 3, 4, 5]
        assert view.steps()[-1]["loss"] == 0.9
        assert [event["type"] for event in view.events()] == ["RunStarted", "Warned", "Resumed"]
        assert view.events("Warned")[0]["data"]["message"] == "died"
        assert (view.validation(), view.previews(), view.checkpoints()) == ([], [], [])
        assert view.events("Resumed")[0]["seq"] == 13
    database.close()


def test_a_rollback_keeps_both_attempts_and_shows_the_newer(tmp_path: Path) -> None:
    database = record(
        tmp_path / "run.db", started(), step(1), step(2, 9.0), Resumed(step=1, checkpoint="c", attempt=1), step(2, 0.3)
    )
    assert database.attempt == 1
    with open_readonly(tmp_path / "run.db") as view:
        assert [(row["attempt"], row["step"], row["loss"]) for row in view.steps()] == [(0, 1, 0.5), (1, 2, 0.3)]
    count = sqlite3.connect(tmp_path / "run.db").execute("SELECT count(*) FROM steps").fetchone()[0]
    assert count == 3
    database.close()


def test_a_second_process_that_starts_numbers_anew_overwrites_nothing(tmp_path: Path) -> None:
    record(tmp_path / "run.db", started(), Warned(topic="a", message="one")).close()
    record(tmp_path / "run.db", started(), Warned(topic="a", message="two")).close()
    with open_readonly(tmp_path / "run.db") as view:
        assert [event["seq"] for event in view.events()] == [1, 2, 3, 4]
        assert [event["data"]["message"] for event in view.events("Warned")] == ["one", "two"]


def test_an_interrupted_resume_of_a_finished_run_is_not_finished(tmp_path: Path) -> None:
    record(tmp_path / "run.db", started(), step(1), ended(1, "stopped"), started()).close()
    with open_readonly(tmp_path / "run.db") as view:
        assert view.summary()["status"] is None


def fill(database: RunDatabase, pages: int) -> None:
    """Make SQLite report a full disk: it may not grow past `pages`."""
    database._connection.execute(f"PRAGMA max_page_count = {pages}")


def test_a_full_disk_does_not_end_training_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_core.runs.database._RETRY_S", 0.0)
    told: list[str] = []
    database = record(tmp_path / "run.db", started(), on_problem=told.append)
    bus = EventBusAt(database, 1)
    fill(database, 1)
    for number in range(1, 2001):
        bus.emit(step(number))
    assert len(told) == 1
    assert "cannot be written (database or disk is full). Training goes on" in told[0]
    fill(database, 1 << 30)
    bus.emit(step(2001))
    assert len(told) == 2
    assert "can be written again" in told[1]
    database.close()
    with open_readonly(tmp_path / "run.db") as view:
        assert [row["step"] for row in view.steps()] == list(range(1, 2002))


def test_steps_that_were_not_committed_yet_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where commits are gathered a failing write takes back the steps before it: they wait with it."""
    monkeypatch.setattr("trainer_core.runs.database._RETRY_S", 0.0)
    monkeypatch.setattr("trainer_core.runs.database._GATHER_S", 60.0)
    told: list[str] = []
    database = record(tmp_path / "run.db", started(), step(1), step(2), wal=False, on_problem=told.append)
    bus = EventBusAt(database, 3)
    fill(database, 1)
    number = 2
    while not told:
        number += 1
        bus.emit(step(number))
    fill(database, 1 << 30)
    bus.emit(step(number + 1))
    assert told[1].endswith(f"can be written again; {number + 1} events were kept, 0 lost.")
    database.close()
    with open_readonly(tmp_path / "run.db") as view:
        assert [row["step"] for row in view.steps()] == list(range(1, number + 2))


def test_a_bug_takes_no_gathered_step_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_core.runs.database._GATHER_S", 60.0)
    database = record(tmp_path / "run.db", started(), step(1), wal=False)
    wire = {"v": 1, "seq": 3, "type": "PreviewReady", "run_id": "r", "step": 1, "time": 0.0}
    with pytest.raises((sqlite3.ProgrammingError, sqlite3.InterfaceError)):
        database({**wire, "data": {"file": {"no": "text"}, "prompt": "", "index": 0, "seed": 0}})
    database.close()
    with open_readonly(tmp_path / "run.db") as view:
        assert [row["step"] for row in view.steps()] == [1]


def test_a_problem_may_be_emitted_as_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback emits a Warned on the same bus, from inside the subscriber."""
    monkeypatch.setattr("trainer_core.runs.database._RETRY_S", 0.0)
    database = record(tmp_path / "run.db", started())
    bus = EventBusAt(database, 1)
    database.on_problem = lambda message: bus.emit(Warned(topic="record", message=message))
    fill(database, 1)
    for number in range(1, 1001):
        bus.emit(step(number))
    fill(database, 1 << 30)
    bus.emit(step(1001))
    database.close()
    with open_readonly(tmp_path / "run.db") as view:
        assert len(view.steps()) == 1001
        assert ["cannot be written" in row["data"]["message"] for row in view.events("Warned")] == [True, False]


def test_a_bug_is_no_full_disk(tmp_path: Path) -> None:
    """A value that SQLite cannot hold is raised, takes nothing else with it, and starts no waiting."""
    database = record(tmp_path / "run.db", started())
    wire = {"v": 1, "seq": 2, "type": "PreviewReady", "run_id": "r", "step": 1, "time": 0.0}
    data = {"file": {"no": "text"}, "prompt": "", "index": 0, "seed": 0}
    with pytest.raises((sqlite3.ProgrammingError, sqlite3.InterfaceError)):
        database({**wire, "data": data})
    EventBusAt(database, 2).emit(step(1))
    with open_readonly(tmp_path / "run.db") as view:
        assert len(view.steps()) == 1
    database.close()


def test_what_cannot_be_written_at_the_end_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    database = record(tmp_path / "run.db", started())
    fill(database, 1)
    bus = EventBusAt(database, 1)
    for number in range(1, 1001):
        bus.emit(step(number))
    database.close()
    assert "events could not be written to" in caplog.text


def test_a_newer_format_is_refused_naming_both_versions(tmp_path: Path) -> None:
    record(tmp_path / "run.db", started()).close()
    with sqlite3.connect(tmp_path / "run.db") as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    for opener in (RunDatabase, open_readonly):
        with pytest.raises(
            CheckpointError, match=r"has format 2; this is pack .*, which reads formats up to 1\. Update"
        ):
            opener(tmp_path / "run.db")


def test_a_damaged_record_is_set_aside_and_the_run_goes_on(tmp_path: Path) -> None:
    record(tmp_path / "run.db", started(), *(step(number) for number in range(1, 500))).close()
    data = bytearray((tmp_path / "run.db").read_bytes())
    data[4096:20000] = bytes(20000 - 4096)
    (tmp_path / "run.db").write_bytes(data)
    database = record(tmp_path / "run.db", step(500))
    assert database.damaged_record == tmp_path / "run.db.damaged-1"
    database.close()
    with open_readonly(tmp_path / "run.db") as view:
        assert [row["step"] for row in view.steps()] == [500]
        assert view.meta()["damaged_record"] == "run.db.damaged-1"


@pytest.mark.parametrize("table", ["meta", "events", "steps", "checkpoints"])
def test_a_record_without_its_tables_is_damaged(tmp_path: Path, table: str) -> None:
    """SQLite finds nothing wrong with it; a reader says so, a writer sets it aside."""
    path = tmp_path / "run.db"
    record(path, started(), step(1)).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"DROP TABLE {table}")
        connection.commit()
    with pytest.raises(CheckpointError, match="it is damaged \\(tables are missing\\)"):
        open_readonly(path)
    database = record(path, step(2))
    assert database.damaged_record == tmp_path / "run.db.damaged-1"
    database.close()


def test_what_is_no_record_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no run record at"):
        open_readonly(tmp_path / "run.db")
    (tmp_path / "run.db").write_bytes(b"no database at all, just text" * 99)
    with pytest.raises(CheckpointError, match="cannot be read: it is damaged"):
        open_readonly(tmp_path / "run.db")
    (tmp_path / "run.db").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read: it is empty"):
        open_readonly(tmp_path / "run.db")


def test_a_folder_in_place_of_the_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.db").mkdir()
    with pytest.raises(ResourceError, match=r"run record .*run\.db cannot be opened"):
        RunDatabase(tmp_path / "run.db")


def test_a_copied_run_folder_reads_the_same(tmp_path: Path) -> None:
    (tmp_path / "ä b").mkdir()
    database = record(tmp_path / "ä b" / "run.db", started(), step(1))
    shutil.copytree(tmp_path / "ä b", tmp_path / "copy")
    database.close()
    with open_readonly(tmp_path / "copy" / "run.db") as view:
        assert len(view.steps()) == 1


def test_health_rows(tmp_path: Path) -> None:
    database = record(tmp_path / "run.db", started())
    database.add_health(2, [("unet.a", {"norm": 0.5}), ("unet.b", {"norm": 1.5})])
    with open_readonly(tmp_path / "run.db") as view:
        assert view.health() == [
            {"step": 2, "module": "unet.a", "data": {"norm": 0.5}},
            {"step": 2, "module": "unet.b", "data": {"norm": 1.5}},
        ]  # fmt: skip
    database.resume_at(1)
    with open_readonly(tmp_path / "run.db") as view:
        assert view.health() == []
    database.close()


def test_reading_many_steps_takes_time_in_proportion(tmp_path: Path) -> None:
    """Reading 20,000 steps took 23 s once: the newest attempt was searched through the table for each row."""
    count = 20_000
    with record(tmp_path / "run.db", started(), step(1)) as database:
        columns = "step, seq, attempt, applied, rejected, time, lr"
        rows = [(number, number, 0, number, 0, 0.0, "{}") for number in range(2, count + 1)]
        with database._connection as connection:
            connection.executemany(f"INSERT INTO steps ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    with open_readonly(tmp_path / "run.db") as reader:
        begin = time.process_time()
        assert len(reader.steps()) == count
        assert time.process_time() - begin < 3.0


def test_a_rollback_keeps_what_happened_before_its_checkpoint(tmp_path: Path) -> None:
    """Attempt 0 fails at step 3, goes back to 1, and dies at step 2 of attempt 1: its own rows go, attempt 0's stay."""
    bus = EventBus("r")
    with RunDatabase(tmp_path / "run.db") as database:
        bus.subscribe(database)
        for step in (1, 2, 3):
            bus.emit(_rejected(step))
        bus.emit(Intervention(step=1, action="Went back", reason="3 in a row", attempt=1))
        seq = bus.seq
        bus.emit(_rejected(2))
        assert database.attempt == 1
        database.resume_at(1, attempt=1, seq=seq)
    with open_readonly(tmp_path / "run.db") as record:
        assert [event["step"] for event in record.events("StepRejected")] == [1, 2, 3]
        assert len(record.events("Intervention")) == 1
    with sqlite3.connect(tmp_path / "run.db") as raw:
        assert raw.execute("select attempt, step from steps order by 1, 2").fetchall() == [(0, 1), (0, 2), (0, 3)]


def _rejected(step: int) -> StepRejected:
    return StepRejected(
        step=step,
        applied=0,
        epoch=0,
        reason="bad",
        loss=1.0,
        grad_norm=1.0,
        loss_scale=1.0,
        rejected_steps=1,
        in_a_row=1,
    )
