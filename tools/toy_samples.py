"""Samples from a toy folder with the product's own loader and sampler, their score, and contact sheets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trainer_core.models import SDXLModel, decode_latents
from trainer_core.toy import shapes
from trainer_core.toy.classifier import Classifier, judge
from trainer_core.validation import PreviewPrompt, encode_prompts, sample_latents

STEPS = 20
BATCH = 16


@torch.inference_mode()
def sample(
    model: SDXLModel,
    prompts: Sequence[str],
    *,
    seed: int,
    size_hw: tuple[int, int] = (64, 64),
    guidance: float = 3.0,
) -> Tensor:
    """Images (B, 3, H, W) in [0, 1], one a prompt: 20 Euler steps; prompt i has seed `seed` + i."""
    wanted = [
        PreviewPrompt(
            text=text,
            negative="",
            width=size_hw[1],
            height=size_hw[0],
            steps=STEPS,
            guidance=guidance,
            seed=seed + i,
            sampler="euler",
        )
        for i, text in enumerate(prompts)
    ]
    images = []
    for start in range(0, len(wanted), BATCH):
        batch = wanted[start : start + BATCH]
        latents_BCHW = sample_latents(model, encode_prompts(model, batch), batch)
        images.append(decode_latents(model.vae, latents_BCHW, model.vae_scale))
    return torch.cat(images)


def score(
    model: SDXLModel,
    classifier: Classifier,
    pairs: Sequence[tuple[str, str]],
    *,
    each: int,
    seed: int = 0,
    size_hw: tuple[int, int] = (64, 64),
    guidance: float = 3.0,
) -> tuple[dict[str, float], Tensor]:
    """Shares of samples of "a <colour> <shape>" with the right shape, colour, and both; and the images."""
    wanted = [pair for pair in pairs for _ in range(each)]
    prompts = [shapes.with_article(f"{colour} {shape}") for colour, shape in wanted]
    images_B3HW = sample(model, prompts, seed=seed, size_hw=size_hw, guidance=guidance)
    verdicts = judge(classifier, images_B3HW)
    right_shape = np.array([v.shape == s for v, (_, s) in zip(verdicts, wanted, strict=True)])
    right_colour = np.array([v.colour == c for v, (c, _) in zip(verdicts, wanted, strict=True)])
    result = {
        "samples": float(len(wanted)),
        "shape": float(right_shape.mean()),
        "colour": float(right_colour.mean()),
        "both": float((right_shape & right_colour).mean()),
    }
    return result, images_B3HW


def contact_sheet(images_B3HW: Tensor, path: Path, *, columns: int) -> None:
    """Save the images as one PNG, row by row, two pixels apart on white."""
    arrays = (images_B3HW.permute(0, 2, 3, 1) * 255).round().byte().numpy()
    count, height, width, _ = arrays.shape
    rows = -(-count // columns)
    sheet = np.full((rows * (height + 2), columns * (width + 2), 3), 255, dtype=np.uint8)
    for i, array in enumerate(arrays):
        y, x = (i // columns) * (height + 2), (i % columns) * (width + 2)
        sheet[y : y + height, x : x + width] = array
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(sheet).quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
