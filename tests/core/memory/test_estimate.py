"""What a run will take, against what is counted; and the true numbers of SDXL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_core.config import DatasetConfig, LoraConfig, OptimizerConfig, TrainConfig
from trainer_core.errors import ResourceError
from trainer_core.memory.before_loading import asked_of, refuse, told
from trainer_core.memory.estimate import (
    GIB,
    SDXL_SETS,
    SDXL_TRANSFORMERS,
    SDXL_UNET,
    cheaper,
    count_activations,
    model_need,
    rank_table,
    sdxl_need,
    set_of,
)
from trainer_core.models import load_sdxl
from trainer_core.models.frozen_base import transformer_layers
from trainer_core.models.outline import outline_sdxl
from trainer_core.networks import create_network

ROOT = Path(__file__).resolve().parents[3]


def forward(model: Any, batch: int, side: int) -> torch.Tensor:
    """The UNet on inputs of this size, on the model's device."""
    device, config = model.device, model.unet.config
    latents = torch.zeros(batch, 4, side // 8, side // 8, device=device)
    context = torch.zeros(batch, 77, config.cross_attention_dim, device=device)
    pooled = torch.zeros(batch, model.text_encoders[1].config.projection_dim, device=device)
    times, ids = torch.zeros(batch, device=device), torch.zeros(batch, 6, device=device)
    return model.denoise(latents, times, context, pooled, ids).pow(2).mean()


def need_of(model: Any, network: Any, batch: int, side: int) -> Any:
    trained = [parameter for _, parameter in network.named_parameters()]
    return model_need(model, trained, count_activations(lambda: forward(model, batch, side)), text_cached=False)


@pytest.mark.parametrize(("rank", "batch", "side"), [(4, 1, 64), (32, 3, 96)])
def test_estimate_without_loading_is_within_a_tenth_of_counted_bytes(
    micro_model: Path, rank: int, batch: int, side: int
) -> None:
    """The outline has no weights; counted: every tensor of the loaded model, adapter, gradients, moments, graph."""
    config = LoraConfig(rank=rank)
    outline = outline_sdxl(micro_model)
    outlined = create_network(outline, config, trained_parts=("unet",), seed=1)
    outlined.to("meta")
    estimate = need_of(outline, outlined, batch, side).total

    model = load_sdxl(micro_model, dtype=torch.float32, device=torch.device("cpu"))
    network = create_network(model, config, trained_parts=("unet",), seed=1)
    trained = [parameter for _, parameter in network.named_parameters()]
    optimizer = torch.optim.AdamW(trained)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(model, batch, side)
    weights = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for module in (model.unet, *model.text_encoders, model.vae)
        for tensor in (*module.parameters(), *module.buffers())
    }
    weights |= {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in trained}
    graph = sum(size for place, size in kept.items() if place not in weights)
    loss.backward()
    optimizer.step()
    gradients = sum(p.grad.nbytes for p in trained if p.grad is not None)
    moments = sum(v.nbytes for state in optimizer.state.values() for v in state.values())
    counted = sum(weights.values()) + graph + gradients + moments
    assert estimate == pytest.approx(counted, rel=0.1)
    assert count_activations(lambda: forward(model, batch, side)) == pytest.approx(graph, rel=0.1)


@pytest.fixture(scope="module")
def unet() -> Iterator[Any]:
    from diffusers import UNet2DConditionModel

    config = dict(UNet2DConditionModel.load_config(ROOT / "trainer_core" / "assets" / "sdxl" / "unet"))
    with torch.device("meta"):
        yield UNet2DConditionModel.from_config(config)


def test_target_sets_of_sdxl_are_what_our_selection_finds(unet: Any) -> None:
    """Section 0: 560 and 722 modules, and all layers of the blocks, of the UNet's 2,567,463,684 parameters."""
    from trainer_core.networks import find_targets
    from trainer_core.networks.layer_kinds import place_of
    from trainer_core.networks.target_presets import PRESETS

    assert sum(parameter.numel() for parameter in unet.parameters()) == SDXL_UNET
    assert sum(layer.weight.numel() for layer in transformer_layers(unet)) == SDXL_TRANSFORMERS
    for preset, expected in zip(("attention", "attention_mlp", "full"), SDXL_SETS.values(), strict=True):
        chosen = PRESETS[preset]
        targets = find_targets(unet, "unet", conv=chosen.conv)
        assert set_of(t.module for t in targets if chosen.contains(place_of(t))) == expected


def test_rank_table_has_the_measured_numbers() -> None:
    """5.81 M (0.226 %) and 186 M (7.2 %) for attention, 10.6 M, 42.6 M (1.66 %) and 340 M (13.3 %) for kohya's set."""
    attention, kohya, everything = rank_table()
    for text in (
        "560 layers",
        "r4 5.8 M (0.23%)",
        "r8 11.6 M",
        "r16 23.2 M (0.90%)",
        "r32 46.4 M",
        "r128 185.8 M",
    ):
        assert text in attention
    for text in ("722 layers", "r4 10.6 M", "r16 42.6 M (1.66%)", "r32 85.1 M (3.3", "r128 340.5 M (13.26%)"):
        assert text in kohya
    assert "788 layers" in everything
    assert "r16 49.2 M" in everything


def test_sdxl_at_its_usual_settings() -> None:
    """Section 13's check: batch 1, recomputed, rank 16 on attention, cached text: about 7.3 GiB."""
    need = sdxl_need(targets="attention")
    assert need.base / GIB == pytest.approx(4.78, abs=0.01)
    assert need.adapter / GIB == pytest.approx(0.35, abs=0.01)
    assert need.total / GIB == pytest.approx(7.3, rel=0.15)
    assert sdxl_need(batch=4).activations == pytest.approx(4 * sdxl_need().activations)
    assert sdxl_need(area=512 * 512).activations == pytest.approx(sdxl_need().activations / 4)
    assert sdxl_need(rank=128, recompute=False).activations / GIB == pytest.approx(8.57, rel=0.02)
    assert need.lines()[-1].startswith("together: ")
    assert sdxl_need(eight_bit_base=True).base / GIB == pytest.approx(2.73, abs=0.01)


def test_a_run_that_cannot_fit_is_refused_with_what_would_help() -> None:
    config = TrainConfig(dataset=DatasetConfig(batch_size=4), optimizer=OptimizerConfig(te1_lr=1e-5))
    asked = asked_of(config, "bf16", 1024)
    assert (asked["batch"], asked["rank"], asked["text_cached"], asked["area"]) == (4, 16, False, 1024 * 1024)
    refuse(asked, 80 * GIB)
    with pytest.raises(ResourceError, match=r"needs about 4\d\.\d GiB.*which has 12\.0 GiB.*cache the text.*recompute"):
        refuse(asked, 12 * GIB)
    assert told(sdxl_need(**asked), 12 * GIB).startswith("Estimated memory: base model: 4.78 GiB; text encoders: ")


def test_the_cheapest_changes_come_first_and_no_more_than_needed() -> None:
    asked = {"batch": 4, "recompute": False, "text_cached": False}
    assert cheaper(sdxl_need, 60 * GIB, **asked) == []
    changes = [text for text, _ in cheaper(sdxl_need, 12 * GIB, **asked)]
    assert ["cache" in changes[0], "recompute" in changes[1], len(changes)] == [True, True, 2]
    assert "one picture" in cheaper(sdxl_need, 8.4 * GIB, **asked)[2][0]
