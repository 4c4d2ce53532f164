"""Runs in their own process: killed, interrupted, supervised; and the protocol they speak."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from run_setup import small_config

from trainer_core.build import create_run, run, start_run
from trainer_core.config import TrainConfig
from trainer_core.networks.file_check import body_hash
from trainer_core.runs.supervisor import supervise

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "trainer_core" / "worker_main.py"


def start_worker(run_dir: Path, *flags: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(WORKER), str(run_dir), *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def events_until(worker: subprocess.Popen[bytes], kind: str, step: int = 0) -> dict[str, Any]:
    """Read events up to the first of `kind` at `step` or later."""
    return next_of(worker, (kind,), step)


def next_of(worker: subprocess.Popen[bytes], kinds: tuple[str, ...], step: int = 0) -> dict[str, Any]:
    assert worker.stdout is not None
    for line in worker.stdout:
        wire = json.loads(line)
        if wire["type"] in kinds and wire["step"] >= step:
            return wire
    raise AssertionError(f"the worker ended without {kinds}")


def config_of(micro_model: Path, pictures: Path, output: Path, **sections: dict[str, Any]) -> TrainConfig:
    options: dict[str, dict[str, Any]] = {"run": {"max_train_steps": 12}, "checkpoint": {"every_steps": 3}}
    return small_config(micro_model, pictures, output, **{**options, **sections})


@pytest.mark.slow  # tests/faults kills at seeded moments and is quicker; the next test kills a real worker
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
def test_kind_resume_state_sigkill_at_a_random_moment(micro_model: Path, pictures: Path, tmp_path: Path) -> None:
    """Killed twice at random moments and started again: equal, bit for bit, to the unbroken run."""
    whole = start_run(config_of(micro_model, pictures, tmp_path / "whole"))
    folder = create_run(config_of(micro_model, pictures, tmp_path / "killed"))
    generator = random.Random(5)
    for _ in range(2):
        worker = start_worker(folder.path)
        events_until(worker, "StepFinished", step=4)
        time.sleep(generator.uniform(0.0, 1.0))
        worker.kill()
        worker.wait()
    done = run(folder.path)
    assert (done.status, done.step) == ("finished", 12), done.message
    assert whole.lora is not None
    assert done.lora is not None
    assert body_hash(done.lora) == body_hash(whole.lora)


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
def test_supervisor_restarts_a_killed_worker(micro_model: Path, pictures: Path, tmp_path: Path) -> None:
    whole = start_run(config_of(micro_model, pictures, tmp_path / "whole"))
    folder = create_run(config_of(micro_model, pictures, tmp_path / "killed"))
    seen: list[dict[str, Any]] = []

    def on_event(wire: dict[str, Any]) -> None:
        seen.append(wire)
        if wire["type"] == "StepFinished" and wire["step"] == 5 and not any(e["type"] == "Resumed" for e in seen):
            for pid in children_of(os.getpid()):
                os.kill(pid, signal.SIGKILL)

    outcome = supervise(folder.path, on_event)
    assert outcome.status == "finished", outcome
    assert [wire["data"]["checkpoint"] for wire in seen if wire["type"] == "Resumed"] == ["step-00000003"]
    lora = Path(json.loads((folder.path / "config.json").read_text(encoding="utf-8"))["final_lora"])
    assert whole.lora is not None
    assert body_hash(lora) == body_hash(whole.lora)


def children_of(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children() if "worker_main" in " ".join(child.cmdline())]


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ; the mapping is unit-tested in runs")
def test_ctrl_c_leaves_a_checkpoint_and_a_usable_lora(micro_model: Path, pictures: Path, tmp_path: Path) -> None:
    """And the end of standard input, which comes at once here, does not stop a worker that nobody supervises."""
    config = config_of(micro_model, pictures, tmp_path / "out", run={"max_train_steps": 500})
    folder = create_run(config)
    worker = start_worker(folder.path)
    assert worker.stdin is not None
    worker.stdin.close()
    step = events_until(worker, "StepFinished", step=2)["step"]
    worker.send_signal(signal.SIGINT)
    last = events_until(worker, "RunFinished")
    assert worker.wait(timeout=60) == 0
    assert last["data"]["status"] == "stopped"
    assert last["step"] <= step + 2
    assert Path(last["data"]["lora"]).is_file()
    assert last["data"]["checkpoint"]
    assert last["data"]["message"].startswith(f"Stopped after step {last['step']} of 500")


def test_commands_are_obeyed_and_the_end_of_them_stops_a_supervised_worker(
    micro_model: Path, pictures: Path, tmp_path: Path
) -> None:
    config = config_of(micro_model, pictures, tmp_path / "out", run={"max_train_steps": 500}, checkpoint={})
    worker = start_worker(create_run(config).path, "--supervised")
    events_until(worker, "StepFinished", step=2)
    assert worker.stdin is not None
    worker.stdin.write(b'{"v": 1, "id": "a", "cmd": "save"}\nnonsense\n')
    worker.stdin.flush()
    answers = [(event["type"], event["data"]) for event in (next_of(worker, ("Ack", "CheckpointSaved")) for _ in "123")]
    acks = [data | {"message": ""} for kind, data in answers if kind == "Ack"]
    assert acks[0] == {"id": "a", "cmd": "save", "ok": True, "message": ""}
    assert acks[1]["ok"] is False
    (saved,) = [data for kind, data in answers if kind == "CheckpointSaved"]  # before or after the second answer
    assert saved["name"].startswith("step-")
    worker.stdin.close()
    assert events_until(worker, "RunFinished")["data"]["status"] == "stopped"
    assert worker.wait(timeout=60) == 0
