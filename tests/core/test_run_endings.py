"""How runs end: what is said, what is kept to go on from, and whose name the result has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_setup import train

from trainer_core.build import resume_run
from trainer_core.config import TrainConfig
from trainer_core.errors import WeightsDifferError
from trainer_core.networks.file_check import body_hash
from trainer_core.runs.platform import DurableIO
from trainer_core.runs.protocol import Commands
from trainer_core.trainer import Trainer


def test_a_run_that_can_go_on_keeps_its_name(config_for: Callable[..., TrainConfig]) -> None:
    """However an attempt ends: the name that was given back would be taken, and the other run's file overwritten."""
    first, _ = train(config_for(), stop_after=2)
    commands = Commands()
    commands.stop("test")
    stopped = resume_run(first.run_dir, commands=commands)  # while the pictures are looked at
    assert (stopped.status, stopped.checkpoint, stopped.step, stopped.applied) == ("stopped", "step-00000002", 2, 2)
    assert stopped.message == "Stopped before the training went on; step-00000002 is as it was."
    other, _ = train(config_for(run={"seed": 12}))
    assert other.lora is not None
    made = other.lora.read_bytes()
    done = resume_run(first.run_dir)
    assert done.lora is not None
    assert [other.lora.name, done.lora.name] == ["test-2.safetensors", "test.safetensors"]
    assert other.lora.read_bytes() == made


@pytest.mark.parametrize("room", [None, 1 << 60], ids=["put back", "half made"])
def test_an_update_that_runs_out_of_memory_leaves_no_wrong_checkpoint(
    config_for: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch, room: int | None
) -> None:
    """Where the state was put back it is kept as that of the step before; where it may be half made it is not."""
    whole, _ = train(config_for("whole"))
    update = Trainer._update

    def failing(self: Trainer, *arguments: Any) -> Any:
        if self.state.step == 3:
            next(iter(self.parts.network.parameters_of("unet").values())).data.add_(1.0)
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return update(self, *arguments)

    with monkeypatch.context() as broken:
        broken.setattr(Trainer, "_update", failing)
        broken.setattr("trainer_core.memory.update_guard.free_bytes", lambda device: room)
        failed, _ = train(config_for("failed", checkpoint={"every_steps": 1}))
    assert (failed.status, failed.step, failed.checkpoint) == ("failed", 2, "step-00000002")
    done = resume_run(failed.run_dir)
    assert (done.status, done.step, done.applied) == ("finished", 4, 4)
    assert body_hash(done.lora) == body_hash(whole.lora)


def test_a_file_for_the_report_that_cannot_be_written_ends_no_run(
    config_for: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run that ends for another reason says that one."""
    replace_file = DurableIO.replace_file

    def full(self: DurableIO, path: Path, data: bytes) -> None:
        if path.name in ("memory.json", "stop_report.md"):
            raise OSError(28, "No space left on device")
        replace_file(self, path, data)

    def not_finite(self: Trainer, epoch: int, batch: Any) -> torch.Tensor:
        return trained(self, epoch, batch) * float("nan")

    trained = Trainer.loss
    monkeypatch.setattr(DurableIO, "replace_file", full)
    monkeypatch.setattr(Trainer, "loss", not_finite)
    result, recorder = train(config_for(safety={"rungs": ("freeze_module",)}, precision={"max_rejected_steps": 2}))
    assert len(recorder.of("StepRejected")) == 2
    assert result.message.startswith("Stopped at step 2: 2 rejected steps in a row (POISON).")
    assert "could not be written to" in result.message


def test_weights_that_went_apart_are_not_kept(
    config_for: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows which process is right, so the checkpoint to go on from is the one before."""

    def apart(self: Trainer) -> None:
        if self.state.step == 3:
            raise WeightsDifferError("The weights of process 1 are not those of process 0 any more")

    monkeypatch.setattr(Trainer, "_look_around", apart)
    failed, _ = train(config_for(checkpoint={"every_steps": 2}))
    assert (failed.status, failed.step, failed.checkpoint) == ("failed", 3, "step-00000002")
