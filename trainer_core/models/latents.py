"""Pictures <-> latents, always in fp32 with autocast off: SDXL's VAE overflows in fp16 (cases B01, B02)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import NonFiniteError

if TYPE_CHECKING:
    from diffusers import AutoencoderKL


class LatentStats(NamedTuple):
    """The VAE's Gaussian before the scaling factor: mean and standard deviation, each (B, C, H / 8, W / 8) fp32."""

    mean_BCHW: torch.Tensor
    std_BCHW: torch.Tensor


def encode_images(vae: AutoencoderKL, images_B3HW: torch.Tensor) -> LatentStats:
    """Encode pictures in [-1, 1]. A latent is `(mean + std * noise) * vae_scale`.

    Raises NonFiniteError (with the batch positions as `sample_ids`) instead of ever returning NaN or infinity.
    """
    weight = vae.encoder.conv_in.weight
    images_B3HW = images_B3HW.to(device=weight.device, dtype=torch.float32)
    with torch.autocast(device_type=weight.device.type, enabled=False):
        moments = vae.encode(images_B3HW, return_dict=False)[0]
    stats = LatentStats(moments.mean.float(), moments.std.float())
    _require_finite("The VAE made no usable latents (NaN or infinity)", *stats)
    return stats


def decode_latents(vae: AutoencoderKL, latents_BCHW: torch.Tensor, vae_scale: float) -> torch.Tensor:
    """Decode scaled latents to pictures in [0, 1], (B, 3, H, W) fp32. Raises NonFiniteError on NaN or infinity."""
    weight = vae.decoder.conv_in.weight
    latents_BCHW = latents_BCHW.to(device=weight.device, dtype=torch.float32) / vae_scale
    with torch.autocast(device_type=weight.device.type, enabled=False):
        decoded: Any = vae.decode(latents_BCHW, return_dict=False)  # type: ignore[arg-type]  # diffusers says FloatTensor
    images_B3HW: torch.Tensor = decoded[0]
    _require_finite("The VAE made no usable picture (NaN or infinity)", images_B3HW)
    return (images_B3HW.float() / 2 + 0.5).clamp(0, 1)


def _require_finite(message: str, *tensors: torch.Tensor) -> None:
    bad = torch.stack([~torch.isfinite(tensor).flatten(1).all(dim=1) for tensor in tensors]).any(dim=0)
    if bool(bad.any()):
        places = [str(index) for index in bad.nonzero().flatten().tolist()]
        raise NonFiniteError(
            f"{message} for position {', '.join(places)} of the batch, in fp32. The picture holds unusual values "
            "or the VAE is damaged: look at the picture, and give another VAE (model.vae) if it is fine.",
            sample_ids=places,
        )
