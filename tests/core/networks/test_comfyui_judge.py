"""ComfyUI's own LoRA loader as judge, in its own Python: all keys of real SDXL matched, with the right shapes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from network_cases import ALL_PARTS
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

import trainer_core
from trainer_core.config import LoraConfig
from trainer_core.networks import create_network, save_lora
from trainer_core.networks.file_formats import to_format

COMFYUI = Path(os.environ.get("COMFYUI_PATH", Path.home() / "ComfyUI"))
PYTHON = Path(os.environ.get("COMFYUI_PYTHON", Path.home() / "comfy-venv" / "bin" / "python"))

pytestmark = [
    pytest.mark.skipif(not (COMFYUI / "comfy").is_dir(), reason=f"no ComfyUI at '{COMFYUI}' (COMFYUI_PATH)"),
    pytest.mark.skipif(not PYTHON.is_file(), reason=f"no Python of ComfyUI at '{PYTHON}' (COMFYUI_PYTHON)"),
]


@pytest.fixture(scope="module")
def sdxl() -> Any:
    folder = Path(trainer_core.__file__).parent / "assets" / "sdxl"
    with torch.device("meta"):
        return SimpleNamespace(
            unet=UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(folder / "unet")),
            text_encoders=(
                CLIPTextModel(CLIPTextConfig.from_pretrained(folder / "text_encoder")),
                CLIPTextModelWithProjection(CLIPTextConfig.from_pretrained(folder / "text_encoder_2")),
            ),
        )


def write(sdxl: Any, path: Path, form: str, **settings: Any) -> int:
    """A file of zeros with all names and shapes of real SDXL; returns the number of modules."""
    network = create_network(sdxl, LoraConfig(rank=1, **settings), trained_parts=ALL_PARTS, seed=0)
    state = {
        f"{name}.{key}": torch.ones(value.shape)
        for name, module in network.modules.items()
        for key, value in module.export_tensors().items()
    }
    network.detach()
    save_lora(path, to_format(state, sdxl, form), {}, "fp16")
    return len(network.modules)


def test_comfyui_matches_every_key_with_the_right_shape(sdxl: Any, tmp_path: Path) -> None:
    wanted = {
        "linear": write(sdxl, tmp_path / "linear.safetensors", "kohya"),
        "conv": write(sdxl, tmp_path / "conv.safetensors", "kohya", conv_rank=1),
        "own_names": write(sdxl, tmp_path / "own_names.safetensors", "comfyui", conv_rank=1),
        "everything": write(sdxl, tmp_path / "everything.safetensors", "kohya", targets=("time rank=1",)),
    }
    assert wanted["linear"] == 986
    assert wanted["conv"] == 1052
    judge = Path(__file__).with_name("comfyui_judge.py")
    files = [str(tmp_path / f"{name}.safetensors") for name in wanted]
    done = subprocess.run(
        [str(PYTHON), str(judge), str(COMFYUI), *files],
        capture_output=True,
        text=True,
        check=False,
        cwd=COMFYUI,
        timeout=900,
        env={**os.environ, "PYTHONPATH": ""},
    )
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"ComfyUI's Python lacks a module: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(wanted)
    for name, line in zip(wanted, lines, strict=True):
        assert line["warnings"] == [], name
        assert line["wrong_shapes"] == [], name
        assert line["patches"] == wanted[name], name
