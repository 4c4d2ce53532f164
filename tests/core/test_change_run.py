"""Settings that are changed in a run for its next start."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from run_setup import small_config

from trainer_core.config import TrainConfig
from trainer_core.config_io import to_dict, with_settings
from trainer_core.prepare import change_run, create_run
from trainer_core.runs.folder import RunFolder
from trainer_core.runs.registry import config_hash, newest_with_hash


@pytest.fixture
def config(micro_model: Path, pictures: Path, tmp_path: Path) -> TrainConfig:
    return small_config(micro_model, pictures, tmp_path / "out")


def change(folder: RunFolder, **settings: object) -> dict[str, object]:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    change_run(folder.path, partial(with_settings, settings=named))
    return folder.read_config()


def test_a_changed_run_is_found_by_the_new_request_only(config: TrainConfig) -> None:
    """A graph of 4 steps that is queued again must not be given the run that was changed to 9."""
    folder = create_run(config)
    found = partial(newest_with_hash, Path(config.run.output_dir))
    old, new = (config_hash(to_dict(one)) for one in (config, with_settings(config, {"run.max_train_steps": 9})))
    change(folder)
    assert found(old) is not None, "nothing has changed"
    change(folder, run__max_train_steps=9)
    assert found(old) is None
    assert found(new) is not None


def test_a_changed_output_name_is_the_results(config: TrainConfig, tmp_path: Path) -> None:
    out = tmp_path / "out"
    folder = create_run(config)
    (out / "taken.safetensors").write_bytes(b"somebody's")
    stored = change(folder, run__output_name="taken")
    assert stored["final_lora"] == str(out / "taken-2.safetensors")
    assert not (out / ".test.safetensors.reserved").exists(), "the old name is free again"
    assert (out / ".taken-2.safetensors.reserved").exists()


def test_a_changed_output_folder_is_the_results(config: TrainConfig, tmp_path: Path) -> None:
    folder = create_run(config)
    stored = change(folder, run__output_dir=str(tmp_path / "elsewhere"))
    assert stored["final_lora"] == str(tmp_path / "elsewhere" / "test.safetensors")


def test_results_in_a_folder_of_the_host_stay_there(config: TrainConfig, tmp_path: Path) -> None:
    """ComfyUI: the LoRAs lie in its own folder, wherever its runs lie."""
    folder = create_run(config, lora_dir=tmp_path / "loras", lora_stem="test-2")
    stored = change(folder, run__output_dir=str(tmp_path / "elsewhere"))
    assert stored["final_lora"] == str(tmp_path / "loras" / "test-2.safetensors")
    stored = change(folder, run__output_name="other")
    assert stored["final_lora"] == str(tmp_path / "loras" / "other.safetensors")
