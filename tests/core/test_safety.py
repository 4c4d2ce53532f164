"""Safety in whole runs: dropped and quarantined pictures, the ladder rung by rung, exact resume between two rungs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_setup import Recorder, small_config, write_pictures
from safetensors.torch import load_file

from trainer_core.build import TrainResult, resume_run, start_run
from trainer_core.config import TrainConfig
from trainer_core.networks.file_check import body_hash
from trainer_core.runs.protocol import Commands
from trainer_core.trainer import Trainer

LIGHT: dict[str, dict[str, Any]] = {
    "optimizer": {"learning_rate": 1e-3, "te1_lr": 0.0, "te2_lr": 0.0},
    "lora": {"rank": 2, "preset": "attention"},
    "safety": {"diagnose": False},
    "health": {"enabled": False},
}


@pytest.fixture(scope="module")
def small_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("small"), 6, sizes=((32, 32),))


@pytest.fixture
def config_for(micro_model: Path, small_pictures: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    def make(name: str = "out", steps: int = 6, **sections: dict[str, Any]) -> TrainConfig:
        merged = {key: {**LIGHT.get(key, {}), **sections.get(key, {})} for key in {**LIGHT, **sections}}
        merged["run"] = {"max_train_steps": steps, **merged.get("run", {})}
        cache = {"cache_dir": str(small_pictures.parent / "cache")}
        merged["dataset"] = {**cache, **merged.get("dataset", {})}
        return small_config(micro_model, small_pictures, tmp_path / name, **merged)

    return make


def train(config: TrainConfig) -> tuple[TrainResult, Recorder]:
    recorder = Recorder()
    return start_run(config, sink=recorder), recorder


class _Poisoned(torch.autograd.Function):
    """Identity with a gradient of NaN."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * math.nan


Fault = Callable[[Trainer, Any, torch.Tensor], torch.Tensor]


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    """Put a fault between a micro-batch's losses and the trainer."""
    original = Trainer.loss

    def install(fault: Fault) -> None:
        def loss(self: Trainer, epoch: int, batch: Any) -> torch.Tensor:
            return fault(self, batch, original(self, epoch, batch))

        monkeypatch.setattr(Trainer, "loss", loss)

    return install


def nan_gradient_while(holds: Callable[[Trainer], bool]) -> Fault:
    def fault(trainer: Trainer, batch: Any, loss_B: torch.Tensor) -> torch.Tensor:
        value = _Poisoned.apply(loss_B) if holds(trainer) else loss_B
        assert isinstance(value, torch.Tensor)
        return value

    return fault


