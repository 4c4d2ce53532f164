from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from network_cases import outputs, randomise, unet_inputs

from trainer_core.config import LoraConfig
from trainer_core.draws import Draws
from trainer_core.errors import AdapterError, ConfigError
from trainer_core.models import SDXLModel, encode_captions
from trainer_core.networks import create_network, export_lora, load_lora, network_from_file, warm_start
from trainer_core.networks.peft_adapter import KINDS, PeftNetwork

PARTS = ("unet", "te2")


def make(model: SDXLModel, kind: str, **settings: Any) -> PeftNetwork:
    config = LoraConfig(rank=4, network=f"peft:{kind}", preset="b_lora", targets=("te2 layer:0 rank=2",), **settings)
    network = create_network(model, config, trained_parts=PARTS, seed=3)
    assert isinstance(network, PeftNetwork)
    return network


def disturb(network: PeftNetwork) -> None:
    draws = Draws(1)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.add_(0.05 * draws.normal(0, name, "test", parameter.shape))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_starts_at_the_base_learns_and_is_proven(model: SDXLModel, tmp_path: Path, kind: str) -> None:
    before = outputs(model)
    settings = {"network_args": ("oft_block_size=4",)} if kind == "oft" else {}
    network = make(model, kind, **settings)
    assert torch.allclose(outputs(model), before, atol=1e-4)
    assert all(p.dtype == torch.float32 and p.requires_grad for _, p in network.named_parameters())
    text = encode_captions(model, ["a red square", "two"])
    noisy, timesteps, _, _, ids = unet_inputs(model)
    model.denoise(noisy, timesteps, text.context_BTD, text.pooled_BD, ids).square().mean().backward()
    assert all(p.grad is None for root in model.parts.values() for p in root.parameters())
    assert any(p.grad is not None and p.grad.any() for p in network.parameters_of("te2").values())
    disturb(network)
    changed = outputs(model)
    assert not torch.allclose(changed, before, atol=1e-3)
    proof = export_lora(tmp_path / "a.safetensors", network, model, {}).proof
    assert proof.does_something
    assert torch.equal(outputs(model), changed)
    network.set_multiplier(0.0)
    assert torch.equal(outputs(model), before)
    network.set_multiplier(1.0)
    assert torch.equal(outputs(model), changed)
    network.detach()
    assert torch.equal(outputs(model), before)
    assert not any("forward" in module.__dict__ for root in model.parts.values() for module in root.modules())


@pytest.mark.parametrize("kind", ["lora", "rslora"])
def test_lora_kinds_export_files_that_our_own_layer_reads(model: SDXLModel, tmp_path: Path, kind: str) -> None:
    network = make(model, kind, alpha=3.0)
    disturb(network)
    wanted = outputs(model)
    export_lora(tmp_path / "a.safetensors", network, model, {})
    network.detach()
    file = load_lora(tmp_path / "a.safetensors")
    assert set(file.ranks.values()) == {2, 4}
    ours = network_from_file(model, file)
    ours.attach()
    assert torch.allclose(outputs(model), wanted, atol=2e-5)
    ours.detach()
    again = make(model, kind, alpha=3.0)
    warm_start(again, tmp_path / "a.safetensors")
    assert torch.allclose(outputs(model), wanted, atol=1e-6)
    again.detach()


def test_file_keys_are_kohyas_where_the_kind_has_them(model: SDXLModel, tmp_path: Path) -> None:
    wanted = {
        "dora": {"lora_down.weight", "lora_up.weight", "alpha", "dora_scale"},
        "loha": {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "alpha"},
    }
    for kind, keys in wanted.items():
        network = make(model, kind)
        state = network.export_state_dict()
        network.detach()
        name = "lora_te2_text_model_encoder_layers_0_mlp_fc1"
        assert {key.partition(".")[2] for key in state if key.startswith(f"{name}.")} == keys
    scale = state[f"{name}.alpha"] / 2
    assert float(scale) == pytest.approx(0.5)
    lokr = make(model, "lokr")
    lokr_keys = {key.partition(".")[2] for key in lokr.export_state_dict()}
    lokr.detach()
    assert lokr_keys <= {"lokr_w1", "lokr_w2", "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", "alpha"}


def test_lycoris_reads_our_dora_loha_and_lokr(model: SDXLModel, tmp_path: Path) -> None:
    kohya = pytest.importorskip("lycoris.kohya", reason="lycoris-lora is not installed (extra 'lycoris')")
    from trainer_core.networks.sgm_view import model_views

    for kind in ("lora", "dora", "loha", "lokr"):
        network = make(model, kind)
        disturb(network)
        wanted = outputs(model)
        state = network.export_state_dict()
        network.detach()
        safetensors.torch.save_file(state, tmp_path / f"{kind}.safetensors")
        unet, encoders = model_views(model)
        theirs, weights = kohya.create_network_from_weights(
            1.0, str(tmp_path / f"{kind}.safetensors"), None, encoders, unet
        )
        theirs.apply_to(encoders, unet, True, True)
        info = theirs.load_state_dict(weights, strict=False)
        theirs.eval()
        output = outputs(model)
        for lora in theirs.loras:
            lora.restore()
        assert not info.unexpected_keys, kind
        assert len(theirs.loras) == len({key.partition(".")[0] for key in state}), kind
        assert (output - wanted).norm() <= 1e-4 * wanted.norm(), kind


def test_unknown_kinds_and_arguments_are_refused(model: SDXLModel) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'peft:loha'"):
        make(model, "lohaa")
    with pytest.raises(ConfigError, match="lora.init = 'pissa'"):
        make(model, "pissa")
    with pytest.raises(ConfigError, match="Did you mean 'decompose_factor'"):
        make(model, "lokr", network_args=("decompose_facto=4",))
    with pytest.raises(ConfigError, match="clamp"):
        make(model, "lora", clamp=1.0)


def test_oft_has_no_strength(model: SDXLModel) -> None:
    network = make(model, "oft", network_args=("oft_block_size=4",))
    with pytest.raises(AdapterError, match="no strength"):
        network.set_multiplier(0.5)
    network.detach()


def test_oft_on_wide_convolutions_is_refused_because_pefts_layer_breaks_them(model: SDXLModel) -> None:
    """PEFT unfolds the input and folds it back, which adds overlapping patches up: untrained, the output is wrong."""
    settings = LoraConfig(rank=4, network="peft:oft", conv_rank=4)
    before = outputs(model)
    with pytest.raises(AdapterError, match=r"OFT .* 3x3 .*_in_layers_2.*lora\.conv_rank = 0"):
        create_network(model, settings, trained_parts=("unet",), seed=3)
    assert torch.equal(outputs(model), before)


def test_our_own_and_pefts_lora_compute_the_same(model: SDXLModel, tmp_path: Path) -> None:
    ours = randomise(
        create_network(  # type: ignore[arg-type]
            model, LoraConfig(rank=4, alpha=2.0, preset="b_lora"), trained_parts=PARTS, seed=0
        )
    )
    wanted, state = outputs(model), ours.state_dict()
    ours.detach()
    theirs = create_network(
        model, LoraConfig(rank=4, alpha=2.0, preset="b_lora", network="peft:lora"), trained_parts=PARTS, seed=0
    )
    assert theirs.load_export(state) == ()
    assert torch.allclose(outputs(model), wanted, atol=5e-6)
    theirs.detach()
