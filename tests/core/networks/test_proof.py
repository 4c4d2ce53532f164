from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from network_cases import full_network, randomise, unet_inputs

from trainer_core.config import LoraConfig
from trainer_core.errors import AdapterError
from trainer_core.models import SDXLModel, load_sdxl
from trainer_core.networks import (
    LoraNetwork,
    create_network,
    export_lora,
    load_lora,
    network_from_file,
    prove_lora_file,
    save_lora,
)


def saved(network: LoraNetwork, path: Path, dtype: str = "fp32") -> Path:
    return save_lora(path, network.state_dict(), {}, dtype).path


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_good_file_is_proven_and_the_network_is_left_alone(model: SDXLModel, tmp_path: Path, dtype: str) -> None:
    network = randomise(full_network(model))
    inputs, state = unet_inputs(model), network.state_dict()
    with torch.no_grad():
        before = model.denoise(*inputs)
    result = export_lora(tmp_path / "a.safetensors", network, model, {}, dtype=dtype).proof
    with torch.no_grad():
        assert torch.equal(model.denoise(*inputs), before)
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
    assert network.container.training
    network.detach()
    assert result.dtype == dtype
    assert result.probe_error <= 1e-5
    assert set(result.probe_errors) == {"te1", "te2", "unet"}
    assert result.does_something
    assert result.modules == result.changed_modules == len(network.modules)
    assert "Proven 'a.safetensors'" in result.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_proof_computes_in_fp32_on_a_half_precision_base(
    micro_folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = load_sdxl(micro_folder, dtype=dtype)
    network = randomise(full_network(model))
    result = prove_lora_file(saved(network, tmp_path / "a.safetensors"), network, model)
    assert result.probe_error <= 1e-5
    assert model.unet.conv_in.weight.dtype == dtype
    network.detach()
    assert not any("forward" in module.__dict__ for root in model.parts.values() for module in root.modules())


def change(path: Path, key_part: str, new: float) -> None:
    state = safetensors.torch.load_file(path)
    key = next(key for key in sorted(state) if key_part in key)
    state[key] = torch.full_like(state[key], new)
    safetensors.torch.save_file(state, path)


@pytest.mark.parametrize("key_part", ["alpha", "lora_up", "lora_down"])
def test_a_changed_tensor_fails_the_proof(model: SDXLModel, tmp_path: Path, key_part: str) -> None:
    network = randomise(full_network(model))
    path = saved(network, tmp_path / "a.safetensors")
    change(path, key_part, 3.0)
    with pytest.raises(AdapterError, match="differ"):
        prove_lora_file(path, network, model)
    network.detach()


def test_the_probe_finds_a_wrong_scale_that_the_tensors_do_not_show(model: SDXLModel, tmp_path: Path) -> None:
    """The mistake behind kohya.md 1.2, item 3: a scale that does not follow alpha."""
    network = randomise(full_network(model))
    path = saved(network, tmp_path / "a.safetensors")
    module = next(m for m in network.modules.values() if m.part == "unet")
    module.scale *= 2
    with pytest.raises(AdapterError, match="computes something else"):
        prove_lora_file(path, network, model)
    module.scale /= 2
    prove_lora_file(path, network, model)
    network.detach()


def test_the_probe_finds_a_module_under_another_modules_name(model: SDXLModel, tmp_path: Path) -> None:
    network = randomise(full_network(model))
    first, second = (network.modules[f"lora_te2_text_model_encoder_layers_{i}_mlp_fc1"] for i in (0, 1))
    first.detach()
    second.detach()
    first._base, second._base = second._base, first._base
    first.attach()
    second.attach()
    with pytest.raises(AdapterError, match="computes something else"):
        prove_lora_file(saved(network, tmp_path / "a.safetensors"), network, model)
    network.detach()


def test_an_untrained_network_does_nothing_and_that_is_an_error(model: SDXLModel, tmp_path: Path) -> None:
    network = full_network(model)
    with pytest.raises(AdapterError, match="changes nothing"):
        export_lora(tmp_path / "a.safetensors", network, model, {})
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors.failed"]
    proof = export_lora(tmp_path / "b.safetensors", network, model, {}, require_effect=False).proof
    assert not proof.does_something
    network.detach()


def test_text_encoder_1s_last_layer_alone_does_nothing(model: SDXLModel, tmp_path: Path) -> None:
    network = full_network(model)
    with torch.no_grad():
        network.modules["lora_te1_text_model_encoder_layers_2_mlp_fc1"].lora_up.weight.fill_(1.0)
    path = saved(network, tmp_path / "a.safetensors")
    with pytest.raises(AdapterError, match="changes nothing"):
        prove_lora_file(path, network, model)
    with torch.no_grad():
        network.modules["lora_te1_text_model_encoder_layers_1_mlp_fc1"].lora_up.weight.fill_(0.01)
    assert prove_lora_file(saved(network, tmp_path / "b.safetensors"), network, model).changed_modules == 2
    network.detach()


def test_round_trip_through_a_file_computes_the_same(model: SDXLModel, tmp_path: Path) -> None:
    network = randomise(full_network(model))
    inputs = unet_inputs(model)
    with torch.no_grad():
        wanted = model.denoise(*inputs)
        network.detach()
        again = network_from_file(model, load_lora(saved(network, tmp_path / "a.safetensors")))
        again.attach()
        assert torch.equal(model.denoise(*inputs), wanted)
        again.detach()


def test_a_file_of_another_model_is_refused(model: SDXLModel, tmp_path: Path) -> None:
    name = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    wide = {f"{name}.lora_down.weight": torch.ones(2, 640), f"{name}.lora_up.weight": torch.ones(640, 2)}
    path = save_lora(tmp_path / "wide.safetensors", wide, {}).path
    with pytest.raises(AdapterError, match="another model"):
        network_from_file(model, load_lora(path))
    deep = {key.replace("blocks_0_attn1", "blocks_9_attn1"): value for key, value in wide.items()}
    path = save_lora(tmp_path / "deep.safetensors", deep, {}).path
    with pytest.raises(AdapterError, match="no place in this model"):
        network_from_file(model, load_lora(path))


def test_parts_with_rank_zero_are_frozen(model: SDXLModel) -> None:
    network = create_network(model, LoraConfig(rank=4, te2_rank=0), trained_parts=("unet", "te1", "te2"), seed=0)
    network.detach()
    assert network.parts == ("te1", "unet")
    with pytest.raises(AdapterError, match="nothing to train"):
        create_network(model, LoraConfig(rank=4, te1_rank=0), trained_parts=("te1",), seed=0)


def test_first_weights_do_not_depend_on_other_modules(model: SDXLModel) -> None:
    states = []
    for parts in (("unet", "te1", "te2"), ("te2",)):
        network = create_network(model, LoraConfig(rank=4), trained_parts=parts, seed=3)
        states.append(network.state_dict())
        network.detach()
    assert all(torch.equal(value, states[0][key]) for key, value in states[1].items())
    down = states[1]["lora_te2_text_model_encoder_layers_0_mlp_fc1.lora_down.weight"]
    assert 0.9 / 8 < down.abs().max() <= 1 / 8  # U(+-1/sqrt(fan_in)), fan_in 64
    other = create_network(model, LoraConfig(rank=4), trained_parts=("te2",), seed=4)
    other.detach()
    assert not torch.equal(other.state_dict()["lora_te2_text_model_encoder_layers_0_mlp_fc1.lora_down.weight"], down)
