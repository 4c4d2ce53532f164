from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
import torch
from network_cases import full_network, randomise

from trainer_core.config import LoraConfig
from trainer_core.errors import AdapterError
from trainer_core.models import SDXLModel
from trainer_core.networks import create_network
from trainer_core.networks.coverage import NO_GRADIENT, NOT_USED, coverage


def test_every_adapter_learns_but_text_encoder_1s_last_layer(model: SDXLModel) -> None:
    network = full_network(model)
    state = network.state_dict()
    report = coverage(model, network)
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
    assert all(p.grad is None for _, p in network.named_parameters())
    assert network.container.training
    network.detach()
    assert not report.broken
    assert set(report.unreached.values()) == {NOT_USED}
    assert len(report.unreached) == 6
    assert all(name.startswith("lora_te1_text_model_encoder_layers_2_") for name in report.unreached)
    blocks = {(row.part, row.block): row for row in report.blocks}
    assert sum(row.adapters for row in report.blocks) == len(network.modules)
    assert (blocks["unet", "IN04"].adapters, blocks["unet", "IN04"].reached) == (15, 15)
    assert blocks["te1", "layer 2"].state == "unused"
    assert blocks["unet", "IN00"].state == "none"
    assert blocks["te2", "layer 2"].state == "reached"
    total = sum(row.parameters for row in report.blocks)
    assert total == sum(p.numel() for _, p in network.named_parameters())
    json.dumps(report.to_dict())
    assert "text encoder 1  layer 2" in report.text
    assert "BROKEN" not in report.text


def test_a_text_encoder_that_is_cut_off_is_an_error(model: SDXLModel, monkeypatch: pytest.MonkeyPatch) -> None:
    network = create_network(model, LoraConfig(rank=2), trained_parts=("unet", "te2"), seed=0)
    denoise = type(model).denoise

    def cached(
        self: SDXLModel, noisy: object, t: object, context: torch.Tensor, pooled: torch.Tensor, ids: object
    ) -> torch.Tensor:
        return denoise(self, noisy, t, context.detach(), pooled.detach(), ids)

    monkeypatch.setattr(type(model), "denoise", cached)
    with pytest.raises(AdapterError, match="text encoder 2 is to be trained, but no gradient reaches any of its 18"):
        coverage(model, network)
    network.detach()


def test_a_broken_stretch_is_found_and_red(model: SDXLModel) -> None:
    network = randomise(full_network(model, conv_rank=0))
    block = model.unet.mid_block.attentions[0]
    forward = block.forward
    block.forward = lambda *args, **kwargs: tuple(value.detach() for value in forward(*args, **kwargs))
    try:
        report = coverage(model, network)
    finally:
        del block.__dict__["forward"]
        network.detach()
    # Everything whose only way to the loss goes through the middle block is cut; skip connections keep others alive.
    assert "MID" in {row.block for row in report.broken}
    assert report.unreached["lora_unet_middle_block_1_proj_in"] == NO_GRADIENT
    assert "IN04" not in {row.block for row in report.broken}
    assert "BROKEN" in report.text
    tree = ElementTree.fromstring(report.svg())
    red = [group for group in tree.iter("{http://www.w3.org/2000/svg}g") if group.get("class") == "broken"]
    assert any("MID" in "".join(group.itertext()) for group in red)


def test_without_probe_nothing_is_claimed(model: SDXLModel) -> None:
    network = create_network(model, LoraConfig(rank=2, preset="b_lora"), trained_parts=("unet",), seed=0)
    report = coverage(model, network, probe=False)
    network.detach()
    states = {row.block: row.state for row in report.part("unet")}
    assert states["OUT00"] == states["OUT01"] == "unknown"
    assert states["IN04"] == "none"
    assert "not trained" in report.text
    ElementTree.fromstring(report.svg())
