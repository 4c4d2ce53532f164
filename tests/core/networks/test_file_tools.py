"""Converting, resizing, merging and extracting LoRA files: what is written computes what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from network_cases import full_network, randomise

from trainer_core import cli
from trainer_core.errors import AdapterError
from trainer_core.models import SDXLModel
from trainer_core.networks import LoraFile, load_lora, save_lora
from trainer_core.networks.file_tools import ALL_FORMATS, resize_lora, write_as
from trainer_core.networks.foreign_files import seems_to_be


def change(file: LoraFile, name: str) -> torch.Tensor:
    up, down = file.state[f"{name}.lora_up.weight"].float(), file.state[f"{name}.lora_down.weight"].float()
    return file.scales[name] * up.flatten(1) @ down.flatten(1)


@pytest.fixture
def lora(model: SDXLModel, tmp_path: Path) -> LoraFile:
    network = randomise(full_network(model))
    state = network.state_dict()
    network.detach()
    save_lora(tmp_path / "in.safetensors", state, {"ss_output_name": "mine"}, "fp32")
    return load_lora(tmp_path / "in.safetensors")


@pytest.mark.parametrize("form", ALL_FORMATS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_format_computes_the_same(
    lora: LoraFile, model: SDXLModel, tmp_path: Path, form: str, dtype: str
) -> None:
    written = write_as(lora, tmp_path / "out.safetensors", model, form, dtype)
    assert f"{len(lora.ranks)} modules" in written.text or form == "peft"
    if form == "peft":
        assert [path.name for path in written.paths] == ["te1", "te2", "unet"]
        return
    again = load_lora(written.paths[0])
    limit = 1e-6 if dtype == "fp32" else 2e-2
    for name in lora.ranks:
        wanted = change(lora, name)
        assert (change(again, name) - wanted).norm() <= limit * wanted.norm()
    assert again.metadata["ss_output_name"] == "mine"
    second = write_as(lora, tmp_path / "out.safetensors", model, form, dtype)
    assert second.paths[0].name == "out-2.safetensors"


def test_resizing_keeps_the_scale_and_the_best_part(lora: LoraFile) -> None:
    smaller, text = resize_lora(lora, rank=2)
    assert max(smaller.ranks.values()) == 2
    assert smaller.scales == pytest.approx(lora.scales)
    name = next(name for name, rank in lora.ranks.items() if rank == 4)
    values = torch.linalg.svdvals(change(lora, name))
    lost = (change(lora, name) - change(smaller, name)).norm()
    assert float(lost) == pytest.approx(float(values[2:].square().sum().sqrt()), rel=1e-4)
    assert "largest loss" in text
    same, _ = resize_lora(lora, keep=1.0)
    assert same.ranks == lora.ranks
    for wrong in ({}, {"rank": 2, "keep": 0.5}, {"rank": 0}, {"keep": 0.0}, {"keep": 1.5}):
        with pytest.raises(AdapterError):
            resize_lora(lora, **wrong)  # type: ignore[arg-type]


def test_commands_convert_resize_merge_and_extract(
    lora: LoraFile, micro_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: object) -> Path:
        assert cli.main([*map(str, words), "--json"]) == 0
        return Path(json.loads(capsys.readouterr().out)["written"][0])

    converted = command("convert", lora.path, "--format", "comfyui", "--dtype", "fp16", "--model", micro_folder)
    assert converted.name == "in-comfyui.safetensors"
    assert load_lora(converted).dtypes == ("float16",)
    assert load_lora(converted).metadata["safe_scaler_made_by"] == "converted to comfyui, fp16"
    resized = command("resize", lora.path, "--rank", 1)
    assert set(load_lora(resized).ranks.values()) == {1}
    assert load_lora(resized).metadata["ss_network_dim"] == "1"
    merged = command(
        "merge", micro_folder, f"{lora.path}=0.5", "--output", tmp_path / "merged.safetensors", "--dtype", "fp32"
    )
    words = ("--rank", 4, "--conv-rank", 2, "--dtype", "fp32", "--output", tmp_path / "back.safetensors")
    back = load_lora(command("extract", micro_folder, merged, *words))
    assert set(back.ranks) == set(lora.ranks)
    for name in lora.ranks:
        wanted = 0.5 * change(lora, name)
        assert (change(back, name) - wanted).norm() <= 1e-3 * wanted.norm(), name


def test_commands_refuse_what_makes_no_sense(
    lora: LoraFile, micro_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["resize", str(lora.path)]) == 1
    assert "either a rank or the share" in capsys.readouterr().err
    assert cli.main(["merge", str(micro_folder), f"{lora.path}=much", "--output", str(tmp_path / "m")]) == 2
    assert "'much' is no number" in capsys.readouterr().err
    same = ["extract", str(micro_folder), str(micro_folder), "--output", str(tmp_path / "x.safetensors")]
    assert cli.main(same) == 1
    assert "do not differ" in capsys.readouterr().err
    assert not (tmp_path / "x.safetensors").exists()
    assert cli.main([*same, "--parts", "unet,te3"]) == 2
    assert "'te3' is no part" in capsys.readouterr().err


def test_inspect_explains_other_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stem = "lora_unet_input_blocks_4_1_proj_in"
    tensors = {f"{stem}.{key}": torch.ones(4, 4) for key in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")}
    tensors[f"{stem}.alpha"] = torch.tensor(2.0)
    file = tmp_path / "loha.safetensors"
    safetensors.torch.save_file(tensors, file, {"ss_output_name": "hada", "ss_network_module": "lycoris.kohya"})
    assert cli.main(["inspect", str(file)]) == 0
    text = capsys.readouterr().out
    assert "a LoHa (LyCORIS) file" in text
    assert "UNet: 1 modules, 64 weights" in text
    assert "name: hada" in text
    assert "network module: lycoris.kohya" in text
    assert "round trip (read, write again, compare): equal" in text
    assert seems_to_be(tensors) == "a LoHa (LyCORIS) file"
