"""Which adapters receive a gradient: two passes over a small fixed batch, nothing kept.

In the first pass only `lora_up` can have a gradient (it starts at zero, so nothing flows back to `lora_down`); after
one small update of it the second pass shows `lora_down`. Weights, gradients and modes are put back afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..draws import Draws

if TYPE_CHECKING:
    from ..models import SDXLModel
    from .interface import Network

_SEED = 20_260_102
_SIDE = 8
_CAPTIONS = ("a drawing of a blue circle next to a tree",)
_LOSS_FACTOR = 1024.0
"""Keeps small gradients above zero in half precision; only "zero or not" is asked."""


def reached_weights(model: SDXLModel, network: Network, *, live_text: bool = True) -> dict[str, bool]:
    """For every trained weight, by parameter name, whether a gradient other than zero reached it.

    `live_text`: whether the text encoders are part of a step; False where their outputs are cached.
    """
    reached: dict[str, bool] = {}
    parameters = dict(network.named_parameters())
    with torch.inference_mode(False), torch.enable_grad(), _put_back(network), _streams_put_back(model.device):
        for parameter in parameters.values():
            parameter.grad = None
        _loss(model, network, live_text).backward()
        for name, parameter in parameters.items():
            reached[name] = _any_gradient(parameter)
        with torch.no_grad():
            for parameter in parameters.values():
                if parameter.grad is not None and _any_gradient(parameter):
                    parameter.sub_(0.01 * parameter.grad / parameter.grad.abs().max())
                parameter.grad = None
        _loss(model, network, live_text).backward()
        for name, parameter in parameters.items():
            reached[name] = reached[name] or _any_gradient(parameter)
    return reached


def _any_gradient(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())


def _loss(model: SDXLModel, network: Network, live_text: bool) -> torch.Tensor:
    config: Any = model.unet.config
    device, draws = model.device, Draws(_SEED)
    batch = len(_CAPTIONS)
    noisy = draws.normal(0, "noisy", "coverage", (batch, config.in_channels, _SIDE, _SIDE)).to(device)
    target = draws.normal(0, "target", "coverage", (batch, config.in_channels, _SIDE, _SIDE)).to(device)
    if live_text and {"te1", "te2"} & set(network.parts):
        from ..models import encode_captions

        with _autocast(model):
            embeds = encode_captions(model, _CAPTIONS)
        context, pooled = embeds.context_BTD, embeds.pooled_BD
    else:
        pooled_width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        context = draws.normal(0, "context", "coverage", (batch, 77, config.cross_attention_dim)).to(device)
        pooled = draws.normal(0, "pooled", "coverage", (batch, pooled_width)).to(device)
    side = float(_SIDE * 8)
    time_ids = torch.tensor([[side, side, 0.0, 0.0, side, side]] * batch, device=device)
    timesteps = torch.tensor([500] * batch, device=device)
    with _autocast(model):
        prediction = model.denoise(noisy, timesteps, context, pooled, time_ids)
    return (prediction.float() - target).square().mean() * _LOSS_FACTOR


def _autocast(model: SDXLModel) -> torch.autocast:
    """Foreign adapters are float32 and do not cast themselves on a half-precision base."""
    narrow = model.dtype != torch.float32
    return torch.autocast(model.device.type, dtype=model.dtype if narrow else None, enabled=narrow)


@contextmanager
def _streams_put_back(device: torch.device) -> Iterator[None]:
    """Foreign modules may draw from global random streams (DyLoRA, in every pass)."""
    stream = random.getstate()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(_SEED)
            random.seed(_SEED)
            yield
    finally:
        random.setstate(stream)


@contextmanager
def _put_back(network: Network) -> Iterator[None]:
    """Restore weights, gradients and the training mode; dropout is off inside."""
    parameters = dict(network.named_parameters())
    values: Mapping[str, torch.Tensor] = {name: p.detach().clone() for name, p in parameters.items()}
    gradients = {name: p.grad for name, p in parameters.items()}
    training = network.container.training
    network.eval()
    try:
        yield
    finally:
        network.train(training)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(values[name])
                parameter.grad = gradients[name]
