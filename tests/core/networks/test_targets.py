from __future__ import annotations

import gzip
import json
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
from trainer_core.models import SDXLModel
from trainer_core.networks import create_network, find_targets
from trainer_core.networks.naming import block_of_name, kohya_name, part_of_name

FIXTURES = Path(__file__).parents[2] / "fixtures"
SDXL = Path(trainer_core.__file__).parent / "assets" / "sdxl"
PARAMETERS_PER_RANK = {"unet": 2_659_840, "te1": 165_888, "te2": 737_280}


@pytest.fixture(scope="module")
def real_sdxl() -> Any:
    with torch.device("meta"):
        return SimpleNamespace(
            unet=UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(SDXL / "unet")),
            text_encoders=(
                CLIPTextModel(CLIPTextConfig.from_pretrained(SDXL / "text_encoder")),
                CLIPTextModelWithProjection(CLIPTextConfig.from_pretrained(SDXL / "text_encoder_2")),
            ),
        )


@pytest.mark.parametrize(("conv_rank", "fixture", "count"), [(0, "linear", 722), (4, "conv", 788)])
def test_names_on_real_sdxl_equal_kohyas(real_sdxl: Any, conv_rank: int, fixture: str, count: int) -> None:
    network = create_network(real_sdxl, LoraConfig(rank=1, conv_rank=conv_rank), trained_parts=ALL_PARTS, seed=0)
    wanted = json.loads((FIXTURES / f"sdxl_lora_names_{fixture}.json").read_text(encoding="utf-8"))
    ours = {part: {name for name, module in network.modules.items() if module.part == part} for part in ALL_PARTS}
    network.detach()
    assert {part: len(names) for part, names in ours.items()} == {"unet": count, "te1": 72, "te2": 192}
    assert ours["unet"] == set(wanted["unet"])
    assert ours["te1"] | ours["te2"] == set(wanted["te"])


@pytest.mark.parametrize(("conv_rank", "fixture"), [(0, "linear"), (4, "linear_conv")])
def test_shapes_on_real_sdxl_are_those_that_comfyui_takes(real_sdxl: Any, conv_rank: int, fixture: str) -> None:
    """The fixture lists keys and shapes that ComfyUI's LoRA loader matched completely (comfyui.md, section 8)."""
    network = create_network(real_sdxl, LoraConfig(rank=4, conv_rank=conv_rank), trained_parts=ALL_PARTS, seed=0)
    ours = {
        f"{name}.{key}": list(value.shape)
        for name, module in network.modules.items()
        for key, value in module.export_tensors().items()
    }
    network.detach()
    wanted = json.loads(gzip.decompress((FIXTURES / "sdxl_lora_keys_rank4.json.gz").read_bytes()))[fixture]
    assert ours == wanted


def test_parameters_per_rank_on_real_sdxl(real_sdxl: Any) -> None:
    network = create_network(real_sdxl, LoraConfig(rank=1), trained_parts=ALL_PARTS, seed=0)
    counted = {part: sum(p.numel() for p in network.parameters_of(part).values()) for part in ALL_PARTS}
    network.detach()
    assert counted == PARAMETERS_PER_RANK


def test_a_linear_network_after_a_conv_network_has_no_conv_modules(model: SDXLModel) -> None:
    """sd-scripts grows its target list in place, so its second network gets 28 modules too many (kohya.md 1.4)."""
    conv = find_targets(model.unet, "unet", conv=True)
    linear = find_targets(model.unet, "unet")
    assert len(conv) > len(linear)
    assert all("_attn" in t.name or "_ff_" in t.name or "_proj_" in t.name for t in linear)


def test_toy_names_cover_sdxls_blocks(model: SDXLModel) -> None:
    names = [target.name for target in find_targets(model.unet, "unet")]
    blocks = {block_of_name(name) for name in names}
    assert blocks == {"IN04", "IN05", "IN07", "IN08", "MID", *(f"OUT0{i}" for i in range(6))}
    assert len(names) == 192  # kohya.md 8.2, micro2


def test_text_encoder_names_do_not_depend_on_the_transformers_layout() -> None:
    flat = kohya_name("te1", "encoder.layers.0.self_attn.q_proj")
    assert flat == kohya_name("te1", "text_model.encoder.layers.0.self_attn.q_proj")
    assert flat == "lora_te1_text_model_encoder_layers_0_self_attn_q_proj"
    assert part_of_name(flat) == "te1"
    assert part_of_name("lora_te_text_model_encoder_layers_0_mlp_fc1") is None


def test_names_are_found_by_path_even_if_classes_are_renamed(model: SDXLModel) -> None:
    class ClipSomethingElse(torch.nn.Linear):
        pass

    layer = (
        model.text_encoders[0].get_submodule("encoder.layers.0.self_attn.q_proj")
        if hasattr(model.text_encoders[0], "encoder")
        else model.text_encoders[0].get_submodule("text_model.encoder.layers.0.self_attn.q_proj")
    )
    before = len(find_targets(model.text_encoders[0], "te1"))
    layer.__class__ = ClipSomethingElse
    try:
        assert len(find_targets(model.text_encoders[0], "te1")) == before == 18
    finally:
        layer.__class__ = torch.nn.Linear
