"""What a host lets a person choose: settings as lines, recipes, runs to go on with, charts as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainer_core as facade
from trainer_core.config_lines import read_lines
from trainer_core.diagnostics.chart_pictures import chart_pictures
from trainer_core.diagnostics.report_data import read_run
from trainer_core.errors import CheckpointError
from trainer_core.events import StepFinished, StepRejected, to_wire
from trainer_core.recipes import MEMORY_SIZES, OWN, PURPOSES, memory_settings, purpose_settings
from trainer_core.resume_choices import lora_of_step, resume_differences
from trainer_core.runs.database import RunDatabase
from trainer_core.runs.folder import RunFolder
from trainer_core.runs.registry import can_go_on, list_runs, newest_with_hash


def test_lines_are_settings() -> None:
    settings, problems = read_lines(
        "# a remark\n\nlora.rank = 8\ndataset.flip = yes\nrun.output_name = 'mine'\noptimizer.eps = none\n"
        "dataset.resolution = 768,512"
    )
    assert problems == []
    assert settings == {
        "lora.rank": 8,
        "dataset.flip": True,
        "run.output_name": "mine",
        "optimizer.eps": None,
        "dataset.resolution": (768, 512),
    }


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("lora.rnk = 8", "Did you mean lora.rank?"),
        ("just words", "is no setting"),
        ("lora.rank = many", "must be a whole number"),
        ("= 3", "no such setting"),
    ],
)
def test_wrong_lines_are_told_with_their_place(line: str, told: str) -> None:
    settings, problems = read_lines(f"lora.alpha = 4\n{line}")
    assert settings == {"lora.alpha": 4.0}
    assert told in str(problems[0])


@pytest.mark.parametrize("purpose", [*PURPOSES, OWN])
@pytest.mark.parametrize("memory", [*MEMORY_SIZES, OWN])
def test_recipes_name_settings_that_exist(purpose: str, memory: str) -> None:
    names = {**purpose_settings(purpose, 30), **memory_settings(memory, 1024)}
    assert set(names) <= set(facade.FIELDS)


def test_every_late_name_of_the_facade_exists() -> None:
    for name in facade._LATER:
        assert getattr(facade, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = facade.nonsense


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with two applied steps and a rejected one, and no end."""
    found = RunFolder.create(tmp_path, "20261129T120000Z-abcd")
    found.write_config({"config": {"run": {"output_name": "x"}, "lora": {"rank": 4}}, "config_hash": "h"})
    plain: dict[str, Any] = {"epoch": 0, "loss": 0.5, "grad_norm": 1.0, "loss_scale": 1.0, "rejected_steps": 0}
    more: dict[str, Any] = {
        "loss_avg": 0.5, "lr": {"unet": 1e-4}, "samples_per_second": 1.0, "seconds": 1.0, "eta_seconds": 1.0,
        "vram_gib": 0.0,
    }  # fmt: skip
    events = [
        StepFinished(step=1, applied=1, **plain, **more),
        StepRejected(step=2, applied=1, reason="not finite", in_a_row=1, **{**plain, "loss": float("nan")}),
        StepFinished(step=3, applied=2, **{**plain, "loss": 0.25}, **more),
    ]
    with RunDatabase(found.database_path) as record:
        for seq, event in enumerate(events, start=1):
            record(to_wire(event, seq=seq, run_id=found.run_id))
    return found


def test_charts_are_drawn_without_a_browser(folder: RunFolder) -> None:
    drawn = chart_pictures(read_run(folder.path))
    assert len(drawn) >= 3  # loss, gradient norm, learning rate
    assert {picture.size for picture in drawn} == {(960, 532)}
    assert len(drawn[0].getcolors(maxcolors=100_000) or []) > 20


def test_a_run_without_steps_has_no_charts(tmp_path: Path) -> None:
    empty = RunFolder.create(tmp_path, "20261129T120000Z-abce")
    empty.write_config({"config": {}})
    with RunDatabase(empty.database_path):
        pass
    assert chart_pictures(read_run(empty.path)) == []


def test_the_newest_run_of_a_config(folder: RunFolder) -> None:
    found = newest_with_hash(folder.output_dir, "h")
    assert found is not None
    assert found.run_id == folder.run_id
    assert not can_go_on(found)  # it was interrupted, and has no checkpoint
    assert newest_with_hash(folder.output_dir, "another") is None
    assert list_runs(folder.output_dir, newest=0) == []


def test_a_step_without_a_lora_names_those_that_have_one(folder: RunFolder) -> None:
    (folder.loras / "x-step00000003.safetensors").write_bytes(b"x")
    assert lora_of_step(folder, 3).name == "x-step00000003.safetensors"
    with pytest.raises(CheckpointError, match=r"no LoRA file of step 2.*Steps with a file: 3"):
        lora_of_step(folder, 2)


def test_an_unreadable_state_is_an_error_that_names_the_checkpoint(folder: RunFolder) -> None:
    (folder.checkpoints / "step-00000003").mkdir()
    with pytest.raises(CheckpointError, match="step-00000003 of run .* cannot be read"):
        resume_differences(folder, "step-00000003", facade.TrainConfig())
