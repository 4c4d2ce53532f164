"""Runs for the panel's tests, written through the real folder and record, without training."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from trainer_core.events import (
    CheckpointSaved,
    Event,
    EventBus,
    LoraSaved,
    PhaseChanged,
    PreviewReady,
    RunFinished,
    RunStarted,
    StepFinished,
    StepRejected,
    ValidationFinished,
    Warned,
)
from trainer_core.runs.database import RunDatabase
from trainer_core.runs.folder import RunFolder


def step(number: int, loss: float = 0.5) -> StepFinished:
    return StepFinished(
        step=number, applied=number, epoch=0, loss=loss, loss_avg=loss, grad_norm=1.5, lr={"unet": 1e-4, "te1": 5e-5},
        loss_scale=1.0, rejected_steps=0, samples_per_second=2.0, seconds=0.5, eta_seconds=3.0, vram_gib=0.25,
    )  # fmt: skip


def rejected(number: int) -> StepRejected:
    return StepRejected(
        step=number, applied=number - 1, epoch=0, reason="the loss is not a number", loss=float("nan"),
        grad_norm=float("nan"), loss_scale=1.0, rejected_steps=1, in_a_row=1, culprits=("unet.mid",),
        samples=("a.png",),
    )  # fmt: skip


def make_run(output: Path, *more: Event, run_id: str = "20261129T171500Z-1a2b", steps: int = 10) -> RunFolder:
    """A run of `steps` steps, the fifth rejected, with validation, a preview, a checkpoint; then `more` events."""
    folder = RunFolder.create(output, run_id)
    folder.write_config({"run_id": run_id, "config": {"run": {"output_name": "cat"}}, "config_hash": "h"})
    picture = folder.previews / "step-00000010-0.png"
    Image.new("RGB", (16, 16), (200, 30, 30)).save(picture)
    (folder.checkpoints / "weights.bin").write_bytes(b"x" * 1000)
    events: list[Event] = [
        RunStarted(total_steps=20, parts=("unet", "te1"), device="cpu", precision="fp32", pictures=4, config_hash="h"),
        PhaseChanged(phase="training", total=20),
        ValidationFinished(validation_loss=0.4, bands=(0.3, 0.5), pictures=2, seconds=1.0),
    ]
    events += [rejected(number) if number == 5 else step(number, 1.0 / number) for number in range(1, steps + 1)]
    events += [
        PreviewReady(step=10, file=f"previews/{picture.name}", prompt="a <b>cat</b>", index=0, seed=7),
        CheckpointSaved(step=10, name="step-00000010", bytes=1000, seconds=0.1),
        LoraSaved(step=10, file="/home/somebody/secret/cat.safetensors", bytes=5, proof="loads"),
        Warned(step=10, topic="save", message=f"{folder.path / 'lora' / 'cat.safetensors'} could not be written"),
        *more,
    ]
    bus = EventBus(run_id)
    with RunDatabase(folder.database_path) as database:
        bus.subscribe(database)
        for event in events:
            bus.emit(event)
        database.add_health(8, [("unet.down", {"norm": 0.4, "verdict": "healthy"}), ("te1", {"norm": 0.0})])
        database.add_health(10, [("unet.down", {"norm": 0.5, "verdict": "healthy"})])
    return folder


def finished(number: int = 10) -> RunFinished:
    return RunFinished(
        step=number, status="finished", message="done", applied=9, rejected=1, lora="/home/somebody/cat.safetensors"
    )
