"""The supervisor with a real worker process whose run is a fake (`fake_worker.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainer_core.errors import ConfigError
from trainer_core.runs.folder import RunFolder
from trainer_core.runs.record import open_readonly
from trainer_core.runs.registry import describe
from trainer_core.runs.supervisor import RunOutcome, Supervisor, supervise

FAKE = Path(__file__).with_name("fake_worker.py")


class Follower:
    """Collects events and says stop when `stop_at` was seen."""

    def __init__(self, stop_at: str = "") -> None:
        self.events: list[dict[str, Any]] = []
        self.stop_at = stop_at

    def __call__(self, wire: dict[str, Any]) -> None:
        self.events.append(wire)

    def should_stop(self) -> bool:
        return self.stop_at in self.types()

    def types(self) -> list[str]:
        return [wire["type"] for wire in self.events]

    def warnings(self) -> list[str]:
        return [wire["data"]["message"] for wire in self.events if wire["type"] == "Warned"]


def make_run(tmp_path: Path, **fake: Any) -> RunFolder:
    folder = RunFolder.create(tmp_path, "20260101T000000Z-abcd")
    folder.write_config({"fake": fake})
    return folder


def follow(folder: RunFolder, follower: Follower, **options: Any) -> RunOutcome:
    return supervise(folder.path, follower, worker=FAKE, should_stop=follower.should_stop, **options)


def test_a_run_that_ends_well(tmp_path: Path) -> None:
    folder, follower = make_run(tmp_path, kind="finish"), Follower("never")
    outcome = follow(folder, follower)
    assert outcome == RunOutcome("finished", "done", 0, 3, "x", None, 0)
    assert follower.types() == ["RunStarted", "RunFinished"]
    assert [wire["seq"] for wire in follower.events] == [1, 2]
    assert {wire["run_id"] for wire in follower.events} == {folder.run_id}
    written = folder.log_path.read_text(encoding="utf-8")
    assert "a library prints\n" in written
    assert "and so does C code\n" in written
    assert describe(folder).state == "finished"


@pytest.mark.parametrize("signalled", [True, False])
def test_a_worker_that_dies_once_is_started_again(tmp_path: Path, signalled: bool) -> None:
    folder, follower = make_run(tmp_path, kind="die", times=1, saves=True, signal=signalled), Follower("never")
    outcome = follow(folder, follower)
    assert (outcome.status, outcome.restarts) == ("finished", 1)
    assert follower.types() == ["RunStarted", "CheckpointSaved", "Warned", "RunStarted", "RunFinished"]
    (message,) = follower.warnings()
    name = "SIGKILL (often: out of memory)" if signalled else "SIGABRT"
    how = f"The worker was killed by {name} at step 10."
    assert message == f"{how} It is started again from the checkpoint of step 10 (restart 1)."
    assert message in folder.log_path.read_text(encoding="utf-8")
    seqs = [wire["seq"] for wire in follower.events]
    assert seqs == sorted(set(seqs))
    with open_readonly(folder.database_path) as record:
        assert [event["data"]["message"] for event in record.events("Warned")] == [message]


def test_a_restart_names_the_checkpoint_that_it_goes_on_from_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest one has the right size and a wrong byte: the worker passes it over. Whoever follows shows the event,
    and the console shows warnings of the log too."""
    folder, follower = make_run(tmp_path, kind="die", times=2, saves=True, damages=True), Follower("never")
    assert follow(folder, follower).restarts == 2
    assert [message.partition(" It is ")[2] for message in follower.warnings()] == [
        "started again from the checkpoint of step 10 (restart 1).",
        "started again from the checkpoint of step 10 (restart 2).",
    ]
    assert caplog.messages == []


def test_it_gives_up_after_three_restarts_without_progress(tmp_path: Path) -> None:
    folder, follower = make_run(tmp_path, kind="die", times=99), Follower("never")
    outcome = follow(folder, follower)
    assert (outcome.status, outcome.restarts) == ("failed", 3)
    assert (folder.path / "starts").read_text() == "xxxx"
    assert "for the 4th time without getting further than the beginning (there is no checkpoint yet)" in outcome.message
    assert follower.warnings()[-1] == outcome.message
    assert len(follower.warnings()) == 4


