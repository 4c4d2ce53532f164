"""Whole runs in this process: steps, resume, stop, rejected steps, and what must not change the result."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from run_setup import Recorder, train, write_pictures
from safetensors.torch import load_file

from trainer_core.build import resume_run, start_run
from trainer_core.config import TrainConfig
from trainer_core.diagnostics.report_data import read_run
from trainer_core.diagnostics.report_memory import memory_sentence
from trainer_core.errors import CheckpointError, ConfigError
from trainer_core.networks.file_check import body_hash
from trainer_core.runs.protocol import Commands
from trainer_core.trainer import Trainer


def test_a_run_trains_every_part_and_leaves_a_proven_file(config_for: Callable[..., TrainConfig]) -> None:
    result, recorder = train(config_for())
    assert (result.status, result.step, result.applied, result.rejected) == ("finished", 4, 4, 0), result.message
    means = [fmean(recorder.losses[: count + 1]) for count in range(4)]
    assert [data["loss_avg"] for data in recorder.of("StepFinished")] == pytest.approx(means)
    assert result.lora is not None
    assert result.lora.name == "test.safetensors"
    state = load_file(result.lora)
    for part in ("lora_unet", "lora_te1", "lora_te2"):
        moved = [key for key, value in state.items() if key.startswith(part) and "lora_up" in key and bool(value.any())]
        assert moved, f"nothing of {part} was trained"
    (saved,) = recorder.of("LoraSaved")
    assert saved["final"]
    assert "Proven" in saved["proof"]
    assert recorder.of("RunFinished")[0]["status"] == "finished"
    assert result.report is not None
    assert result.report.exists()


def test_kind_determinism_same_seed_same_bits(config_for: Callable[..., TrainConfig]) -> None:
    """B70: seed 7 twice is equal bit by bit, another seed differs."""
    first, one = train(config_for("a"))
    second, two = train(config_for("b"))
    other, three = train(config_for("c", run={"seed": 8}))
    assert one.losses == two.losses
    assert len(one.losses) == 4
    assert body_hash(first.lora) == body_hash(second.lora) != body_hash(other.lora)
    assert one.losses != three.losses


def test_kind_side_effects_previews_and_validation_change_nothing(config_for: Callable[..., TrainConfig]) -> None:
    """B63: bit-equal with previews and validation at every step, and the largest batch tried first, and with none."""
    plain, without = train(config_for("plain"))
    watched, recorder = train(
        config_for(
            "watched",
            memory={"probe": "true", "latency_guard": True},
            preview={"prompts": ("a red circle --s 2 --w 32 --h 32",), "every_steps": 1},
            validation={"enabled": True, "split": 0.0, "every_steps": 1, "bands": 2},
        )
    )
    assert len(recorder.of("PreviewReady")) == 5
    assert len(recorder.of("ValidationFinished")) == 5
    assert recorder.losses == without.losses
    assert body_hash(plain.lora) == body_hash(watched.lora)


@pytest.mark.parametrize("at", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_kind_resume_state_stop_and_resume_is_exact(config_for: Callable[..., TrainConfig], at: int) -> None:
    """B14, B16, B18, B19: stop, resume, and the result is the unbroken run's, bit for bit, with one step count."""
    whole, unbroken = train(config_for("whole", run={"max_train_steps": 6}, lora={"dropout": 0.1}))
    part, before = train(config_for("part", run={"max_train_steps": 6}, lora={"dropout": 0.1}), stop_after=at)
    assert part.status == "stopped"
    assert part.step == at
    assert part.lora is not None
    recorder = Recorder()
    done = resume_run(part.run_dir, sink=recorder)
    assert (done.status, done.step) == ("finished", 6)
    assert before.losses + recorder.losses == unbroken.losses
    assert [data["lr"] for data in recorder.of("StepFinished")] == [
        data["lr"] for data in unbroken.of("StepFinished")[at:]
    ]
    assert body_hash(done.lora) == body_hash(whole.lora)


