"""Variants of the training noise. Random input comes as arguments, so keyed draws and golden tests feed the same code.

Shapes: B batch, C channel, H height, W width of latents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F  # noqa: N812 - the name every torch user knows


def offset_noise(noise_BCHW: torch.Tensor, draw_BC11: torch.Tensor, strength: float | torch.Tensor) -> torch.Tensor:
    """Noise plus one normal number a channel times `strength`, so that the mean of a picture can move.

    Source: N. Guttenberg, "Diffusion with offset noise", 2023.
    """
    return noise_BCHW + strength * draw_BC11


def adaptive_strength(latents_BCHW: torch.Tensor, strength: float | torch.Tensor, scale: float) -> torch.Tensor:
    """Strength (B, C, 1, 1) of offset noise: `strength` plus `scale` times |mean| of each latent channel, at least 0.

    A picture far from grey gets more (or, with a scale below 0, less) of it. Source: sd-scripts' option.
    """
    return (strength + scale * latents_BCHW.mean(dim=(2, 3), keepdim=True).abs()).clamp(min=0.0)


def multires_noise(
    noise_BCHW: torch.Tensor,
    draws: Sequence[torch.Tensor],
    discount: float,
    *,
    per_sample: bool = True,
) -> torch.Tensor:
    """Pyramid noise: each of `draws` (B, C, h_i, w_i) is enlarged bilinearly and added with weight discount**i.

    The sum is divided by its standard deviation: of each sample by default, so that a picture's noise does not depend
    on its neighbours in the batch; of the whole batch with `per_sample=False`, as sd-scripts does.
    Source: "Multi-resolution noise for diffusion model training", J. Whitaker, 2023.
    """
    total_BCHW = noise_BCHW
    for level, draw in enumerate(draws):
        grown_BCHW = F.interpolate(draw, size=noise_BCHW.shape[-2:], mode="bilinear", align_corners=False)
        total_BCHW = total_BCHW + grown_BCHW * discount**level
    if per_sample:
        return total_BCHW / total_BCHW.std(dim=(1, 2, 3), keepdim=True)
    return total_BCHW / total_BCHW.std()


def multires_sizes(height: int, width: int, ratios: Sequence[float]) -> list[tuple[int, int]]:
    """Sizes of the pyramid levels: side / ratios[i]**i, at least 1; stops after the first level with a side of 1."""
    sizes = []
    for level, ratio in enumerate(ratios):
        size = (max(1, int(height / ratio**level)), max(1, int(width / ratio**level)))
        sizes.append(size)
        if 1 in size:
            break
    return sizes


def input_perturbation(noise_BCHW: torch.Tensor, draw_BCHW: torch.Tensor, gamma: float | torch.Tensor) -> torch.Tensor:
    """Noise used for x_t only; the target keeps the clean noise (Ning et al. 2023, algorithm 1)."""
    return noise_BCHW + gamma * draw_BCHW
