from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from network_cases import full_network, outputs, randomise, unet_inputs

from trainer_core.config import LoraConfig
from trainer_core.draws import Draws
from trainer_core.errors import AdapterError, ConfigError
from trainer_core.models import SDXLModel, encode_captions, load_sdxl
from trainer_core.networks import create_network, export_lora, load_lora, save_lora
from trainer_core.networks.lowrank import top_singular
from trainer_core.networks.merge import extract_lora, merge_lora


@pytest.fixture
def saved(model: SDXLModel, tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A LoRA file with random weights and what it computes."""
    network = randomise(full_network(model))
    path = save_lora(tmp_path / "a.safetensors", network.state_dict(), {}).path
    output = outputs(model)
    network.detach()
    return path, output


def test_a_merged_model_computes_what_the_lora_did(micro_folder: Path, saved: tuple[Path, torch.Tensor]) -> None:
    path, wanted = saved
    own = load_sdxl(micro_folder)
    result = merge_lora(own, load_lora(path))
    assert result.modules == len(load_lora(path).ranks)
    assert 0 < result.relative_change < 1
    assert torch.allclose(outputs(own), wanted, atol=2e-5)
    merge_lora(own, load_lora(path), -1.0)
    assert torch.allclose(outputs(own), outputs(load_sdxl(micro_folder)), atol=2e-5)


def test_a_merge_that_overflows_changes_nothing(micro_folder: Path, saved: tuple[Path, torch.Tensor]) -> None:
    own = load_sdxl(micro_folder, dtype=torch.float16)
    before = copy.deepcopy(own.unet.state_dict())
    with pytest.raises(AdapterError, match="would not be finite"):
        merge_lora(own, load_lora(saved[0]), 1e9)
    assert all(torch.equal(value, before[key]) for key, value in own.unet.state_dict().items())


def test_extraction_gives_a_merged_lora_back(
    model: SDXLModel, micro_folder: Path, tmp_path: Path, saved: tuple[Path, torch.Tensor]
) -> None:
    path, wanted = saved
    own = load_sdxl(micro_folder)
    merge_lora(own, load_lora(path))
    extraction = extract_lora(model, own, 4, conv_rank=2)
    assert extraction.kept > 1 - 1e-5
    assert extraction.unchanged == 0
    again = load_sdxl(micro_folder)
    merge_lora(again, load_lora(save_lora(tmp_path / "b.safetensors", extraction.state, {}).path))
    assert torch.allclose(outputs(again), wanted, atol=5e-5)
    less = extract_lora(model, own, 2, parts=("te2",))
    assert 0.3 < less.kept < 1
    assert {name.split("_")[1] for name in less.state} == {"te2"}


def test_huge_changes_are_measured_in_double_precision(
    model: SDXLModel, micro_folder: Path, saved: tuple[Path, torch.Tensor]
) -> None:
    """Their squares overflow float32, and the result was described as 'inf%' and 'nan%' as if it could be used."""
    own = load_sdxl(micro_folder)
    change = merge_lora(own, load_lora(saved[0]), 1e25).relative_change
    assert 1e15 < change < 1e30
    assert 0.5 < extract_lora(model, own, 4, parts=("unet",)).kept <= 1.0 + 1e-6


def test_extraction_from_equal_models_is_an_error(model: SDXLModel, micro_folder: Path) -> None:
    with pytest.raises(AdapterError, match="do not differ"):
        extract_lora(model, load_sdxl(micro_folder), 4)


def test_random_projection_finds_the_top_singular_values() -> None:
    draws = Draws(0)
    u = torch.linalg.qr(draws.normal(0, "u", "t", (400, 300))).Q
    v = torch.linalg.qr(draws.normal(0, "v", "t", (500, 300))).Q
    values = 0.97 ** torch.arange(300.0)
    matrix = u * values @ v.T
    ours_u, ours_s, ours_v = top_singular(matrix, 8, draws, "name")
    assert torch.allclose(ours_s, values[:8], rtol=1e-3)
    best = values[8:].square().sum().sqrt()
    assert (matrix - ours_u * ours_s @ ours_v).norm() <= 1.001 * best
    assert torch.equal(ours_s, top_singular(matrix, 8, draws, "name")[1])


def test_pissa_starts_at_the_base_learns_and_exports_a_plain_lora(model: SDXLModel, tmp_path: Path) -> None:
    before = outputs(model)
    config = LoraConfig(rank=4, alpha=4.0, init="pissa")
    network = create_network(model, config, trained_parts=("unet", "te1", "te2"), seed=0)
    assert torch.allclose(outputs(model), before, atol=2e-5)
    module = network.modules["lora_te2_text_model_encoder_layers_0_mlp_fc1"]
    part = module.scale * module.lora_up.weight @ module.lora_down.weight
    u, s, v = torch.linalg.svd(module.base.weight)
    assert torch.allclose(part, u[:, :4] * s[:4] @ v[:4], atol=1e-5)
    with pytest.raises(AdapterError, match="changes nothing"):
        export_lora(tmp_path / "a.safetensors", network, model, {})
    noisy, timesteps, _, _, ids = unet_inputs(model)
    text = encode_captions(model, ["a red square", "two"])
    model.denoise(noisy, timesteps, text.context_BTD, text.pooled_BD, ids).square().mean().backward()
    torch.optim.SGD([p for _, p in network.named_parameters()], lr=1.0).step()
    wanted = outputs(model)
    assert (wanted - before).abs().max() > 1e-4
    export = export_lora(tmp_path / "b.safetensors", network, model, {}, dtype="fp32")
    assert export.proof.probe_error <= 1e-5
    state = network.state_dict()
    network.detach()
    assert torch.equal(outputs(model), before)
    assert set(load_lora(tmp_path / "b.safetensors").ranks.values()) == {8}
    again = create_network(model, config, trained_parts=("unet", "te1", "te2"), seed=1)
    again.load_state_dict(state)
    assert torch.allclose(outputs(model), wanted, atol=1e-6)
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())
    again.detach()


def test_pissa_refuses_what_would_break_its_difference(model: SDXLModel) -> None:
    with pytest.raises(ConfigError) as caught:
        create_network(model, LoraConfig(init="pissa", dropout=0.1, max_norm=1.0), trained_parts=("te1",), seed=0)
    assert {problem.field for problem in caught.value.problems} == {"lora.dropout", "lora.max_norm"}


def test_clamp_limits_the_adapters_output_and_tells_the_rate(model: SDXLModel) -> None:
    network = randomise(create_network(model, LoraConfig(rank=4, clamp=1e-3), trained_parts=("te2",), seed=0))
    module = network.modules["lora_te2_text_model_encoder_layers_0_mlp_fc1"]
    x = Draws(0).normal(0, "x", "t", (2, 5, 64))
    free = module.up_weight @ module.down_weight * module.scale
    wanted = x @ free.T
    assert torch.allclose(module.delta(x), wanted.clamp(-1e-3, 1e-3), atol=1e-7)
    counts = network.clamp_counts()
    assert counts is not None
    rate = float(counts[0] / counts[1])
    assert rate == pytest.approx(float((wanted.abs() > 1e-3).float().mean()), abs=0.01)
    assert 0 < rate < 1
    again = network.clamp_counts()
    assert again is not None
    assert again.tolist() == [0.0, 0.0]
    network.detach()
    plain = create_network(model, LoraConfig(rank=4), trained_parts=("te2",), seed=0)
    outputs(model)
    assert plain.clamp_counts() is None
    plain.detach()
