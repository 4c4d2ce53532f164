from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from network_cases import ALL_PARTS, full_network
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

import trainer_core
from trainer_core.config import LoraConfig, OptimizerConfig
from trainer_core.errors import AdapterError, ConfigError
from trainer_core.models import SDXLModel
from trainer_core.networks import create_network
from trainer_core.networks.kohya_blocks import parse_block_lists
from trainer_core.networks.layer_kinds import block_index
from trainer_core.networks.selection import Selected, select_targets
from trainer_core.networks.target_presets import PRESETS
from trainer_core.optim import build_optimizer

SDXL = Path(trainer_core.__file__).parent / "assets" / "sdxl"


@pytest.fixture(scope="module")
def sdxl() -> Any:
    with torch.device("meta"):
        return SimpleNamespace(
            unet=UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(SDXL / "unet")),
            text_encoders=(
                CLIPTextModel(CLIPTextConfig.from_pretrained(SDXL / "text_encoder")),
                CLIPTextModelWithProjection(CLIPTextConfig.from_pretrained(SDXL / "text_encoder_2")),
            ),
        )


def select(model: Any, parts: tuple[str, ...] = ALL_PARTS, **settings: Any) -> list[Selected]:
    return select_targets(model, LoraConfig(**settings), parts)


def by_block(selected: list[Selected]) -> dict[str, set[int]]:
    table: dict[str, set[int]] = {}
    for one in selected:
        table.setdefault(one.place.block, set()).add(one.rank)
    return table


@pytest.mark.parametrize(
    ("preset", "unet", "text"),
    [
        ("default", 722, 264),
        ("full", 788, 264),
        ("attention", 560, 176),  # the counts LyCORIS' attn-only has (kohya.md 1.4)
        ("attention_mlp", 722, 264),
        ("style_blocks", 102, 264),
        ("subject_blocks", 204, 264),
        ("b_lora", 204, 264),
    ],
)
def test_presets_on_real_sdxl(sdxl: Any, preset: str, unet: int, text: int) -> None:
    counts = Counter(one.target.part for one in select(sdxl, preset=preset))
    assert (counts["unet"], counts["te1"] + counts["te2"]) == (unet, text)


def test_every_preset_is_a_choice_of_the_config() -> None:
    field = LoraConfig.__dataclass_fields__["preset"]
    assert set(field.metadata["choices"]) == set(PRESETS)


def test_a_part_left_empty_is_an_error(sdxl: Any) -> None:
    with pytest.raises(AdapterError, match="UNet is to be trained, but preset 'text_encoders'"):
        select(sdxl, preset="text_encoders")
    assert len(select(sdxl, ("te1", "te2"), preset="text_encoders")) == 264


def test_rules_by_part_block_kind_glob_and_regex(sdxl: Any) -> None:
    selected = select(
        sdxl,
        rank=16,
        targets=(
            "IN07-IN08 cross rank=32 alpha=8",
            "te1 lr=0.5 dropout=0.1",
            "te2 q,k layer:3 rank=2",
            "path:*mid_block.attentions* rank=0",
            r"re:up_blocks\.1\..*to_out lr=0.25",
            "block:13 ff rank=4",
            "time rank=8",
        ),
    )
    by_name = {one.target.name: one for one in selected}
    cross = [one for one in selected if one.place.block in ("IN07", "IN08") and "cross" in one.place.kinds]
    assert len(cross) == 2 * 10 * 4
    assert {(one.rank, one.alpha) for one in cross} == {(32, 8.0)}
    assert {(one.lr_factor, one.dropout) for one in selected if one.target.part == "te1"} == {(0.5, 0.1)}
    small = [one.target.name for one in selected if one.rank == 2]
    assert sorted(small) == [f"lora_te2_text_model_encoder_layers_3_self_attn_{x}_proj" for x in "kq"]
    assert not any(name.startswith("lora_unet_middle_block_1") for name in by_name)
    assert by_name["lora_unet_output_blocks_3_1_transformer_blocks_0_attn1_to_out_0"].lr_factor == 0.25
    assert by_name["lora_unet_output_blocks_0_1_transformer_blocks_0_ff_net_2"].rank == 4
    # A rule with a rank takes in layers outside the preset: time and size embeddings, and the residual blocks' share.
    assert {"lora_unet_time_embed_0", "lora_unet_label_emb_0_2"} <= by_name.keys()
    assert by_name["lora_unet_time_embed_0"].alpha == 4.0


def test_later_rules_win_and_keep_the_share_of_alpha(sdxl: Any) -> None:
    selected = select(sdxl, ("unet",), rank=16, alpha=16.0, targets=("* rank=8", "OUT00 rank=4", "OUT00 q alpha=1"))
    ranks = {one.place.block: one for one in selected if "k" in one.place.kinds}
    assert (ranks["IN04"].rank, ranks["IN04"].alpha) == (8, 8.0)
    assert (ranks["OUT00"].rank, ranks["OUT00"].alpha) == (4, 4.0)
    assert {one.alpha for one in selected if one.place.block == "OUT00" and "q" in one.place.kinds} == {1.0}


MISSES = {
    "path:*.atn2.to_k": "no layer of this model is called .* The nearest are .*attn2.to_k",
    "path:*.norm1": "cannot carry an adapter .*LayerNorm",
    "te2 rank=4": "not trained only .193 in text encoder 2; trained: (UNet, text encoder 1|text encoder 1, UNet)",
    "IN01 attention": "never hold together .*'IN01' alone holds for 3, 'attention' alone",
}