def poison_latents(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """The latents of one picture hold a NaN."""
    from trainer_core.data import BatchLoader

    original = BatchLoader.load

    def load(self: BatchLoader, *args: Any, **options: Any) -> Any:
        batch = original(self, *args, **options)
        for place, name in enumerate(batch.files):
            if name == file:
                batch.mean_BCHW[place, 0, 0, 0] = math.nan
        return batch

    monkeypatch.setattr(BatchLoader, "load", load)


def test_u4_a_poisoned_picture_is_dropped_and_the_rest_computed_again(
    config_for: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """U4, F5 and F6: every step is applied, the picture is named with its cause, and quarantined at its second time."""
    poison_latents(monkeypatch, "003.png")
    result, recorder = train(config_for(steps=9))
    assert (result.status, result.applied, result.rejected) == ("finished", 9, 0), result.message
    dropped = [data for data in recorder.of("StepFinished") if data["left_out"]]
    assert [data["left_out"] for data in dropped] == [["003.png"], ["003.png"]]
    said = [data for data in recorder.of("Intervention")]
    assert "003.png was left out of this step" in said[0]["action"]
    assert "its latents hold NaN or infinity; timestep " in said[0]["reason"]
    assert "003.png is quarantined" in said[-1]["action"]
    assert said[-1]["reason"].endswith("2 times")
    assert result.lora is not None
    assert all(bool(torch.isfinite(value).all()) for value in load_file(result.lora).values())


def test_a_step_that_is_stopped_half_way_counts_no_picture(
    config_for: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run computes it again: counted twice, the picture would be quarantined for one failure."""
    poison_latents(monkeypatch, "003.png")
    commands = Commands()

    def stop(wire: dict[str, Any]) -> None:
        if wire["type"] == "Intervention" and "was left out of this step" in wire["data"]["action"]:
            commands.stop("between the two computations")

    whole = Recorder()
    config = config_for(steps=5, safety={"diagnose": False, "quarantine_after": 2})
    start_run(replace(config, run=replace(config.run, output_name="whole")), sink=whole)
    stopped = start_run(config, commands=commands, sink=stop)
    assert stopped.status == "stopped"
    again = Recorder()
    resume_run(stopped.run_dir, sink=again)
    told = [[data["action"] for data in recorder.of("Intervention")] for recorder in (whole, again)]
    assert told[0] == told[1]


def test_u4_the_rest_keeps_draws_and_divisor(
    config_for: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient without sample j is the whole step's minus j's share of it."""
    from trainer_core.step_work import StepWork

    seen: dict[str, dict[str, torch.Tensor]] = {}
    original = Trainer.run

    def gradients(trainer: Trainer, name: str, work: StepWork) -> None:
        assert trainer.accumulation.run(work)
        parameters = trainer.parts.network.named_parameters()
        seen[name] = {key: p.grad.clone() for key, p in parameters if p.grad is not None}
        trainer.parts.precision.abandon(trainer.parts.optimizer)

    def run(self: Trainer) -> str:
        work = self.guard.plan(*self._position())
        assert (len(work.refs), work.divisor) == (3, 3)
        gradients(self, "whole", work)
        gradients(self, "share", StepWork(work.epoch, ((work.refs[1],),), 3))
        rest = work.without([1])
        assert (len(rest.refs), rest.divisor, rest.dropped) == (2, 3, (work.refs[1],))
        gradients(self, "rest", rest)
        return original(self)

    monkeypatch.setattr(Trainer, "run", run)
    train(config_for(steps=1, dataset={"batch_size": 3}))
    assert seen["rest"]
    for name, value in seen["rest"].items():
        torch.testing.assert_close(value, seen["whole"][name] - seen["share"][name], rtol=1e-3, atol=1e-7)


def test_u15_and_u6_every_rung_then_stop(
    config_for: Callable[..., TrainConfig], inject: Callable[[Fault], None]
) -> None:
    """From step 3 on every gradient is NaN: bf16 -> rollback, fp32, learning rate, stop, with a report; U15: the
    schedule follows applied steps."""
    inject(nan_gradient_while(lambda trainer: trainer.state.applied >= 3))
    config = config_for(steps=40, precision={"compute": "bf16"}, checkpoint={"every_steps": 2})
    result, recorder = train(config)
    assert result.status == "failed"
    actions = [data["action"] for data in recorder.of("Intervention")]
    assert len(actions) == 3, actions
    for action, word in zip(actions, ("other noise", "computing in fp32 instead of bf16", "times 0.5"), strict=True):
        assert word in action
        assert "to step-00000002" in action
    assert [data["attempt"] for data in recorder.of("Intervention")] == [1, 2, 3]
    assert "There is no rung left" in result.message
    report = (result.run_dir / "stop_report.md").read_text(encoding="utf-8")
    assert "computing in fp32 instead of bf16" in report
    steps = recorder.of("StepFinished")
    assert [data["step"] for data in steps] == [data["applied"] for data in steps]
    assert steps[-1]["lr"] == {"unet": 5e-4}
    assert steps[0]["lr"] == {"unet": 1e-3}
    checkpoints = sorted(path.name for path in (result.run_dir / "checkpoints").iterdir())
    assert "step-00000002-3" in checkpoints  # the state that every rung began with was written at once


def test_a_fault_before_the_first_checkpoint_goes_back_to_the_start(
    config_for: Callable[..., TrainConfig], inject: Callable[[Fault], None]
) -> None:
    inject(nan_gradient_while(lambda trainer: trainer.state.attempt == 0))
    result, recorder = train(config_for(steps=3))
    assert (result.status, result.applied) == ("finished", 3), result.message
    assert "to the start of the run" in recorder.of("Intervention")[0]["action"]


def test_what_was_due_after_the_step_that_is_gone_back_to_is_made_up_for(
    config_for: Callable[..., TrainConfig], inject: Callable[[Fault], None]
) -> None:
    """Its checkpoint was written before its validation, which goes with the rest; a kill right after would measure it
    again, so the run that is not killed does too."""
    inject(nan_gradient_while(lambda trainer: trainer.state.attempt == 0 and trainer.state.applied >= 3))
    sections = {"validation": {"enabled": True, "every_steps": 2, "max_pictures": 1}, "checkpoint": {"every_steps": 2}}
    result, recorder = train(config_for(steps=6, **sections))
    assert result.status == "finished", result.message
    back = recorder.of("Intervention")[0]
    assert "to step-00000002" in back["action"]
    measured = [data["step"] for data in recorder.of("ValidationFinished")]
    assert measured == [0, 2, 4, 2, 4, 6], "steps 4 and beyond were rejected the first time"
    state = json.loads((result.run_dir / "checkpoints" / "step-00000006" / "state.json").read_text(encoding="utf-8"))
    assert [entry["step"] for entry in state["scalars"]["validation"]] == [0, 2, 4]


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, nothing is saved on the way out."""


BROKEN = nan_gradient_while(lambda trainer: trainer.state.attempt < 3 and trainer.state.applied >= 3)
THREE_RUNGS: dict[str, dict[str, Any]] = {"checkpoint": {"every_steps": 2}, "precision": {"compute": "bf16"}}


@pytest.fixture(scope="module")
def unbroken(
    micro_model: Path, small_pictures: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainResult, Recorder]:
    """A run whose attempts 0 to 2 fail and whose attempt 3 reaches the end."""
    sections = {**LIGHT, **THREE_RUNGS, "run": {"max_train_steps": 6}}
    config = small_config(micro_model, small_pictures, tmp_path_factory.mktemp("unbroken"), **sections)
    original = Trainer.loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "loss", lambda self, epoch, batch: BROKEN(self, batch, original(self, epoch, batch)))
        result, recorder = train(config)
    return result, recorder


def test_transient_faults_are_left_behind(unbroken: tuple[TrainResult, Recorder]) -> None:
    """Every rollback says from where to where and why, the record keeps all attempts, and the run ends well."""
    import sqlite3

    result, recorder = unbroken
    assert (result.status, result.step, result.applied) == ("finished", 6, 6), result.message
    said = recorder.of("Intervention")
    assert [(data["step"], data["attempt"]) for data in said] == [(2, 1), (2, 2), (2, 3)]
    assert said[0]["action"] == (
        "Went back from step 6 to step-00000002: other noise and other pictures; 5 steps' worth of data left out"
    )
    assert said[0]["reason"] == "3 steps in a row with gradients that are not finite at step 6 (FLOOR)"
    with sqlite3.connect(result.run_dir / "run.db") as database:
        rows = database.execute("select attempt, min(step), max(step) from steps group by attempt").fetchall()
    assert rows == [(0, 1, 6), (1, 3, 6), (2, 3, 6), (3, 3, 6)]


@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_after_a_rung_and_resumed_is_exact(
    config_for: Callable[..., TrainConfig],
    inject: Callable[[Fault], None],
    monkeypatch: pytest.MonkeyPatch,
    unbroken: tuple[TrainResult, Recorder],
    at: int,
) -> None:
    """The process dies one step after rung `at`; the result is the unbroken run's bit for bit."""
    inject(BROKEN)
    original, dead = Trainer.train_step, []

    def train_step(self: Trainer) -> bool:
        if self.state.attempt == at and self.state.applied == 3 and not dead:
            dead.append(True)
            raise Killed
        return original(self)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    config = config_for("killed", steps=6, **THREE_RUNGS)
    with pytest.raises(Killed):
        start_run(config)
    (run_dir,) = (Path(config.run.output_dir) / "safe_scaler").glob("2*")
    recorder = Recorder()
    done = resume_run(run_dir, sink=recorder)
    assert done.status == "finished", done.message
    assert recorder.of("StepFinished")[-1]["lr"] == {"unet": 5e-4}
    assert recorder.losses[-4:] == unbroken[1].losses[-4:]
    assert body_hash(done.lora) == body_hash(unbroken[0].lora)


def test_too_many_bad_pictures_are_a_fault_of_the_data(
    config_for: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every picture's latents are NaN: no rung is tried, the pictures are named."""
    from trainer_core.data import BatchLoader

    original = BatchLoader.load

    def load(self: BatchLoader, *args: Any, **options: Any) -> Any:
        batch = original(self, *args, **options)
        batch.mean_BCHW.fill_(math.nan)
        return batch

    monkeypatch.setattr(BatchLoader, "load", load)
    result, recorder = train(config_for(steps=30))
    assert result.status == "failed"
    assert "pictures are quarantined" in result.message
    assert not [data for data in recorder.of("Intervention") if data["action"].startswith("Went back")]


def test_the_first_hit_is_named(config_for: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose gradient overflows: parameter, block, micro-batch, files and timesteps are told."""
    import torch.nn as nn

    def spoil(trainer: Trainer) -> None:
        layer = dict(trainer.parts.model.unet.named_modules())["mid_block.attentions.0.transformer_blocks.0.attn2.to_q"]
        assert isinstance(layer, nn.Module)

        def hook(module: nn.Module, gradients: Any) -> Any:
            return tuple(None if g is None else g * math.inf for g in gradients)

        layer.register_full_backward_pre_hook(hook)

    original = Trainer.run

    def run(self: Trainer) -> str:
        spoil(self)
        return original(self)

    monkeypatch.setattr(Trainer, "run", run)
    config = config_for(steps=1, safety={"diagnose": True}, gradient={"accumulation": 2}, dataset={"batch_size": 1})
    result, recorder = train(config)
    assert result.status == "failed"  # no step was applied
    (rejected,) = recorder.of("StepRejected")
    assert (rejected["kind"], rejected["micro_batch"]) == ("FLOOR", 1)
    assert "middle_block" in rejected["where"]
    assert "attn2_to_q" in rejected["where"]
    assert rejected["where"].endswith("(middle block)")
    assert len(rejected["samples"]) == len(rejected["timesteps"]) == 1


@pytest.mark.slow
def test_the_opt_in_rungs(config_for: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty optimizer state, then the module that was hit first is trained no more, and the run finishes without it."""
    original = Trainer.run

    def run(self: Trainer) -> str:
        name = "lora_unet_middle_block_1_transformer_blocks_0_attn2_to_q.lora_up.weight"
        parameter = dict(self.parts.network.named_parameters())[name]
        parameter.register_hook(lambda gradient: gradient * math.nan if self.state.applied >= 3 else gradient)
        return original(self)

    monkeypatch.setattr(Trainer, "run", run)
    rungs = ("reset_optimizer", "freeze_module")
    config = config_for(steps=6, safety={"diagnose": True, "rungs": rungs}, checkpoint={"every_steps": 2})
    result, recorder = train(config)
    assert (result.status, result.applied) == ("finished", 6), result.message
    actions = [data["action"] for data in recorder.of("Intervention")]
    assert ["optimizer's state is empty" in actions[0], "attn2_to_q is not trained any more" in actions[1]] == [
        True
    ] * 2
