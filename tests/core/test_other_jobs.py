"""The worker's other jobs: pictures of LoRA files, and where adapters would sit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from run_setup import Recorder, small_config

from trainer_core import coverage_job, preview_job
from trainer_core.build import create_run, run
from trainer_core.config_io import with_settings
from trainer_core.errors import AdapterError, ConfigError, TrainerError
from trainer_core.preview_job import Cell, create_preview_job, picture_of
from trainer_core.resume_choices import lora_files
from trainer_core.runs.protocol import Command, Commands


@pytest.fixture(scope="module")
def trained(micro_model: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two steps at a high rate, so that the LoRA can be seen."""
    config = small_config(
        micro_model, pictures, tmp_path_factory.mktemp("out"), run={"max_train_steps": 2, "output_name": "two"},
        optimizer={"learning_rate": 0.5}, checkpoint={"lora_every_steps": 1},
    )  # fmt: skip
    folder = create_run(config, lora_dir=config_folder(config) / "loras", lora_stem="other")
    result = run(folder.path)
    assert result.status == "finished", result.message
    return folder, result


def config_folder(config: Any) -> Path:
    return Path(config.run.output_dir)


def prompts(model: Path, *lines: str) -> Any:
    return with_settings(
        small_config(model, model, model), {"preview.prompts": lines, "preview.steps": 1, "preview.guidance": 1.0}
    )


def pixels(file: Path) -> bytes:
    return Image.open(file).tobytes()


def test_the_final_lora_goes_where_a_host_wants_it(trained: Any) -> None:
    folder, result = trained
    assert result.lora == folder.output_dir / "loras" / "other.safetensors"
    assert list(lora_files(folder)) == [1, 2]
    assert lora_files(folder)[2] == result.lora
    assert lora_files(folder)[1].parent == folder.loras


def test_a_grid_of_strengths(trained: Any, micro_model: Path, tmp_path: Path) -> None:
    _, result = trained
    lora = str(result.lora)
    cells = [Cell(None, 0.0, "base"), Cell(lora, 0.0, "none"), Cell(lora, 1.0, "whole")]
    job = create_preview_job(tmp_path / "job", prompts(micro_model, "a red heart", "a blue star --d 5"), cells)
    seen = Recorder()
    preview_job.run(job.path, sink=seen)
    assert seen.of("RunFinished")[0]["status"] == "finished"
    assert len(seen.of("PreviewReady")) == 6
    base, none, whole = (pixels(picture_of(job, cell, 0)) for cell in range(3))
    assert base == none  # at strength 0 a LoRA is not there
    assert base != whole
    assert pixels(picture_of(job, 0, 0)) != pixels(picture_of(job, 0, 1))


def test_a_stopped_grid_says_so(trained: Any, micro_model: Path, tmp_path: Path) -> None:
    job = create_preview_job(tmp_path / "job", prompts(micro_model, "a red heart"), [Cell(None, 0.0, "base")])
    commands = Commands()
    commands.add(Command("1", "stop"))
    seen = Recorder()
    preview_job.run(job.path, commands=commands, sink=seen)
    assert seen.of("RunFinished")[0]["status"] == "stopped"
    with pytest.raises(TrainerError, match="was not made"):
        picture_of(job, 0, 0)


def test_a_file_that_is_no_lora_is_refused(micro_model: Path, tmp_path: Path) -> None:
    (tmp_path / "no.safetensors").write_bytes(b"nothing")
    cells = [Cell(str(tmp_path / "no.safetensors"), 1.0, "x")]
    job = create_preview_job(tmp_path / "job", prompts(micro_model, "a red heart"), cells)
    with pytest.raises(AdapterError, match="no.safetensors"):
        preview_job.run(job.path)


def test_a_bad_prompt_is_refused_before_the_worker_starts(micro_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--q"):
        create_preview_job(tmp_path / "job", prompts(micro_model, "a red heart --q 3"), [Cell(None, 0.0, "base")])
    assert not (tmp_path / "job").exists()


def test_coverage_is_known_from_the_header_alone(micro_model: Path, tmp_path: Path) -> None:
    config = small_config(micro_model, micro_model, tmp_path, lora={"rank": 2, "conv_rank": 2})
    job = coverage_job.create_coverage_job(tmp_path / "job", config)
    seen = Recorder()
    coverage_job.run(job.path, sink=seen)
    found = coverage_job.read_coverage(job)
    adapters = sum(block["adapters"] for block in found["blocks"])
    assert seen.of("RunFinished")[0]["message"] == f"{adapters} adapters."
    assert adapters > 200
    assert "MID" in found["text"]
    with Image.open(job.path / coverage_job.PNG_NAME) as picture:
        assert picture.width > 800


def test_parts_that_are_off_get_no_boxes(micro_model: Path, tmp_path: Path) -> None:
    def height(**rates: Any) -> int:
        config = small_config(micro_model, micro_model, tmp_path, optimizer={"learning_rate": 1e-3, **rates})
        name = "-".join(f"{rate}" for rate in rates.values())
        job = coverage_job.create_coverage_job(tmp_path / f"job-{name}", config)
        coverage_job.run(job.path)
        with Image.open(job.path / coverage_job.PNG_NAME) as picture:
            return picture.height

    assert height(te1_lr=0.0, te2_lr=0.0) < height(te1_lr=1e-4, te2_lr=1e-4)
