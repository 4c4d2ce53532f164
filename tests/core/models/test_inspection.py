"""A wrong file is named for what it is, from its header alone."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer_core.errors import ModelFileError
from trainer_core.models import SDXLModel, inspect_model, load_sdxl
from trainer_core.models.configs import SHIPPED

from . import full_size

UNET = "model.diffusion_model."
Shapes = dict[str, tuple[int, ...]]


def unet(channels: int = 4, context: int = 2048) -> Shapes:
    return {
        f"{UNET}input_blocks.0.0.weight": (1, channels, 3, 3),
        f"{UNET}input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight": (1, context),
        f"{UNET}label_emb.0.0.weight": (1, 2816),
    }


SDXL_TEXT: Shapes = {
    "conditioner.embedders.0.transformer.text_model.final_layer_norm.weight": (768,),
    "conditioner.embedders.1.model.ln_final.weight": (1280,),
}
WRONG: dict[str, tuple[Shapes, str]] = {
    "sd1": (
        {**unet(context=768), "cond_stage_model.transformer.text_model.final_layer_norm.weight": (1,)},
        "Stable Diffusion 1.x",
    ),
    "sd1_inpainting": (
        {**unet(9, 768), "cond_stage_model.transformer.text_model.final_layer_norm.weight": (1,)},
        "Stable Diffusion 1.x inpainting",
    ),
    "sd2": ({**unet(context=1024), "cond_stage_model.model.ln_final.weight": (1,)}, "Stable Diffusion 2.x"),
    "refiner": ({**unet(context=1280), "conditioner.embedders.0.model.ln_final.weight": (1,)}, "SDXL refiner"),
    "inpainting": ({**unet(9), **SDXL_TEXT}, "SDXL inpainting checkpoint"),
    "edit": ({**unet(8), **SDXL_TEXT}, "8 input channels"),
    "cosxl": ({**unet(), **SDXL_TEXT, "edm_vpred.sigma_max": (1,)}, "CosXL"),
    "unet_only": (unet(), "only the UNet of an SDXL model"),
    "flux": ({"double_blocks.0.img_attn.qkv.weight": (1,)}, "Flux"),
    "flux_prefixed": ({f"{UNET}double_blocks.0.img_attn.qkv.weight": (1,)}, "Flux"),
    "sd3": ({f"{UNET}joint_blocks.0.x_block.attn.qkv.weight": (1,)}, "Stable Diffusion 3"),
    "lora": ({"lora_unet_input_blocks_4_1_proj_in.lora_down.weight": (1, 1)}, "a LoRA"),
    "peft_lora": ({"unet.down_blocks.1.attentions.0.proj_in.lora_A.weight": (1, 1)}, "a LoRA"),
    "lokr": ({"lora_unet_x.lokr_w1": (1, 1)}, "a LoRA"),
    "vae_ldm": ({"decoder.conv_in.weight": (1,), "decoder.up.0.block.0.conv1.weight": (1,)}, "a VAE only"),
    "vae_prefixed": (
        {"first_stage_model.decoder.conv_in.weight": (1,), "first_stage_model.decoder.up.0.block.0.conv1.weight": (1,)},
        "a VAE only",
    ),
    "vae_part_of_prefixed": ({"first_stage_model.encoder.conv_in.weight": (1,)}, "a VAE only"),
    "vae_diffusers": (
        {"decoder.conv_in.weight": (1,), "decoder.up_blocks.0.resnets.0.conv1.weight": (1,)},
        "a VAE only",
    ),
    "diffusers_unet": (
        {"conv_in.weight": (1,), "down_blocks.0.resnets.0.conv1.weight": (1,)},
        r"one part \(the UNet\)",
    ),
    "controlnet": ({"control_model.input_blocks.0.0.weight": (1,)}, "ControlNet"),
    "embedding": ({"clip_l": (1, 768), "clip_g": (1, 1280)}, "textual inversion"),
    "text_encoder": ({"text_model.final_layer_norm.weight": (1,)}, "a text encoder"),
    "unknown": ({"something.else": (1,)}, "no model known here .*something.else"),
    "empty_table": ({}, "without any tensor"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_other_families_are_named(kind: str, tmp_path: Path) -> None:
    shapes, what = WRONG[kind]
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}, path)
    for read in (inspect_model, load_sdxl):
        with pytest.raises(ModelFileError, match=what) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert caught.value.path == path


FOREIGN: dict[str, tuple[str, bytes, str]] = {
    "zero_bytes": ("m.safetensors", b"", r"empty \(0 bytes\)"),
    "zero_bytes_ckpt": ("m.ckpt", b"", r"empty \(0 bytes\)"),
    "zip_pickle": ("m.ckpt", b"PK\x03\x04" + b"\0" * 600, "PyTorch pickle file.*Convert it once"),
    "renamed_pickle": (
        "m.safetensors",
        b"PK\x03\x04" + b"\0" * 26 + b"archive/data.pkl" + b"\0" * 600,
        "PyTorch pickle",
    ),
    "legacy_pickle": ("m.ckpt", pickle.dumps({"state_dict": list(range(300))}), "pickle file.*torch.load"),
    "bin": ("m.bin", b"\x00" * 100, "ending of a pickle"),
    "zip": ("m.safetensors", b"PK\x03\x04" + b"\0" * 600, "zip archive"),
    "html": ("m.safetensors", b"<!DOCTYPE html><html>login</html>", "web page"),
    "lfs": ("m.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n", "Git LFS pointer"),
    "gguf": ("m.gguf", b"GGUF" + b"\0" * 50, "GGUF"),
    "picture": ("m.safetensors", b"\x89PNG\r\n\x1a\n" + b"\0" * 50, "picture"),
    "json": ("m.json", b'{"a": 1, "b": 2}', r"text file \(JSON\)"),
    "noise": ("m.safetensors", b"\x01\x02\x03\x04" * 40, "not a safetensors file"),
    "few_bytes": ("m.safetensors", b"abc", "not a safetensors file"),
    "huge_header": ("m.safetensors", (10**15).to_bytes(8, "little") + b'{"a":', "incomplete"),
    "broken_header": ("m.safetensors", (20).to_bytes(8, "little") + b'{"a": [1, 2, }      ', "header is not readable"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_files_that_are_no_safetensors_are_named(kind: str, tmp_path: Path) -> None:
    name, content, what = FOREIGN[kind]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=what):
        inspect_model(path)


def test_header_length_that_looks_like_a_pickle_is_still_safetensors(tmp_path: Path) -> None:
    """A header of 640 bytes begins with 80 02, as protocol-2 pickles do."""
    text = json.dumps({"x": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}).encode().ljust(640)
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0\0")
    with pytest.raises(ModelFileError, match="no model known here"):
        inspect_model(path)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_truncated_file_is_called_cut_off(toy_file: Path, tmp_path: Path, share: float) -> None:
    content = toy_file.read_bytes()
    path = tmp_path / "cut.safetensors"
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelFileError, match="cut off|incomplete"):
        inspect_model(path)


def test_file_with_extra_bytes_is_called_damaged(toy_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.safetensors"
    path.write_bytes(toy_file.read_bytes() + b"\0" * 8)
    with pytest.raises(ModelFileError, match="damaged.*only"):
        inspect_model(path)


def test_header_with_wrong_offsets_is_called_damaged(tmp_path: Path) -> None:
    text = json.dumps({"x": {"dtype": "F16", "shape": [4], "data_offsets": [0, 6]}}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 6)
    with pytest.raises(ModelFileError, match="'x' takes 6 bytes instead of 8"):
        inspect_model(path)


def test_missing_path_says_where_it_looked() -> None:
    with pytest.raises(ModelFileError, match="There is no file 'nowhere.safetensors'.*looked for from"):
        inspect_model("nowhere.safetensors")


def test_hub_name_is_told_from_a_path() -> None:
    with pytest.raises(ModelFileError, match="Hugging Face Hub: download it first"):
        inspect_model("stabilityai/stable-diffusion-xl-base-1.0")


def test_unreadable_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "x")

    monkeypatch.setattr(Path, "is_file", refuse)
    for read in (inspect_model, lambda path: load_sdxl("toy", vae=path)):
        with pytest.raises(ModelFileError, match="permission denied"):
            read(tmp_path)


def test_no_read_permission_is_said(toy_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: tests often run as root, who may read everything."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ModelFileError, match="permission denied.*read permission"):
        inspect_model(toy_file)


def _toy_folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SHIPPED["toy"], tmp_path / "toy"))


def _edit_json(path: Path, **values: object) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**found, **values}), encoding="utf-8")


def _sd1(folder: Path) -> None:
    _edit_json(folder / "model_index.json", _class_name="StableDiffusionPipeline")


def _flux(folder: Path) -> None:
    _edit_json(folder / "model_index.json", _class_name="FluxPipeline")


def _no_index(folder: Path) -> None:
    (folder / "model_index.json").unlink()
    (folder / "some.safetensors").write_bytes(b"x")


def _inpainting(folder: Path) -> None:
    _edit_json(folder / "unet" / "config.json", in_channels=9)


def _refiner(folder: Path) -> None:
    shutil.rmtree(folder / "text_encoder")


def _no_unet(folder: Path) -> None:
    shutil.rmtree(folder / "unet")


def _pickle_weights(folder: Path) -> None:
    (folder / "unet" / "diffusion_pytorch_model.safetensors").rename(folder / "unet" / "diffusion_pytorch_model.bin")


def _no_weights(folder: Path) -> None:
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()


def _bad_config(folder: Path) -> None:
    (folder / "unet" / "config.json").write_text("{", encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (_sd1, "Stable Diffusion 1.x or 2.x"),
        (_flux, "folder of Flux"),
        (_no_index, "no model_index.json in it. It holds some.safetensors"),
        (_inpainting, "inpainting"),
        (_refiner, "refiner"),
        (_no_unet, "'unet/config.json' is missing"),
        (_pickle_weights, r"pickle file \(.bin\) only"),
        (_no_weights, "'diffusion_pytorch_model.safetensors' is missing"),
        (_bad_config, "cannot be read"),
    ],
)
def test_wrong_folders_are_named(damage: Callable[[Path], None], what: str, tmp_path: Path) -> None:
    folder = _toy_folder(tmp_path)
    damage(folder)
    with pytest.raises(ModelFileError, match=what):
        inspect_model(folder)


def test_toy_facts(toy: SDXLModel) -> None:
    info = inspect_model("toy")
    assert (info.kind, info.family, info.native_size, info.prediction_type) == ("folder", "sdxl", 64, "epsilon")
    assert info.parameters["unet"] == sum(tensor.numel() for tensor in toy.unet.parameters())
    assert info.has_vae
    assert not info.zero_terminal_snr
    assert json.loads(json.dumps(info.to_json()))["family"] == "sdxl"


@pytest.mark.skipif(sys.platform == "win32", reason="needs sparse files")
def test_full_size_header_is_complete_and_read_without_reading_weights(tmp_path: Path) -> None:
    """Every key of a 6.9 GB checkpoint is placed; the file is sparse and takes a few hundred kB."""
    parts = full_size.modules()
    shapes = full_size.sgm_shapes(parts)
    shapes["conditioner.embedders.1.model.logit_scale"] = ()
    shapes["model_ema.decay"] = ()
    path = full_size.write_header_only(tmp_path / "sdxl.safetensors", shapes)
    info = inspect_model(path)
    assert info.parameters == {"unet": 2_567_463_684, "te1": 123_060_480, "te2": 694_659_840, "vae": 83_653_863}
    assert info.native_size == 1024
    assert info.has_ema
    assert set(info.config_origins.values()) == {"shipped config 'sdxl'"}
    assert info.size_bytes > 6.9e9
    assert path.stat().st_blocks * 512 < 10_000_000
