"""Samples from a toy folder, their score by the shipped classifier, and contact sheets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import EulerDiscreteScheduler
from PIL import Image
from torch import Tensor

from toy_unet import Conditioner
from trainer_core.draws import Draws
from trainer_core.toy import shapes
from trainer_core.toy.classifier import Classifier, judge
from trainer_core.toy.folder import SCHEDULER, ToyModels


@torch.no_grad()
def sample(
    models: ToyModels,
    conditioner: Conditioner,
    prompts: Sequence[str],
    *,
    seed: int,
    size_hw: tuple[int, int] = (64, 64),
    steps: int = 20,
    guidance: float = 3.0,
) -> Tensor:
    """Images (B, 3, H, W) in [0, 1], one a prompt, with Euler steps and classifier-free guidance against ""."""
    scheduler = EulerDiscreteScheduler.from_config(SCHEDULER)
    scheduler.set_timesteps(steps)
    height, width = size_hw
    draws = Draws(seed)
    noise = [draws.normal(0, "toy", "sample", (4, height // 8, width // 8), i) for i in range(len(prompts))]
    latents_BCHW = torch.stack(noise) * scheduler.init_noise_sigma
    context_BTD, pooled_BD = conditioner([*prompts, *[""] * len(prompts)])
    ids_B6 = torch.tensor([[height, width, 0, 0, height, width]], dtype=torch.float32).expand(2 * len(prompts), 6)
    added = {"text_embeds": pooled_BD, "time_ids": ids_B6}
    for step in scheduler.timesteps:
        inputs_BCHW = scheduler.scale_model_input(torch.cat([latents_BCHW] * 2), step)
        predicted = models.unet(inputs_BCHW, step, context_BTD, added_cond_kwargs=added).sample
        wanted, empty = predicted.chunk(2)
        latents_BCHW = scheduler.step(empty + guidance * (wanted - empty), step, latents_BCHW).prev_sample
    factor = float(models.vae.config["scaling_factor"])
    return (models.vae.decode(latents_BCHW / factor).sample / 2 + 0.5).clamp(0, 1)


def score(
    models: ToyModels,
    conditioner: Conditioner,
    classifier: Classifier,
    pairs: Sequence[tuple[str, str]],
    *,
    each: int = 8,
    seed: int = 0,
    size_hw: tuple[int, int] = (64, 64),
) -> tuple[dict[str, float], Tensor]:
    """Shares of samples of "a <colour> <shape>" with the right shape, colour, and both; and the images."""
    wanted = [pair for pair in pairs for _ in range(each)]
    images = []
    for start in range(0, len(wanted), 32):
        part = [shapes.with_article(f"{c} {s}") for c, s in wanted[start : start + 32]]
        images.append(sample(models, conditioner, part, seed=seed + start, size_hw=size_hw))
    images_B3HW = torch.cat(images)
    verdicts = judge(classifier, images_B3HW)
    right_shape = np.array([v.shape == s for v, (_, s) in zip(verdicts, wanted)])
    right_colour = np.array([v.colour == c for v, (c, _) in zip(verdicts, wanted)])
    result = {
        "samples": float(len(wanted)),
        "shape": float(right_shape.mean()),
        "colour": float(right_colour.mean()),
        "both": float((right_shape & right_colour).mean()),
    }
    return result, images_B3HW


def contact_sheet(images_B3HW: Tensor, path: Path, *, columns: int, scale: int = 1) -> None:
    """Save the images as one PNG, row by row, two pixels apart on white."""
    arrays = (images_B3HW.permute(0, 2, 3, 1) * 255).round().byte().numpy()
    count, height, width, _ = arrays.shape
    rows = -(-count // columns)
    sheet = np.full((rows * (height + 2), columns * (width + 2), 3), 255, dtype=np.uint8)
    for i, array in enumerate(arrays):
        y, x = (i // columns) * (height + 2), (i % columns) * (width + 2)
        sheet[y : y + height, x : x + width] = array
    image = Image.fromarray(sheet)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST).save(path, optimize=True)
