from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from network_cases import full_network, outputs, randomise, unet_inputs

from trainer_core.config import LoraConfig
from trainer_core.errors import AdapterError
from trainer_core.models import SDXLModel
from trainer_core.networks import LoraNetwork, create_network, load_lora, network_from_file, save_lora, warm_start
from trainer_core.networks.naming import unet_sgm_path
from trainer_core.networks.resize import smallest_rank, truncate


def taught(model: SDXLModel, path: Path, **settings: object) -> torch.Tensor:
    """Save a random network's file and return what it computes."""
    network = randomise(full_network(model, **settings))
    save_lora(path, network.state_dict(), {})
    output = outputs(model)
    network.detach()
    return output


@pytest.mark.parametrize("rank", [4, 6])
def test_a_warm_started_network_computes_what_the_file_computes(model: SDXLModel, tmp_path: Path, rank: int) -> None:
    path = tmp_path / "a.safetensors"
    wanted = taught(model, path)
    network = full_network(model, rank=rank, alpha=float(rank), conv_rank=rank)
    sentence = warm_start(network, path)
    assert torch.allclose(outputs(model), wanted, atol=2e-5)
    assert len(network.modules) == len(load_lora(path).ranks)
    assert f"{len(network.modules)} of {len(network.modules)} modules" in sentence
    assert ("filled up from rank 2" in sentence) is True
    outputs_need_gradients = model.denoise(*unet_inputs(model)).square().mean()
    outputs_need_gradients.backward()
    network.detach()
    assert all(p.grad is not None for p in network.parameters_of("unet").values())


