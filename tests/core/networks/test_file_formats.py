from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline
from network_cases import full_network, outputs, randomise

from trainer_core.errors import AdapterError
from trainer_core.models import SDXLModel, load_sdxl
from trainer_core.networks import load_lora, save_lora
from trainer_core.networks.file_formats import to_format
from trainer_core.networks.peft_folder import read_peft_folder, write_peft_folder


def test_comfyui_names_read_back_as_kohyas(model: SDXLModel, tmp_path: Path) -> None:
    network = randomise(full_network(model))
    state = network.state_dict()
    network.detach()
    written = to_format(state, model, "comfyui")
    assert "diffusion_model.input_blocks.4.1.proj_in.lora_up.weight" in written
    assert "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1.alpha" in written
    path = save_lora(tmp_path / "a.safetensors", written, {}).path
    file = load_lora(path)
    assert all(torch.equal(value, state[key]) for key, value in file.state.items())
    assert file.state.keys() == state.keys()


def test_diffusers_names_load_in_diffusers(micro_folder: Path, tmp_path: Path) -> None:
    model = load_sdxl(micro_folder)
    network = randomise(full_network(model))
    wanted = outputs(model)
    state = network.state_dict()
    network.detach()
    path = save_lora(tmp_path / "pytorch_lora_weights.safetensors", to_format(state, model, "diffusers"), {}).path
    file = load_lora(path)
    assert set(file.ranks) == set(network.modules)
    assert {round(scale, 6) for scale in file.scales.values()} == {1.0}
    pipeline = StableDiffusionXLPipeline(
        vae=model.vae,
        text_encoder=model.text_encoders[0],
        text_encoder_2=model.text_encoders[1],
        tokenizer=model.tokenizers[0],
        tokenizer_2=model.tokenizers[1],
        unet=model.unet,
        scheduler=EulerDiscreteScheduler(),
        add_watermarker=False,
    )
    pipeline.load_lora_weights(str(path))
    assert (outputs(model) - wanted).norm() <= 1e-5 * wanted.norm()


def test_other_adapters_have_no_names_in_other_formats(model: SDXLModel) -> None:
    with pytest.raises(AdapterError, match="something else"):
        to_format({"lora_unet_input_blocks_4_1_proj_in.hada_w1_a": torch.ones(2, 2)}, model, "diffusers")
    with pytest.raises(AdapterError, match="no file format"):
        to_format({}, model, "onnx")


@pytest.mark.parametrize("part", ["unet", "te1", "te2"])
def test_peft_reads_our_folder_and_we_read_pefts(micro_folder: Path, tmp_path: Path, part: str) -> None:
    model = load_sdxl(micro_folder)
    network = randomise(full_network(model, conv_rank=0, targets=("OUT00 rank=2 alpha=2", "te1,te2 layer:0 rank=3")))
    network.detach()
    state = network.state_dict()
    mine = {key: value for key, value in state.items() if network.modules[key.partition(".")[0]].part == part}
    folder = write_peft_folder(tmp_path / "adapter", mine, model, part)
    again = read_peft_folder(folder, model, part)
    assert again.state.keys() == mine.keys()
    assert all(torch.equal(value, mine[key]) for key, value in again.state.items())
    for module in network.modules.values():
        if module.part == part:
            module.attach()
    wanted = outputs(model)
    network.detach()
    root = model.parts[part]
    wrapped = peft.PeftModel.from_pretrained(root, folder)
    theirs = outputs(model)
    assert (theirs - wanted).norm() <= 1e-5 * wanted.norm()
    wrapped.save_pretrained(tmp_path / "saved")
    back = read_peft_folder(tmp_path / "saved", load_sdxl(micro_folder), part)
    assert back.alphas == pytest.approx(again.alphas)
    assert all(torch.equal(value, mine[key]) for key, value in back.state.items())


def test_bad_peft_folders_are_refused(model: SDXLModel, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        read_peft_folder(tmp_path, model, "unet")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LOHA"}), encoding="utf-8")
    with pytest.raises(AdapterError, match="LOHA"):
        read_peft_folder(tmp_path, model, "unet")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 2}), encoding="utf-8")
    bad = {"base_model.model.nowhere.lora_A.weight": torch.ones(2, 2)}
    safetensors.torch.save_file(bad, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="no place in UNet"):
        read_peft_folder(tmp_path, model, "unet")