def test_progress_resets_the_count(tmp_path: Path) -> None:
    folder, follower = make_run(tmp_path, kind="die", times=4, saves=True), Follower("never")
    outcome = follow(folder, follower)
    assert (outcome.status, outcome.restarts) == ("finished", 4)


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    folder, follower = make_run(tmp_path, kind="die", times=1, torn=True), Follower("never")
    assert follow(folder, follower).status == "finished"
    assert follower.types() == ["RunStarted", "Warned", "RunStarted", "RunFinished"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raise", "The folder x has no pictures. Give another one."),
        ("bug", "ValueError: a bug (traceback in run.log)"),
        ("silent", "The run ended without saying how."),
    ],
)
def test_a_run_that_fails_says_so_and_is_not_repeated(tmp_path: Path, kind: str, message: str) -> None:
    folder, follower = make_run(tmp_path, kind=kind), Follower("never")
    outcome = follow(folder, follower)
    assert (outcome.status, outcome.message, outcome.restarts, outcome.exit_code) == ("failed", message, 0, 1)
    assert follower.types() == ["RunStarted", "RunFinished"]
    assert ("Traceback" in folder.log_path.read_text(encoding="utf-8")) == (kind == "bug")
    info = describe(folder)
    assert (info.state, info.message) == ("failed", message)


def test_stop_is_forwarded_and_the_worker_ends_by_itself(tmp_path: Path) -> None:
    folder, follower = make_run(tmp_path, kind="wait"), Follower(stop_at="Heartbeat")
    outcome = follow(folder, follower)
    assert (outcome.status, outcome.exit_code) == ("stopped", 0)
    assert (folder.path / "stopped").read_text() == "stop command"
    assert follower.types() == ["RunStarted", "Heartbeat", "Ack", "RunFinished"]


def test_a_worker_that_does_not_stop_is_ended_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_core.runs.supervisor.end_child", lambda process: (process.kill(), process.wait())[1])
    folder, follower = make_run(tmp_path, kind="deaf"), Follower(stop_at="Heartbeat")
    outcome = follow(folder, follower, stop_timeout=0.5)
    assert outcome.status == "stopped"
    assert "has not stopped for 0 s and is ended by force" in follower.warnings()[0]
    assert not folder.is_locked()


def test_every_command_reaches_the_worker_and_is_answered(tmp_path: Path) -> None:
    folder, follower = make_run(tmp_path, kind="wait"), Follower()
    sent: dict[str, str] = {}

    def on_event(wire: dict[str, Any]) -> None:
        follower(wire)
        if wire["type"] == "Heartbeat":
            for cmd in ("save", "preview", "pause", "resume", "dance", "stop"):
                sent[supervisor.send(cmd)] = cmd

    supervisor = Supervisor(folder.path, on_event, worker=FAKE)
    assert supervisor.run().status == "stopped"
    acks = {wire["data"]["id"]: wire["data"] for wire in follower.events if wire["type"] == "Ack"}
    assert {key: ack["cmd"] for key, ack in acks.items()} == sent
    assert [ack["ok"] for ack in acks.values()].count(False) == 1
    refused = next(ack for ack in acks.values() if not ack["ok"])
    assert refused["message"] == "unknown command 'dance'; known are stop, save, preview, pause, resume"


def test_nothing_follows_the_last_event(tmp_path: Path) -> None:
    folder, follower = make_run(tmp_path, kind="linger"), Follower("never")
    assert follow(folder, follower).status == "finished"
    assert follower.types()[-1] == "RunFinished"
    assert "event Heartbeat after RunFinished is not sent" in folder.log_path.read_text(encoding="utf-8")


def test_an_exception_of_the_follower_leaves_no_child(tmp_path: Path) -> None:
    folder = make_run(tmp_path, kind="wait")

    def on_event(wire: dict[str, Any]) -> None:
        if wire["type"] == "Heartbeat":
            raise KeyError("the caller's own bug")

    with pytest.raises(KeyError):
        supervise(folder.path, on_event, worker=FAKE)
    assert not folder.is_locked()


