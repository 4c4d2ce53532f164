"""A data set of one picture trains, and one of 100,000 does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from PIL import Image
from run_setup import Recorder, small_config, write_pictures

from trainer_core.build import start_run

MANY = 100_000


def test_kind_bucket_a_set_of_one_picture_trains(micro_model: Path, tmp_path: Path) -> None:
    """B43: batch 4, accumulation 4, a share kept for validation, 3 epochs: a step an epoch, and it is said."""
    config = small_config(
        micro_model,
        write_pictures(tmp_path / "set", 1),
        tmp_path / "out",
        dataset={"batch_size": 4},
        gradient={"accumulation": 4},
        validation={"enabled": True, "split": 0.1},
        run={"max_train_steps": None, "max_train_epochs": 3},
    )
    recorder = Recorder()
    result = start_run(config, sink=recorder)
    assert (result.status, result.step, result.applied) == ("finished", 3, 3), result.message
    assert result.lora is not None
    told = [event["message"] for event in recorder.of("Warned") if event["topic"] == "validation"]
    assert told == ["The validation loss is measured on trained pictures: 1 picture is too few to hold some out."]


def many_pictures(folder: Path, count: int) -> None:
    """Small PNG files of one colour each, no two alike, in kohya's layout: the folder's name is their caption."""
    numbered = folder / "1_small tile"
    numbered.mkdir(parents=True)
    for index in range(count):
        colour = (index % 256, index // 256 % 256, index // 65536)
        Image.new("RGB", (64, 64), colour).save(numbered / f"{index:06}.png", "PNG", compress_level=1)


@pytest.mark.slow
def test_a_set_of_100_000_pictures_trains(micro_model: Path, tmp_path: Path) -> None:
    """The second start knows the files; latents are made of the pictures that the planned steps see."""
    many_pictures(tmp_path / "set", MANY)
    time.sleep(2.5)  # files that just changed are not remembered
    seconds = []
    for name in ("one", "two"):
        config = small_config(
            micro_model,
            tmp_path / "set",
            tmp_path / name,
            dataset={"batch_size": 4, "workers": 2, "cache_dir": str(tmp_path / "cache")},
            validation={"enabled": True},
        )
        recorder = Recorder()
        start = time.monotonic()
        result = start_run(config, sink=recorder)
        assert (result.status, result.applied) == ("finished", 4), result.message
        assert recorder.of("RunStarted")[0]["pictures"] == MANY - 16
        told = " ".join(event["message"] for event in recorder.of("Warned"))
        assert "16 of 100000 pictures are held out of training" in told
        assert f"The planned 4 steps see 16 of {MANY - 16} pictures; an epoch has 24996 steps" in told
        first = next(event for event in recorder.events if event["type"] == "StepFinished")
        seconds.append((first["time"] - recorder.events[0]["time"], time.monotonic() - start))
    print(f"first start: {seconds[0][0]:.1f} s to step 1, second start: {seconds[1][0]:.1f} s")