@pytest.mark.parametrize("rule", MISSES)
def test_the_four_reasons_of_no_match_have_four_messages(sdxl: Any, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select(sdxl, ("unet", "te1"), targets=(rule,))
    text = str(caught.value)
    assert "lora.targets" in text
    import re

    assert re.search(MISSES[rule], text), text
    assert sum(bool(re.search(pattern, text)) for pattern in MISSES.values()) == 1


def test_all_bad_rules_are_reported_at_once(sdxl: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        select(sdxl, targets=("atention", "IN04 rnk=3", "IN04 rank=-1", "rank=4", "re:(", "te1 rank=2"))
    assert len(caught.value.problems) == 5
    assert "Did you mean 'attention'" in caught.value.problems[0].fix
    assert "Did you mean 'rank'" in caught.value.problems[1].fix


def test_block_lists_are_kohyas(sdxl: Any) -> None:
    dims = ",".join(str(i) for i in range(23))
    selected = select(sdxl, ("unet",), rank=16, block_dims=dims, block_alphas=",".join(["2"] * 23))
    assert by_block(selected) == {
        **{f"IN0{i}": {i + 1} for i in (4, 5, 7, 8)},
        "MID": {11},
        **{f"OUT0{i}": {i + 13} for i in range(6)},
    }
    assert {one.alpha for one in selected} == {2.0}
    conv = select(sdxl, ("unet",), rank=16, conv_block_dims=dims)
    assert len(conv) == 788
    assert {one.rank for one in conv if one.place.block == "OUT08" and one.target.is_wide_conv} == {21}
    assert {one.rank for one in conv if one.place.block == "OUT08" and not one.target.is_wide_conv} == {16}


def test_block_rates_are_kohyas_curves() -> None:
    lists = parse_block_lists(LoraConfig(down_lr_weight="cosine", mid_lr_weight="1,0.5", up_lr_weight="linear+0.25"))
    assert lists.lr_factors is not None
    assert len(lists.lr_factors) == 23
    cosine = [math.sin(math.pi * (i / 8) / 2) for i in reversed(range(9))]
    assert lists.lr_factors[1:10] == pytest.approx(cosine)
    assert lists.lr_factors[10:13] == (1.0, 0.5, 1.0)
    assert lists.lr_factors[13:22] == pytest.approx([i / 8 + 0.25 for i in range(9)])
    assert (lists.lr_factors[0], lists.lr_factors[22]) == (1.0, 1.0)
    threshold = parse_block_lists(LoraConfig(up_lr_weight="linear", block_lr_zero_threshold=0.3))
    assert threshold.lr_factors is not None
    assert threshold.lr_factors[13:17] == pytest.approx([0.0, 0.0, 0.0, 0.375])


def test_blocks_with_rate_zero_get_no_adapters(sdxl: Any) -> None:
    selected = select(sdxl, ("unet",), up_lr_weight="0,0,0,1,1,1,1,1,1")
    assert {one.place.block for one in selected if one.place.block.startswith("OUT")} == {"OUT03", "OUT04", "OUT05"}


@pytest.mark.parametrize(
    "settings",
    [
        {"block_dims": "1,2"},
        {"block_dims": ",".join(["1.5"] * 23)},
        {"block_alphas": ",".join(["1"] * 23)},
        {"down_lr_weight": "wavy"},
        {"down_lr_weight": ",".join(["1"] * 10)},
        {"mid_lr_weight": "cosine"},
        {"up_lr_weight": "linear+x"},
    ],
)
def test_bad_block_lists_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_block_lists(LoraConfig(**settings))
    assert f"lora.{next(iter(settings))}" in str(caught.value)


def test_block_indices() -> None:
    wanted = {
        "lora_unet_time_embed_0": 0,
        "lora_unet_label_emb_0_0": 0,
        "lora_unet_input_blocks_0_0": 1,
        "lora_unet_input_blocks_8_1_proj_in": 9,
        "lora_unet_middle_block_0_in_layers_2": 10,
        "lora_unet_middle_block_2_in_layers_2": 12,
        "lora_unet_output_blocks_0_0_in_layers_2": 13,
        "lora_unet_output_blocks_8_0_in_layers_2": 21,
        "lora_unet_out_2": 22,
        "lora_te1_text_model_encoder_layers_0_mlp_fc1": None,
    }
    assert {name: block_index(name) for name in wanted} == wanted


def test_rate_factors_reach_the_optimizer(model: SDXLModel) -> None:
    config = LoraConfig(rank=2, targets=("te1 lr=0.5", "OUT00 lr=2"))
    network = create_network(model, config, trained_parts=ALL_PARTS, seed=0)
    parts = {part: network.parameters_of(part) for part in network.parts}
    optimizer = build_optimizer(
        parts, OptimizerConfig(learning_rate=1e-3, te1_lr=None, te2_lr=None), network.rate_factors()
    )
    network.detach()
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}
    assert len(rates) == 2 * len(network.modules)
    assert rates["lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_up.weight"] == 5e-4
    assert rates["lora_te2_text_model_encoder_layers_0_mlp_fc1.lora_up.weight"] == 1e-3
    assert rates["lora_unet_output_blocks_0_1_proj_in.lora_up.weight"] == 2e-3
    assert rates["lora_unet_output_blocks_1_1_proj_in.lora_up.weight"] == 1e-3
    assert {group["label"] for group in optimizer.param_groups} == {"te1x0.5", "te2", "unet", "unetx2"}


def test_rs_lora_scales_by_the_root_of_the_rank(model: SDXLModel) -> None:
    network = full_network(model, rank=4, alpha=2.0, conv_rank=0, rs_lora=True)
    network.detach()
    module = network.modules["lora_unet_middle_block_1_proj_in"]
    assert module.scale == pytest.approx(2.0 / 4**0.5)
    assert float(network.state_dict()[f"{module.name}.alpha"]) / 4 == pytest.approx(module.scale)
