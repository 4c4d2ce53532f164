"""Wrong files and missing devices are refused with the other problems, before a run folder exists."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_setup import small_config
from safetensors.torch import save_file

from trainer_core.build import create_run
from trainer_core.config import TrainConfig
from trainer_core.errors import ConfigError


def refused(config: TrainConfig) -> dict[str, str]:
    """Fields and texts of the refusal; the output folder stays as it was."""
    output = Path(config.run.output_dir)
    with pytest.raises(ConfigError) as error:
        create_run(config)
    assert not (output / "safe_scaler").exists()
    return {problem.field: str(problem) for problem in error.value.problems}


def test_every_wrong_file_and_a_wrong_number_in_one_message(tmp_path: Path, pictures: Path, micro_model: Path) -> None:
    lora = tmp_path / "lora.safetensors"
    save_file({"lora_unet_mid.lora_down.weight": torch.zeros(4, 8)}, lora)
    lora.write_bytes(lora.read_bytes()[:-8])
    vae = tmp_path / "vae.safetensors"
    save_file({"model.diffusion_model.joint_blocks.0.context_block.attn.qkv.weight": torch.zeros(4)}, vae)
    config = small_config(
        micro_model,
        pictures,
        tmp_path / "out",
        lora={"weights": str(lora)},
        run={"device": "cuda:77", "max_train_steps": -3},
    )
    found = refused(replace(config, model=replace(config.model, vae=str(vae))))
    assert set(found) == {"model.vae", "lora.weights", "run.device", "run.max_train_steps"}
    assert "cut off" in found["lora.weights"] or "truncated" in found["lora.weights"]


def test_a_wrong_base_model_is_named(tmp_path: Path, pictures: Path) -> None:
    model = tmp_path / "model.safetensors"
    save_file({"double_blocks.0.img_attn.qkv.weight": torch.zeros(4)}, model)
    found = refused(small_config(model, pictures, tmp_path / "out"))
    assert set(found) == {"model.path"}
    assert "Flux" in found["model.path"]


def test_a_model_without_vae_asks_for_one(tmp_path: Path, pictures: Path, micro_model: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(micro_model, model)
    shutil.rmtree(model / "vae")
    found = refused(small_config(model, pictures, tmp_path / "out"))
    assert set(found) == {"model.vae"}
    assert "no VAE" in found["model.vae"]


def test_a_loss_weight_that_the_model_cannot_use(tmp_path: Path, pictures: Path, micro_model: Path) -> None:
    config = small_config(
        micro_model, pictures, tmp_path / "out", objective={"scale_v_pred_loss_like_noise_pred": True}
    )
    assert set(refused(config)) == {"objective.scale_v_pred_loss_like_noise_pred"}