def test_a_folder_that_is_no_run_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json .* cannot be read"):
        supervise(tmp_path, Follower("never"), worker=FAKE)
    result = subprocess.run([sys.executable, str(FAKE), str(tmp_path)], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "is not a run folder: it has no config.json" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_stop_asked_for_while_the_worker_dies_starts_no_new_one(tmp_path: Path) -> None:
    folder, follower = make_run(tmp_path, kind="die", times=99), Follower(stop_at="RunStarted")
    outcome = follow(folder, follower)
    assert (outcome.status, outcome.restarts) == ("stopped", 0)
    assert "was killed by SIGKILL (often: out of memory) while stopping" in outcome.message
    assert follower.warnings() == [outcome.message]
    assert (folder.path / "starts").read_text() == "x"


def wait_for(condition: Any, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def start_worker(folder: RunFolder, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(FAKE), str(folder.path), *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def read_until(process: subprocess.Popen[bytes], kind: str) -> list[dict[str, Any]]:
    assert process.stdout
    events: list[dict[str, Any]] = []
    for line in process.stdout:
        events.append(json.loads(line))
        if events[-1]["type"] == kind:
            break
    return events


@pytest.mark.parametrize("supervised", [True, False])
def test_the_end_of_stdin_stops_only_a_supervised_worker(tmp_path: Path, supervised: bool) -> None:
    folder = make_run(tmp_path, kind="wait")
    process = start_worker(folder, *(["--supervised"] if supervised else []))
    read_until(process, "Heartbeat")
    assert process.stdin
    process.stdin.close()
    if supervised:
        assert [event["type"] for event in read_until(process, "RunFinished")] == ["RunFinished"]
        assert (folder.path / "stopped").read_text() == "the program that started this run is gone"
    else:
        time.sleep(0.5)
        assert process.poll() is None
        process.terminate()
        assert read_until(process, "RunFinished")[-1]["data"]["status"] == "stopped"
        assert (folder.path / "stopped").read_text() == "signal SIGTERM"
    assert process.wait(30) == 0
    assert process.stdout
    process.stdout.close()


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is a POSIX signal")
def test_a_killed_supervisor_leaves_no_orphan(tmp_path: Path) -> None:
    folder = make_run(tmp_path, kind="wait")
    code = (
        "import sys; from pathlib import Path; from trainer_core.runs.supervisor import supervise\n"
        f"supervise({str(folder.path)!r}, lambda wire: print(wire['type'], flush=True), worker=Path({str(FAKE)!r}))\n"
    )
    root = Path(__file__).resolve().parents[3]
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE)
    assert parent.stdout
    assert any(line.strip() == b"Heartbeat" for line in parent.stdout)
    parent.kill()
    parent.wait()
    assert wait_for((folder.path / "stopped").exists)
    assert wait_for(lambda: not folder.is_locked())
    assert describe(folder).state == "stopped"
    parent.stdout.close()


def test_a_malformed_line_is_answered(tmp_path: Path) -> None:
    folder = make_run(tmp_path, kind="wait")
    process = start_worker(folder, "--supervised")
    read_until(process, "Heartbeat")
    assert process.stdin
    process.stdin.write(b'{"v": 1, "id": "a"\n' + b"x" * 200_000 + b'\n{"v": 7, "id": "b", "cmd": "stop"}\n')
    process.stdin.flush()
    acks = [read_until(process, "Ack")[-1]["data"] for _ in range(3)]
    assert [ack["ok"] for ack in acks] == [False, False, False]
    assert acks[0]["message"].startswith("not a JSON object in UTF-8")
    assert acks[1]["message"].startswith("not a JSON object in UTF-8")
    assert (acks[2]["id"], acks[2]["message"]) == ("b", "protocol version 7; this worker speaks version 1")
    process.stdin.close()
    assert process.wait(30) == 0
    assert process.stdout
    process.stdout.close()


def test_the_worker_script_does_not_expose_the_core_as_top_level_modules(tmp_path: Path) -> None:
    """`events`, `config`, `data` of the core must not shadow foreign modules of those names."""
    script = Path(__file__).resolve().parents[3] / "trainer_core" / "worker_main.py"
    code = (
        f"import runpy, sys; sys.argv = [{str(script)!r}]; sys.path.insert(0, {str(script.parent)!r})\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\nexcept SystemExit:\n    pass\n"
        "from importlib.util import find_spec; print(find_spec('events'), find_spec('trainer_core') is not None)\n"
    )
    clean = {**os.environ, "PYTHONPATH": ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=clean)
    assert result.stdout.strip().endswith("None True"), result.stderr
