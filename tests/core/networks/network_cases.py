"""What the network tests share besides fixtures (imported as `network_cases`, see conftest.py)."""

from __future__ import annotations

import random

import torch

from trainer_core.config import LoraConfig
from trainer_core.draws import Draws
from trainer_core.models import SDXLModel, encode_captions
from trainer_core.networks import LoraNetwork, create_network

ALL_PARTS = ("unet", "te1", "te2")


def full_network(model: SDXLModel, **settings: object) -> LoraNetwork:
    """All three parts with convolutions, rank 4, alpha 2, unless `settings` say otherwise."""
    values = {"rank": 4, "alpha": 2.0, "conv_rank": 2, **settings}
    return create_network(model, LoraConfig(**values), trained_parts=ALL_PARTS, seed=1)  # type: ignore[arg-type]


def randomise(network: LoraNetwork, size: float = 0.05, seed: int = 5) -> LoraNetwork:
    """Random weights everywhere, also in `lora_up`, so that every adapter has an effect."""
    draws = Draws(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(size * draws.normal(0, name, "test", parameter.shape))
    return network


def unet_inputs(model: SDXLModel, batch: int = 2, side: int = 8) -> tuple[torch.Tensor, ...]:
    """Arguments of `model.denoise`: noisy, timesteps, context, pooled, time ids."""
    draws, config = Draws(11), model.unet.config
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return (
        draws.normal(0, "noisy", "test", (batch, 4, side, side)),
        torch.tensor([100, 700] * batch)[:batch],
        draws.normal(0, "context", "test", (batch, 77, config.cross_attention_dim)),
        draws.normal(0, "pooled", "test", (batch, pooled)),
        torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]] * batch),
    )


def outputs(model: SDXLModel) -> torch.Tensor:
    """Everything that adapters can change, for one fixed input, as one vector."""
    random.seed(0)  # DyLoRA draws its rank from Python's stream, also outside training
    with torch.no_grad():
        text = encode_captions(model, ["a red square"])
        return torch.cat([model.denoise(*unet_inputs(model)).flatten(), text.context_BTD.flatten(), text.pooled_BD[0]])
