"""The sheet to share a LoRA with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer_core.config import TrainConfig
from trainer_core.config_io import to_dict, with_settings
from trainer_core.events import LoraSaved, PreviewReady, RunFinished, RunStarted, StepFinished, to_wire
from trainer_core.runs.database import RunDatabase
from trainer_core.runs.folder import RunFolder
from trainer_core.share_sheet import write_share_sheet


def sheet(tmp_path: Path, **settings: Any) -> str:
    """The sheet of a run of two steps with a preview of the prompt "a secret"."""
    folder = RunFolder.create(tmp_path, "20261129T120000Z-abcd")
    changed = {name.replace("__", "."): value for name, value in settings.items()}
    folder.write_config({"config": to_dict(with_settings(TrainConfig(), {"run.output_name": "mine", **changed}))})
    step = StepFinished(
        step=2, applied=2, epoch=0, loss=0.1, loss_avg=0.1, grad_norm=1.0, lr={"unet": 1e-4}, loss_scale=1.0,
        rejected_steps=0, samples_per_second=1.0, seconds=1.0, eta_seconds=0.0, vram_gib=0.0,
    )  # fmt: skip
    events = [
        RunStarted(total_steps=2, parts=("unet",), device="cpu", precision="fp32", pictures=7),
        step,
        PreviewReady(step=2, file="previews/a.png", prompt="a secret", index=0, seed=0),
        LoraSaved(step=2, file="/home/me/output/loras/mine.safetensors", bytes=5, proof="", final=True),
        RunFinished(step=2, status="finished", message="", applied=2, rejected=0, lora="/home/me/mine.safetensors"),
    ]
    with RunDatabase(folder.database_path) as record:
        for seq, event in enumerate(events, start=1):
            record(to_wire(event, seq=seq, run_id=folder.run_id))
    return write_share_sheet(folder.path).read_text(encoding="utf-8")


def test_it_answers_what_is_asked(tmp_path: Path) -> None:
    text = sheet(
        tmp_path, metadata__trigger_phrase="ohwx", metadata__license="CC-BY-4.0", metadata__tags="style, ink",
        model__path="/models/base.safetensors",
    )  # fmt: skip
    assert text.startswith("---\nlibrary_name: diffusers\nbase_model: stabilityai/stable-diffusion-xl-base-1.0\n")
    assert 'instance_prompt: "ohwx"' in text
    for row in ("| Trained words | ohwx |", "| File | mine.safetensors |", "| Tags | style, ink |", "| Steps | 2 |"):
        assert row in text
    assert "7 pictures, 2 steps" in text
    assert "a secret" in text


def test_no_path_of_the_machine_stands_in_it(tmp_path: Path) -> None:
    text = sheet(tmp_path, model__path="/models/base.safetensors", dataset__path="/home/me/private")
    assert "/home/me" not in text
    assert "/models" not in text


def test_minimal_says_no_prompt(tmp_path: Path) -> None:
    assert "a secret" not in sheet(tmp_path, metadata__minimal=True)


@pytest.mark.parametrize("word", ['he said "hi"', "a: b", "back\\slash"])
def test_the_header_is_one_that_yaml_readers_take(tmp_path: Path, word: str) -> None:
    yaml = pytest.importorskip("yaml")
    text = sheet(tmp_path, metadata__trigger_phrase=word, model__path="toy")
    header = yaml.safe_load(text.split("---\n")[1])
    assert header["instance_prompt"] == word
    assert "base_model" not in header  # the toy is no model anybody has
