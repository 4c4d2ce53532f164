"""Rows of the fault matrix on whole runs, short. `benchmarks/faults.py` is the long version; rows C1 to C14 of the
store are in tests/core/checkpoints, those of several processes in tests/core/distributed."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from run_setup import Recorder, small_config
from safetensors.torch import load_file

from trainer_core.build import TrainResult, create_run, resume_run, run, start_run
from trainer_core.errors import ResourceError
from trainer_core.networks.file_check import body_hash
from trainer_core.runs.platform import DurableIO
from trainer_core.runs.record import open_readonly
from trainer_core.trainer import Trainer


@pytest.fixture(scope="module")
def config_of(micro_model: Path, pictures: Path) -> Any:
    def make(output: Path, **sections: dict[str, Any]) -> Any:
        plain: dict[str, dict[str, Any]] = {
            "optimizer": {"te1_lr": 0.0, "te2_lr": 0.0},
            "checkpoint": {"every_steps": 1, "keep_last": 2},
            "run": {"max_train_steps": 5},
        }
        return small_config(micro_model, pictures, output, **{**plain, **sections})

    return make


@pytest.fixture(scope="module")
def whole(config_of: Any, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """The unbroken run."""
    return start_run(config_of(tmp_path_factory.mktemp("whole")))


def steps_of(run_dir: Path) -> list[tuple[int, float]]:
    with open_readonly(run_dir / "run.db") as record:
        return [(row["step"], row["loss"]) for row in record.steps()]


def test_out_of_memory_every_second_step(
    config_of: Any, whole: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is made again in smaller pieces; every step once, the same losses and weights to rounding."""
    original = Trainer.loss
    failed: list[int] = []

    def loss(self: Trainer, epoch: int, batch: Any) -> torch.Tensor:
        if self.state.step % 2 == 1 and len(batch.files) > 1 and self.state.step not in failed:
            failed.append(self.state.step)
            value = original(self, epoch, batch)
            value.sum().backward()  # partial gradients of a backward that fails
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return original(self, epoch, batch)

    monkeypatch.setattr(Trainer, "loss", loss)
    recorder = Recorder()
    result = start_run(config_of(tmp_path), sink=recorder)
    assert result.status == "finished"
    assert failed
    assert steps_of(result.run_dir) == [
        (step, pytest.approx(value, rel=1e-6)) for step, value in steps_of(whole.run_dir)
    ]
    assert whole.lora is not None
    assert result.lora is not None
    found = load_file(result.lora)
    for name, value in load_file(whole.lora).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    told = [data["action"] for data in recorder.of("Intervention")]
    assert any("The micro-batch is cut to 1" in text for text in told)
    stored = Path(result.run_dir / "checkpoints" / str(result.checkpoint) / "state.json").read_text(encoding="utf-8")
    assert '"limits"' in stored, "what was learnt is in the checkpoint"


def test_two_writers_are_not_let_in(config_of: Any, whole: TrainResult, tmp_path: Path) -> None:
    """C12 on a run: the second is refused by name while the first goes on, and the result is whole."""
    folder = create_run(config_of(tmp_path))
    refused: list[str] = []

    def second(wire: dict[str, Any]) -> None:
        if wire["type"] == "StepFinished" and wire["step"] == 2:
            child = os.fork() if sys.platform != "win32" else -1
            if child == 0:
                try:
                    run(folder.path)
                except ResourceError as error:
                    os._exit(7 if f"pid {os.getppid()}" in str(error) else 1)
                os._exit(0)
            refused.append(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))

    result = run(folder.path, sink=second)
    assert refused == ["7"], "refused, naming the process that holds the run"
    assert body_hash(result.lora) == body_hash(whole.lora)


def test_a_folder_that_becomes_read_only(
    config_of: Any, whole: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints cannot be made for a while: it is said, the training goes on, the result is the same, and the last
    checkpoint is there again."""
    original = DurableIO.make_folder
    locked = [True]

    def make_folder(self: DurableIO, path: Path) -> None:
        if locked[0] and path.name.startswith(".tmp-"):
            raise OSError(errno.EROFS, "Read-only file system")
        original(self, path)

    monkeypatch.setattr(DurableIO, "make_folder", make_folder)

    def unlock(wire: dict[str, Any]) -> None:
        locked[0] = locked[0] and wire["step"] < 4

    recorder = Recorder()

    def both(wire: dict[str, Any]) -> None:
        unlock(wire)
        recorder(wire)

    result = start_run(config_of(tmp_path), sink=both)
    assert result.status == "finished"
    assert body_hash(result.lora) == body_hash(whole.lora)
    warned = [data["message"] for data in recorder.of("Warned") if data["topic"] == "checkpoint"]
    assert any("Read-only file system" in text for text in warned)
    assert any("training goes on" in text or "overtaken" in text for text in warned)
    assert result.checkpoint == "step-00000005"
    assert resume_run(result.run_dir).step == 5


@pytest.mark.skipif(sys.platform == "win32", reason="forks and kills")
def test_sigkill_at_seeded_moments(tmp_path: Path) -> None:
    """The long run's own code with three kills: final adapter and record equal the unbroken run's."""
    from benchmarks import faults

    faults.prepare(tmp_path)
    unbroken = create_run(faults.config_for(tmp_path / "micro", tmp_path / "pictures", tmp_path / "whole")).path
    started = time.perf_counter()
    _, status = faults.finish_run(unbroken, spawn=False)
    took = time.perf_counter() - started
    assert status.startswith("finished")
    kills = faults.campaign(tmp_path, [1, 2, 3], unbroken, 0.7 * took, spawn=False)
    assert kills
    assert [kill.damage for kill in kills] == [""] * len(kills)