def test_a_larger_rank_is_cut_to_the_best_approximation_and_the_loss_is_said(model: SDXLModel, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    taught(model, path)
    network = full_network(model, rank=3)
    assert "cut from rank 4" in warm_start(network, path)
    name = "lora_te2_text_model_encoder_layers_0_mlp_fc1"
    ours = network.modules[name].delta_weight()
    file = load_lora(path)
    full = file.scales[name] * file.state[f"{name}.lora_up.weight"] @ file.state[f"{name}.lora_down.weight"]
    u, s, v = torch.linalg.svd(full)
    assert torch.allclose(ours, u[:, :3] * s[:3] @ v[:3], atol=1e-6)
    network.detach()


def test_modules_the_run_does_not_train_are_an_error(model: SDXLModel, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    taught(model, path)
    network = create_network(model, LoraConfig(rank=4), trained_parts=("unet",), seed=0)
    before = network.state_dict()
    with pytest.raises(AdapterError, match="not trained in this run"):
        warm_start(network, path)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    network.detach()


def test_a_file_that_fits_nothing_is_an_error(model: SDXLModel, tmp_path: Path) -> None:
    network = create_network(model, LoraConfig(rank=4), trained_parts=("te1",), seed=0)
    name = "lora_te2_text_model_encoder_layers_0_mlp_fc1"
    state = {f"{name}.lora_down.weight": torch.ones(4, 64), f"{name}.lora_up.weight": torch.ones(128, 4)}
    with pytest.raises(AdapterError, match="matches nothing"):
        warm_start(network, save_lora(tmp_path / "a.safetensors", state, {}).path)
    network.detach()


@pytest.mark.parametrize(("alpha", "words"), [(0.0, "alpha 0"), (float("nan"), "NaN")])
def test_files_without_effect_or_with_nan_are_refused(
    model: SDXLModel, tmp_path: Path, alpha: float, words: str
) -> None:
    network = create_network(model, LoraConfig(rank=4), trained_parts=("te1",), seed=0)
    state = network.state_dict()
    state["lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha"] = torch.tensor(alpha)
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(AdapterError, match=words):
        warm_start(network, tmp_path / "a.safetensors")
    network.detach()


Rename = Callable[[LoraNetwork, SDXLModel, str, str], str]


def kohya_with_diffusers_names(network: LoraNetwork, model: SDXLModel, name: str, key: str) -> str:
    module = network.modules[name]
    return f"lora_unet_{module.path.replace('.', '_')}.{key}" if module.part == "unet" else f"{name}.{key}"


def generic(network: LoraNetwork, model: SDXLModel, name: str, key: str) -> str:
    module = network.modules[name]
    if module.part == "unet":
        return f"diffusion_model.{unet_sgm_path(model.unet, module.path)}.{key}"
    clip = {"te1": "clip_l", "te2": "clip_g"}[module.part]
    return f"text_encoders.{clip}.transformer.text_model.{module.path.removeprefix('text_model.')}.{key}"


def diffusers(network: LoraNetwork, model: SDXLModel, name: str, key: str) -> str:
    module = network.modules[name]
    key = key.replace("lora_down", "lora_A").replace("lora_up", "lora_B")
    prefix = {"unet": "unet.", "te1": "text_encoder.text_model.", "te2": "text_encoder_2.text_model."}[module.part]
    return f"{prefix}{module.path.removeprefix('text_model.')}.{key}"


def old_diffusers(network: LoraNetwork, model: SDXLModel, name: str, key: str) -> str:
    module = network.modules[name]
    path = (
        f"unet.{module.path}" if module.part == "unet" else f"text_encoder{'_2' * (module.part == 'te2')}.{module.path}"
    )
    path = path.replace(".to_out.0", ".to_out")
    head, _, last = path.rpartition(".")
    tail = key.replace("lora_down", "down").replace("lora_up", "up")
    if module.part == "unet" and ".attn" in path:
        return f"{head}.processor.{last}_lora.{tail}" if key != "alpha" else f"{head}.processor.{last}_lora.alpha"
    return f"{path}.lora.{tail}" if key != "alpha" else f"{path}.alpha"


@pytest.mark.parametrize("rename", [kohya_with_diffusers_names, generic, diffusers, old_diffusers])
def test_every_key_family_reads_as_kohyas(model: SDXLModel, tmp_path: Path, rename: Rename) -> None:
    network = randomise(full_network(model))
    state = network.state_dict()
    renamed = {}
    for key, value in state.items():
        name, _, rest = key.partition(".")
        renamed[rename(network, model, name, rest)] = value
    network.detach()
    assert len(renamed) == len(state)
    safetensors.torch.save_file(renamed, tmp_path / "a.safetensors")
    file = load_lora(tmp_path / "a.safetensors")
    assert file.state.keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in file.state.items())
    assert sum(file.families.values()) == len(network.modules)
    assert file.alphas["lora_unet_middle_block_1_proj_in"] == 2.0


def test_diffusers_own_metadata_gives_the_alphas(model: SDXLModel, tmp_path: Path) -> None:
    path = "down_blocks.1.attentions.0.proj_in"
    tensors = {f"unet.{path}.lora_A.weight": torch.ones(4, 32), f"unet.{path}.lora_B.weight": torch.ones(32, 4)}
    table = {"unet.r": 4, "unet.lora_alpha": 2, "unet.alpha_pattern": {}}
    for changes, alpha in (
        ({}, 2.0),
        ({"unet.alpha_pattern": {path: 6}}, 6.0),
        ({"unet.use_rslora": True}, 4.0),
    ):
        metadata = {"lora_adapter_metadata": json.dumps(table | changes)}
        safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", metadata)
        assert load_lora(tmp_path / "a.safetensors").alphas == {"lora_unet_input_blocks_4_1_proj_in": alpha}


def test_mixed_ranks_and_missing_alphas_are_applied(model: SDXLModel, tmp_path: Path) -> None:
    network = randomise(full_network(model, te1_rank=2, te2_rank=3))
    state = network.state_dict()
    network.detach()
    for key in [key for key in state if key.startswith("lora_te2") and key.endswith("alpha")]:
        del state[key]
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    file = load_lora(tmp_path / "a.safetensors")
    assert {file.scales[name] for name in file.ranks if name.startswith("lora_te2")} == {1.0}
    assert {rank for name, rank in file.ranks.items() if name.startswith("lora_te1")} == {2}
    assert "18 of" in file.warnings[0]
    again = network_from_file(model, file)
    assert {module.rank for module in again.modules.values()} == {2, 3, 4}


@pytest.mark.parametrize("shape", [(5, 12), (5, 3, 3, 3)])
def test_truncate_is_the_best_approximation(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    down = torch.randn(shape, generator=generator)
    up = torch.randn((8, 5, *[1] * (len(shape) - 2)), generator=generator)
    full = up.flatten(1) @ down.flatten(1)
    factors = truncate(down, up, 2)
    values = torch.linalg.svdvals(full)
    error = (full - factors.up.flatten(1) @ factors.down.flatten(1)).norm()
    assert torch.allclose(error, values[2:].square().sum().sqrt(), rtol=1e-4)
    assert abs(factors.lost - float(error / full.norm())) < 1e-5
    assert factors.down.shape == (2, *shape[1:])
    assert truncate(down, up, 9).lost == 0
    assert smallest_rank(down, up, 1.0) == 5
    share = float(values[:2].square().sum() / values.square().sum())
    assert smallest_rank(down, up, share - 1e-5) == 2
    assert smallest_rank(down, up, share + 1e-5) == 3


def test_max_norm_is_kohyas(model: SDXLModel) -> None:
    network = randomise(full_network(model))
    big, small = (network.modules[f"lora_te2_text_model_encoder_layers_{i}_mlp_fc1"] for i in (0, 1))
    with torch.no_grad():
        big.lora_up.weight.mul_(50)
        small.lora_up.weight.mul_(0.1)
    before = {module.name: module.delta_weight().detach() for module in (big, small)}
    ratio_up = big.lora_up.weight.norm() / big.lora_down.weight.norm()
    result = network.apply_max_norm(1.0)
    assert before[big.name].norm() > 1.0
    assert torch.allclose(big.delta_weight().norm(), torch.tensor(1.0), atol=1e-5)
    assert torch.allclose(big.lora_up.weight.norm() / big.lora_down.weight.norm(), ratio_up, rtol=1e-5)
    assert torch.equal(small.delta_weight(), before[small.name])
    norms = torch.stack([module.delta_weight().norm() for module in network.modules.values()])
    assert torch.allclose(result.max_norm, norms.max(), atol=1e-5)
    assert torch.allclose(result.mean_norm, norms.mean(), atol=1e-5)
    assert int(result.scaled) >= 1
    network.detach()
