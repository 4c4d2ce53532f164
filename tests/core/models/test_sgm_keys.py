"""Name maps between SGM and diffusers, on the real SDXL sizes (meta device)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer_core.models import sgm_keys

from . import full_size

KNOWN = {
    "conv_in": "input_blocks.0.0",
    "down_blocks.0.resnets.1.conv2": "input_blocks.2.0.out_layers.3",
    "down_blocks.0.downsamplers.0.conv": "input_blocks.3.0.op",
    "down_blocks.1.attentions.0.proj_in": "input_blocks.4.1.proj_in",
    "down_blocks.2.attentions.1.transformer_blocks.9.ff.net.2": "input_blocks.8.1.transformer_blocks.9.ff.net.2",
    "mid_block.attentions.0.proj_out": "middle_block.1.proj_out",
    "mid_block.resnets.1.time_emb_proj": "middle_block.2.emb_layers.1",
    "up_blocks.0.attentions.2.norm": "output_blocks.2.1.norm",
    "up_blocks.0.upsamplers.0.conv": "output_blocks.2.2.conv",
    "up_blocks.2.resnets.0.conv_shortcut": "output_blocks.6.0.skip_connection",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
}


@pytest.fixture(scope="module")
def parts() -> dict[str, nn.Module]:
    return full_size.modules()


@pytest.mark.parametrize(("diffusers_name", "sgm_name"), KNOWN.items())
def test_known_unet_names(diffusers_name: str, sgm_name: str) -> None:
    for ending in ("", ".weight", ".bias"):
        assert sgm_keys.unet_diffusers_to_sgm(diffusers_name + ending) == sgm_name + ending
        assert sgm_keys.unet_sgm_to_diffusers(sgm_name + ending) == diffusers_name + ending


def test_every_unet_parameter_maps_there_and_back(parts: dict[str, nn.Module]) -> None:
    names = list(parts["unet"].state_dict())
    mapped = [sgm_keys.unet_diffusers_to_sgm(name) for name in names]
    assert None not in mapped
    assert len(set(mapped)) == len(names) == 1680
    assert [sgm_keys.unet_sgm_to_diffusers(name) for name in mapped if name] == names


def test_lora_names_of_linear_and_1x1_layers_equal_the_fixture(parts: dict[str, nn.Module], fixtures: Path) -> None:
    """The names file was made by sd-scripts' own network on its own SGM UNet: an oracle for the map."""
    wanted = {name for name in _all_names(fixtures / "sdxl_lora_names_linear.json") if name.startswith("lora_unet_")}
    ours = set()
    for path, module in parts["unet"].named_modules():
        inside = ".attentions." in path or path.startswith("mid_block.attentions")
        if isinstance(module, nn.Linear) and inside:
            ours.add("lora_unet_" + str(sgm_keys.unet_diffusers_to_sgm(path)).replace(".", "_"))
    assert ours == wanted
    assert len(wanted) == 722


def _all_names(path: Path) -> list[str]:
    found = json.loads(path.read_text(encoding="utf-8"))
    values = found if isinstance(found, list) else [name for group in found.values() for name in group]
    return [str(name) for name in values]


def test_every_vae_parameter_maps_there_and_back(parts: dict[str, nn.Module]) -> None:
    names = list(parts["vae"].state_dict())
    mapped = [sgm_keys.vae_diffusers_to_ldm(name) for name in names]
    assert None not in mapped
    assert len(set(mapped)) == len(names) == 248
    assert [sgm_keys.vae_ldm_to_diffusers(name) for name in mapped if name] == names
    assert (
        sgm_keys.vae_ldm_to_diffusers("decoder.up.0.block.1.conv1.weight")
        == "decoder.up_blocks.3.resnets.1.conv1.weight"
    )
    assert (
        sgm_keys.vae_ldm_to_diffusers("encoder.mid.attn_1.proj_out.bias")
        == "encoder.mid_block.attentions.0.to_out.0.bias"
    )


def test_every_text_encoder_2_parameter_maps_there_and_back(parts: dict[str, nn.Module]) -> None:
    names = [sgm_keys.bare_text_name(name) for name in parts["te2"].state_dict()]
    back: set[str] = set()
    for name in names:
        mapped = sgm_keys.te2_bare_to_open_clip(name)
        assert mapped is not None, name
        back |= set(sgm_keys.te2_open_clip_to_bare(mapped[0]))
    assert back == set(names)


@pytest.mark.parametrize(
    "name", ["input_blocks.9.0.in_layers.0.weight", "output_blocks.0.3.x", "time_embed.1", "foo", ""]
)
def test_unknown_unet_names_have_no_counterpart(name: str) -> None:
    assert sgm_keys.unet_sgm_to_diffusers(name) is None


def test_parameter_counts_are_sdxls(parts: dict[str, nn.Module]) -> None:
    counts = {part: sum(tensor.numel() for tensor in module.parameters()) for part, module in parts.items()}
    assert counts == {"unet": 2_567_463_684, "te1": 123_060_480, "te2": 694_659_840, "vae": 83_653_863}
    assert all(tensor.device == torch.device("meta") for module in parts.values() for tensor in module.parameters())
