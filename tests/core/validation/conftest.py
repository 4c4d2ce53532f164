from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainer_core.config import LoraConfig
from trainer_core.models import SDXLModel, load_sdxl
from trainer_core.networks import LoraNetwork, create_network
from trainer_core.toy.micro import make_micro


@pytest.fixture(scope="session")
def micro(tmp_path_factory: pytest.TempPathFactory) -> SDXLModel:
    """The micro toy, shared: tests leave it as they find it."""
    return load_sdxl(make_micro(Path(tmp_path_factory.mktemp("micro"))))


@pytest.fixture
def network(micro: SDXLModel) -> Iterator[LoraNetwork]:
    """A network on all parts whose up weights are not zero, in training mode, with dropout on."""
    config = LoraConfig(rank=2, dropout=0.5)
    network = create_network(micro, config, trained_parts=("unet", "te1", "te2"), seed=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_up" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    yield network
    network.detach()
