"""Small real runs for tests: the micro toy, a handful of drawn pictures, and a config that trains in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from trainer_core.build import TrainResult, start_run
from trainer_core.config import TrainConfig
from trainer_core.runs.protocol import Command, Commands


def write_pictures(folder: Path, count: int = 6, *, sizes: tuple[tuple[int, int], ...] = ((64, 64), (48, 80))) -> Path:
    """`count` toy pictures (height, width taken in turn from `sizes`) with captions."""
    from trainer_core.toy.shapes import training_picture

    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        picture = training_picture(7, index, sizes[index % len(sizes)])
        Image.fromarray(picture.pixels_HWC).save(folder / f"{index:03d}.png")
        (folder / f"{index:03d}.txt").write_text(picture.caption, encoding="utf-8")
    return folder


def small_config(model: Path, pictures: Path, output: Path, **sections: dict[str, Any]) -> TrainConfig:
    """Four steps of batch 2 on everything, validation and previews off; `sections` change fields by section."""
    defaults: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "dataset": {"path": str(pictures), "batch_size": 2, "workers": 0},
        "lora": {"rank": 4},
        "optimizer": {"learning_rate": 1e-3, "te1_lr": None, "te2_lr": None},
        "validation": {"enabled": False},
        "run": {"output_dir": str(output), "output_name": "test", "max_train_steps": 4, "seed": 11, "device": "cpu"},
    }
    config = TrainConfig()
    for name in {**defaults, **sections}:
        fields = {**defaults.get(name, {}), **sections.get(name, {})}
        config = replace(config, **{name: replace(getattr(config, name), **fields)})
    return config


class Recorder:
    """Subscriber that keeps every event; `stop_after` asks for a stop once that step was decided."""

    def __init__(self, commands: Commands | None = None, stop_after: int | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.commands = commands
        self.stop_after = stop_after

    def __call__(self, wire: dict[str, Any]) -> None:
        self.events.append(wire)
        decided = wire["type"] in ("StepFinished", "StepRejected")
        if decided and self.commands is not None and self.stop_after == wire["step"]:
            self.commands.add(Command("test", "stop"))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [wire["data"] | {"step": wire["step"]} for wire in self.events if wire["type"] == kind]

    @property
    def losses(self) -> list[float]:
        return [data["loss"] for data in self.of("StepFinished")]


def train(config: TrainConfig, stop_after: int | None = None) -> tuple[TrainResult, Recorder]:
    """A new run of `config` in this process and what it told; stopped after the step `stop_after`, else whole."""
    commands = Commands()
    recorder = Recorder(commands, stop_after)
    return start_run(config, commands=commands, sink=recorder), recorder


def light_config(model: Path, output: Path, **sections: dict[str, Any]) -> TrainConfig:
    """The attention of the UNet alone on four pictures of one shape, without the check before the first step."""
    pictures = write_pictures(output / "pictures", 4, sizes=((32, 32),))
    light: dict[str, dict[str, Any]] = {
        "lora": {"rank": 2, "preset": "attention"},
        "optimizer": {"te1_lr": 0.0, "te2_lr": 0.0},
        "health": {"audit": "off"},
    }
    return small_config(model, pictures, output, **{**light, **sections})
