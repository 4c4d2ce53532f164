"""One fixed pass through a part of the model, to compare two states of its adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..draws import Draws

if TYPE_CHECKING:
    from ..models import SDXLModel

PROBE_CAPTION = "a photo of a red square next to a blue circle"
_PROBE_SEED = 20_260_101
_PROBE_SIDE = 16


def probe_part(model: SDXLModel, part: str) -> torch.Tensor:
    """Output of one part ("unet", "te1", "te2") for fixed inputs, as one flat float32 vector."""
    if part != "unet":
        from ..models import encode_captions

        embeds = encode_captions(model, [PROBE_CAPTION])
        width = int(model.text_encoders[0].config.hidden_size)
        if part == "te1":
            return embeds.context_BTD[..., :width].float().flatten()
        return torch.cat([embeds.context_BTD[..., width:].float().flatten(), embeds.pooled_BD.float().flatten()])
    config: Any = model.unet.config
    device = model.unet.device
    draws = Draws(_PROBE_SEED)
    time_width = 6 * config.addition_time_embed_dim
    shapes = {
        "noisy": (1, config.in_channels, _PROBE_SIDE, _PROBE_SIDE),
        "context": (1, 77, config.cross_attention_dim),
        "pooled": (1, config.projection_class_embeddings_input_dim - time_width),
    }
    noisy, context, pooled = (draws.normal(0, name, "proof", shape).to(device) for name, shape in shapes.items())
    side = float(_PROBE_SIDE * 8)
    time_ids = torch.tensor([[side, side, 0.0, 0.0, side, side]], device=device)
    output = model.denoise(noisy, torch.tensor([500], device=device), context, pooled, time_ids)
    return output.float().flatten()


def relative_difference(value: torch.Tensor, reference: torch.Tensor) -> float:
    """|value - reference| as a share of |reference|."""
    norm = float(reference.norm())
    return float((value - reference).norm()) / norm if norm > 0 else float(value.norm())
