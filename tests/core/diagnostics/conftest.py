from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from trainer_core.config import DatasetConfig, PreviewConfig, RunConfig, TrainConfig
from trainer_core.events import (
    CheckpointSaved,
    EventBus,
    LoraSaved,
    PreviewReady,
    Resumed,
    RunFinished,
    RunStarted,
    StepFinished,
    StepRejected,
    ValidationFinished,
    Verdict,
    Warned,
)
from trainer_core.runs.database import RunDatabase
from trainer_core.runs.folder import RunFolder

HOSTILE = '<script>alert("1")</script> & <img src=http://evil.example/x.png onerror=alert(2)>'


class FakeRun:
    """A run folder with a real record, written without training anything."""

    def __init__(self, output: Path, *, steps: int = 60, side: int = 64) -> None:
        self.folder = RunFolder.create(output, "20261129T120000Z-ab12")
        config = TrainConfig(
            dataset=DatasetConfig(path="C:/pictures/<heart>", batch_size=4),
            run=RunConfig(output_name="heart", max_train_steps=steps, seed=7),
            preview=PreviewConfig(prompts=("a red glorp", HOSTILE), every_steps=steps // 3),
        )
        self.folder.write_config({"run_id": self.folder.run_id, "config": asdict(config), "config_hash": "x"})
        self.steps = steps
        self.side = side
        self.database = RunDatabase(self.folder.database_path)
        self.bus = EventBus(run_id=self.folder.run_id)
        self.bus.subscribe(self.database)

    @property
    def path(self) -> Path:
        return self.folder.path

    def start(self) -> None:
        self.bus.emit(
            RunStarted(total_steps=self.steps, parts=("unet", "te1"), device="cpu", precision="fp16", pictures=24)
        )

    def train(self, rejected: tuple[int, ...] = (2, 3), falling: bool = True) -> None:
        dice = random.Random(1)
        average = 0.3
        for step in range(1, self.steps + 1):
            shape = math.exp(-step / self.steps * 1.5) if falling else 1.0
            loss = 0.28 * shape * math.exp(dice.gauss(0, 0.4))
            average = 0.95 * average + 0.05 * loss
            applied = step - sum(1 for bad in rejected if bad <= step)
            if step in rejected:
                self.bus.emit(
                    StepRejected(
                        step=step, applied=applied, epoch=0, reason="the gradient is not finite", loss=math.nan,
                        grad_norm=math.inf, loss_scale=65536.0, rejected_steps=1, in_a_row=1,
                        culprits=("lora_unet_input_blocks_4.lora_up.weight",), samples=(f"{HOSTILE}.png", "b.png"),
                    )
                )  # fmt: skip
                continue
            self.bus.emit(
                StepFinished(
                    step=step, applied=applied, epoch=step // 6, loss=loss, loss_avg=average,
                    grad_norm=math.exp(dice.gauss(-1, 0.8)), lr={"unet": 1e-4 * min(1, step / 10), "te1": 2e-5},
                    loss_scale=65536.0 / (4 if step > 3 else 1), rejected_steps=2, samples_per_second=9.0,
                    seconds=0.2, eta_seconds=1.0, vram_gib=1.234,
                )
            )  # fmt: skip

    def validate(self, means: tuple[float, ...] = (0.3, 0.2, 0.15, 0.12)) -> None:
        for index, mean in enumerate(means):
            bands = tuple(mean * factor for factor in (1.8, 1.1, 0.7, 0.4))
            step = index * self.steps // (len(means) - 1)
            self.bus.emit(ValidationFinished(step=step, validation_loss=mean, bands=bands, pictures=8, seconds=1.0))

    def preview(self) -> None:
        for step in range(0, self.steps + 1, self.steps // 3):
            for index, prompt in enumerate(("a red glorp", HOSTILE)):
                name = f"previews/step-{step:08d}-{index:02d}.png"
                picture = Image.new("RGB", (self.side, self.side), (240, 240, 236))
                grown = self.side * (step + 5) // (2 * self.steps + 10)
                middle = self.side // 2
                box = [middle - grown, middle - grown, middle + grown, middle + grown]
                ImageDraw.Draw(picture).ellipse(box, fill=((200, 40, 50), (40, 90, 200))[index])
                picture.save(self.path / name)
                self.bus.emit(PreviewReady(step=step, file=name, prompt=prompt, index=index, seed=index))

    def problems(self) -> None:
        self.bus.emit(Warned(topic="data", message=f"left out: {HOSTILE}.jpg: the file is cut off"))
        self.bus.emit(Warned(topic="settings", message="batch_size was 8, now 4"))
        self.bus.emit(Warned(step=20, topic="preview", message="There was not enough memory for preview 2 at step 20."))
        self.bus.emit(Resumed(step=20, checkpoint="step-00000020", attempt=0, passed_over=("step-00000040",)))
        self.bus.emit(Verdict(step=30, kind="dead", sentence="lora_te1 gets no gradient", severity="warn"))

    def finish(self, status: str = "finished", message: str = "Trained.", lora: bool = True) -> None:
        self.bus.emit(CheckpointSaved(step=self.steps, name=f"step-{self.steps:08d}", bytes=1000, seconds=0.1))
        if lora:
            half = self.steps // 2
            self.bus.emit(LoraSaved(step=half, file="lora/heart-step30.safetensors", bytes=900_000, proof="ok (half)"))
            self.bus.emit(
                LoraSaved(
                    step=self.steps, file="/out/heart.safetensors", bytes=1_234_567, final=True,
                    proof="986 tensors equal after reading; output within 3e-7 of the live network; 722 modules act",
                )
            )  # fmt: skip
        self.bus.emit(
            RunFinished(
                step=self.steps, status=status, message=message, applied=self.steps - 2, rejected=2, seconds=123.4,
                lora="/out/heart.safetensors" if lora else None, checkpoint=f"step-{self.steps:08d}",
            )
        )  # fmt: skip
        self.database.flush()

    def whole(self) -> FakeRun:
        self.start()
        self.preview()
        self.train()
        self.validate()
        self.problems()
        self.finish()
        return self


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., FakeRun]:
    return lambda **changes: FakeRun(tmp_path, **changes)