def test_kind_resume_count_three_legs(config_for: Callable[..., TrainConfig]) -> None:
    """B14: steps 2, 4, 6 over two resumes; checkpoint names are absolute steps."""
    config = config_for(run={"max_train_steps": 6})
    first, _ = train(config, stop_after=2)
    commands = Commands()
    second = resume_run(first.run_dir, commands=commands, sink=Recorder(commands, 4))
    third = resume_run(first.run_dir)
    assert [first.step, second.step, third.step] == [2, 4, 6]
    names = sorted(path.name for path in (first.run_dir / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004", "step-00000006"]


def test_kind_resume_config_changed_settings(config_for: Callable[..., TrainConfig]) -> None:
    """B20, B21: what must not change is refused, each by name; what may is logged and used, and the draws stay."""
    part, known = train(config_for(checkpoint={"every_steps": 1}), stop_after=3)
    shutil.rmtree(part.run_dir / "checkpoints" / "step-00000003")
    before = (part.run_dir / "config.json").read_bytes()
    refused = {"lora": {"rank": 8}, "optimizer": {"te2_lr": 0.0}, "run": {"seed": 12}}
    with pytest.raises(CheckpointError, match="lora.rank: 4 in the checkpoint, 8 now") as caught:
        resume_run(part.run_dir, partial(changed, sections=refused))
    told = [line.split(":")[0] for line in caught.value.differences]
    assert told == ["lora.rank", "run.seed", "trained parts"]
    assert (part.run_dir / "config.json").read_bytes() == before

    recorder = Recorder()
    allowed = {
        "optimizer": {"learning_rate": 5e-4},
        "run": {"max_train_steps": 5},
        "checkpoint": {"every_steps": 2, "lora_every_steps": 4},
        "preview": {"every_steps": 3},
        "memory": {"micro_batch": 1},
        "dataset": {"workers": 1},
    }
    done = resume_run(part.run_dir, partial(changed, sections=allowed), sink=recorder)
    assert (done.status, done.step) == ("finished", 5)
    notes = {line.split(":")[0]: line for line in recorder.of("Resumed")[0]["differences"]}
    assert set(notes) == {f"{section}.{name}" for section, fields in allowed.items() for name in fields}
    rounded = {name for name, line in notes.items() if line.endswith("(exact draws, rounding differs)")}
    assert rounded == {"memory.micro_batch", "dataset.workers"}
    assert recorder.losses[0] == pytest.approx(known.losses[2], rel=1e-6), "the same pictures, noise and weights"
    assert recorder.of("StepFinished")[0]["lr"] == {"unet": 5e-4, "te1": 5e-4, "te2": 5e-4}


def changed(config: TrainConfig, sections: dict[str, dict[str, Any]]) -> TrainConfig:
    for name, fields in sections.items():
        config = replace(config, **{name: replace(getattr(config, name), **fields)})
    return config


def test_resuming_a_finished_run_leaves_one_checkpoint_of_its_last_step(config_for: Callable[..., TrainConfig]) -> None:
    done, _ = train(config_for())
    again = resume_run(done.run_dir)
    assert (again.status, again.step) == ("finished", 4)
    assert [path.name for path in (done.run_dir / "checkpoints").iterdir()] == ["step-00000004"]


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Make the loss of the given steps (1-based) NaN."""
    original = Trainer.loss

    def loss(self: Trainer, epoch: int, batch: Any) -> torch.Tensor:
        value = original(self, epoch, batch)
        return value * float("nan") if self.state.step + 1 in steps else value

    monkeypatch.setattr(Trainer, "loss", loss)


def test_kind_non_finite_one_bad_step_is_rejected(
    config_for: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {2})
    result, recorder = train(config_for())
    assert (result.status, result.step, result.applied, result.rejected) == ("finished", 4, 3, 1)
    (rejected,) = recorder.of("StepRejected")
    assert rejected["step"] == 2
    assert rejected["loss"] is None
    assert rejected["nonfinite"] == ["loss", "grad_norm"]
    assert rejected["reason"] == "the loss is not a finite number"
    assert rejected["culprits"]
    assert all(name.endswith(".png") for name in rejected["samples"])
    assert [data["applied"] for data in recorder.of("StepFinished")] == [1, 2, 3]
    assert result.lora is not None
    assert all(bool(torch.isfinite(value).all()) for value in load_file(result.lora).values())


def test_kind_loss_scale_run_halts_with_a_reason(
    config_for: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B04: nothing but bad steps ends the run with a reason and no LoRA file."""
    poison(monkeypatch, set(range(1, 100)))
    result, recorder = train(config_for(run={"max_train_steps": 50}, precision={"max_rejected_steps": 3}))
    assert (result.status, result.applied, result.lora, result.exit_code) == ("failed", 0, None, 1)
    assert result.step == 3
    assert "3 rejected steps in a row" in result.message
    assert not list(result.run_dir.parents[1].glob("*.safetensors"))
    assert recorder.of("RunFinished")[0]["status"] == "failed"


def test_a_run_that_changes_nothing_is_an_error(
    config_for: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kind loss-weight (B05): whatever the cause, a LoRA without effect is no result."""
    monkeypatch.setattr("trainer_core.trainer.learning_rate_factor", lambda *_: 0.0)
    result, _ = train(config_for(run={"max_train_steps": 2}))
    assert result.status == "failed"
    assert "changes nothing" in result.message
    assert not list(result.run_dir.parents[1].glob("*.safetensors"))


def test_an_early_export_without_effect_is_told_not_fatal(config_for: Callable[..., TrainConfig]) -> None:
    """Warm-up's first rate is 0: an export or a stop after step 1 holds an untouched adapter."""
    config = config_for(run={"max_train_steps": 4}, schedule={"warmup_steps": 2}, checkpoint={"lora_every_steps": 1})
    stopped, recorder = train(config, stop_after=1)
    assert stopped.status == "stopped"
    assert stopped.lora is not None
    assert any("changes nothing yet" in data["message"] for data in recorder.of("Warned"))
    assert resume_run(stopped.run_dir).status == "finished"


@pytest.mark.parametrize("frozen", ["te1", "te2", "unet"])
def test_kind_part_lr_zero_means_frozen(config_for: Callable[..., TrainConfig], frozen: str) -> None:
    """B12: a part of rate 0 has no adapter and is not trained; the others are."""
    result, recorder = train(config_for(optimizer={f"{frozen}_lr": 0.0}, run={"max_train_steps": 2}))
    assert result.lora is not None
    assert not [key for key in load_file(result.lora) if key.startswith(f"lora_{frozen}")]
    assert set(recorder.of("StepFinished")[0]["lr"]) == {"unet", "te1", "te2"} - {frozen}


def test_kind_step_count_learning_rates_do_not_depend_on_accumulation(config_for: Callable[..., TrainConfig]) -> None:
    """B64: 6 steps, warm-up 2, linear; accumulation 1, 2 and 3 give the same list."""
    lists = []
    for accumulation in (1, 2, 3):
        config = config_for(
            f"a{accumulation}",
            run={"max_train_steps": 6},
            gradient={"accumulation": accumulation},
            schedule={"type": "linear", "warmup_steps": 2},
            optimizer={"te1_lr": 0.0, "te2_lr": 0.0},
        )
        lists.append([data["lr"]["unet"] for data in train(config)[1].of("StepFinished")])
    assert lists[0] == lists[1] == lists[2]
    assert lists[0] == pytest.approx([0.0, 5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_kind_monitoring_accumulated_loss_is_the_mean(config_for: Callable[..., TrainConfig], tmp_path: Path) -> None:
    """B65, B08: batch 4 and accumulation 4 x 1 log the same loss, norm and end in the same weights."""
    pictures = write_pictures(tmp_path / "four", 4, sizes=((64, 64),))
    results = []
    for batch, accumulation in ((4, 1), (1, 4)):
        config = config_for(
            f"b{batch}",
            dataset={"path": str(pictures), "batch_size": batch},
            gradient={"accumulation": accumulation},
            run={"max_train_steps": 2},
        )
        results.append(train(config))
    (one, first), (two, second) = results
    assert first.losses == pytest.approx(second.losses, rel=1e-6)
    norms = [[data["grad_norm"] for data in recorder.of("StepFinished")] for recorder in (first, second)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_kind_bucket_short_groups_still_step(config_for: Callable[..., TrainConfig], tmp_path: Path) -> None:
    """B43: 7 pictures, batch 1, accumulation 4, 2 epochs: 2 steps an epoch, the second averaged over 3."""
    pictures = write_pictures(tmp_path / "seven", 7, sizes=((64, 64),))
    config = config_for(
        dataset={"path": str(pictures), "batch_size": 1},
        gradient={"accumulation": 4},
        run={"max_train_steps": None, "max_train_epochs": 2},
        optimizer={"te1_lr": 0.0, "te2_lr": 0.0},
    )
    result, recorder = train(config)
    assert result.step == 4
    assert recorder.of("RunStarted")[0]["total_steps"] == 4
    assert [data["epoch"] for data in recorder.of("StepFinished")] == [0, 0, 1, 1]


def test_names_are_never_overwritten(config_for: Callable[..., TrainConfig]) -> None:
    first, _ = train(config_for(run={"max_train_steps": 1}))
    before = first.lora.read_bytes() if first.lora else b""
    second, _ = train(config_for(run={"max_train_steps": 1}))
    assert first.lora is not None
    assert second.lora is not None
    assert (first.lora.name, second.lora.name) == ("test.safetensors", "test-2.safetensors")
    assert first.lora.read_bytes() == before


def test_all_config_problems_at_once_before_anything_is_made(config_for: Callable[..., TrainConfig]) -> None:
    config = config_for(run={"max_train_steps": 0}, lora={"rank": -1}, optimizer={"learning_rate": float("nan")})
    with pytest.raises(ConfigError) as caught:
        start_run(config)
    text = str(caught.value)
    assert all(name in text for name in ("run.max_train_steps", "lora.rank", "optimizer.learning_rate"))
    assert not Path(config.run.output_dir).exists()


def test_run_folder_holds_the_whole_record(config_for: Callable[..., TrainConfig]) -> None:
    import sqlite3

    result, _ = train(config_for(checkpoint={"every_steps": 2, "lora_every_steps": 2}))
    stored = json.loads((result.run_dir / "config.json").read_text(encoding="utf-8"))
    assert stored["config"]["run"]["seed"] == 11
    assert stored["format_version"] >= 1
    assert sorted(path.name for path in (result.run_dir / "lora").glob("*.safetensors")) == [
        "test-step00000002.safetensors",
        "test-step00000004.safetensors",
    ]
    with sqlite3.connect(result.run_dir / "run.db") as database:
        assert database.execute("select step, applied, rejected from steps order by step").fetchall() == [
            (step, step, 0) for step in range(1, 5)
        ]
        types = {row[0] for row in database.execute("select distinct type from events")}
    assert {"RunStarted", "CheckpointSaved", "LoraSaved", "RunFinished"} <= types


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_half_precision_trains_on_the_cpu(config_for: Callable[..., TrainConfig], compute: str) -> None:
    """B03, B07: trained tensors stay float32 through preview and save; a scaler exists for fp16 only."""
    config = config_for(
        precision={"compute": compute, "initial_loss_scale": 256.0, "gradient_checkpointing": True},
        checkpoint={"lora_every_steps": 1},
        preview={"prompts": ("a red circle --s 1 --w 32 --h 32",), "every_steps": 1},
    )
    result, recorder = train(config)
    assert result.status == "finished", result.message
    scales = {data["loss_scale"] for data in recorder.of("StepFinished")}
    assert scales == ({1.0} if compute == "bf16" else {256.0})
    assert result.lora is not None
    assert {value.dtype for value in load_file(result.lora).values()} == {torch.float32}


def test_kind_memory_the_largest_batch_is_tried_first_validation_and_preview_too(
    config_for: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B54: memory that ends for the bucket with the most pixels ends before step 1, and what was learnt holds.
    A preview that does not fit is told before step 1, and the training goes on."""
    from trainer_core.validation import previews

    write_pictures(tmp_path / "pictures", 4, sizes=((64, 128), (64, 64)))
    tried: list[tuple[str, int, tuple[int, ...]]] = []
    original = Trainer.loss

    def loss(self: Trainer, epoch: int, batch: Any) -> torch.Tensor:
        tried.append(("batch", self.state.step, tuple(batch.mean_BCHW.shape)))
        if batch.mean_BCHW[:, 0].numel() > 120:  # two of 64 x 64; two of 88 x 40 are 110
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return original(self, epoch, batch)

    def save(path: Path, image_3HW: torch.Tensor, text: dict[str, str]) -> None:
        tried.append(("preview", int(text["parameters"].rsplit(" ", 1)[1]), tuple(image_3HW.shape)))
        raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    monkeypatch.setattr(Trainer, "loss", loss)
    monkeypatch.setattr(previews, "save_picture", save)
    config = config_for(
        dataset={"path": str(tmp_path / "pictures"), "batch_size": 2},
        preview={"prompts": ("a --w 32 --h 32 --s 4", "b --w 64 --h 32 --s 4"), "at_start": False},
        validation={"enabled": True, "split": 0.0, "bands": 2},
        memory={"probe": "true"},
        optimizer={"te1_lr": 0.0, "te2_lr": 0.0},
        run={"max_train_steps": 1},
    )
    result, recorder = train(config)
    assert result.status == "finished"
    first = tried.index(("preview", 0, (3, 32, 64)))  # the largest; before it the audit looked at the loss
    largest = tried[first + 1 : first + 4]
    assert [shape[0] for _, step, shape in largest if step == 0] == [2, 1, 1], "the largest batch, then cut in two"
    assert {shape[-2:] for _, _, shape in largest} == {(8, 8)}
    kinds = [wire["type"] for wire in recorder.events]
    first = kinds.index("StepFinished")
    assert kinds.index("ValidationFinished") < kinds.index("Intervention") < first
    warned = [data["message"] for data in recorder.of("Warned") if data["topic"] == "preview"]
    assert warned[0].startswith("A preview of 64 x 32 was tried before the first step: There was not enough memory")
    facts = json.loads((result.run_dir / "memory.json").read_text(encoding="utf-8"))
    assert facts["largest"] == {"pictures": 2, "width": 64, "height": 64}
    assert facts["counted"]["bytes"] > 0
    page = (result.run_dir / "report.html").read_text(encoding="utf-8")
    assert "The largest batch has 2 pictures of 64 x 64." in page
    assert "136 layers" in page
    assert "activations of one forward (counted)" in page
    sentence = memory_sentence(read_run(result.run_dir))
    assert re.fullmatch(r"Memory: base model 10\.1 MB, VAE .*, adapter, .* together \d+(\.\d)? MB\.", sentence)


def test_kind_autograd_gradient_checkpointing_changes_nothing(config_for: Callable[..., TrainConfig]) -> None:
    """B55: same losses and weights with recomputation on and off, with adapter dropout on."""
    dropout = {"dropout": 0.2, "rank_dropout": 0.2, "module_dropout": 0.1}
    plain, one = train(config_for("a", lora=dropout))
    saved, two = train(config_for("b", lora=dropout, precision={"gradient_checkpointing": True}))
    assert one.losses == pytest.approx(two.losses, rel=1e-6)
    first, second = load_file(plain.lora), load_file(saved.lora)
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], rtol=1e-4, atol=1e-6)


def test_kind_autograd_inside_inference_mode(config_for: Callable[..., TrainConfig]) -> None:
    """B57: a host that runs its nodes in inference mode gets the same result."""
    outside, _ = train(config_for("a", run={"max_train_steps": 2}))
    with torch.inference_mode():
        inside, _ = train(config_for("b", run={"max_train_steps": 2}))
    assert inside.status == "finished", inside.message
    assert body_hash(outside.lora) == body_hash(inside.lora)
