"""The UNet and text-encoder stage of `make_toy_sdxl.py`: epsilon prediction on the VAE's latents, as SDXL does it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional
from toy_stages import Loop, to_images
from transformers import CLIPTokenizer

from trainer_core.draws import Draws
from trainer_core.toy import TOY_FOLDER, shapes
from trainer_core.toy.folder import TOY, ToyModels, build_models

PICTURES = 4000
DROPOUT = 0.10


def alphas_cumprod() -> Tensor:
    """The 1,000 cumulative alphas of SDXL's schedule (scaled_linear 0.00085..0.012), float32."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, dim=0).float()


class Conditioner:
    """Captions -> (context, pooled) exactly as design section 5 says."""

    def __init__(self, models: ToyModels, folder: Path) -> None:
        self.encoders = (models.text_encoder, models.text_encoder_2)
        self.tokenizers = [CLIPTokenizer.from_pretrained(folder / n) for n in ("tokenizer", "tokenizer_2")]

    def __call__(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        states = []
        pooled_BD = torch.empty(0)
        for encoder, tokenizer in zip(self.encoders, self.tokenizers, strict=True):
            ids_BT = tokenizer(
                captions, padding="max_length", max_length=77, truncation=True, return_tensors="pt"
            ).input_ids
            output = encoder(ids_BT, output_hidden_states=True)
            states.append(output.hidden_states[-2])
            pooled_BD = output[0]  # of the second encoder: the projected text embedding
        return torch.cat(states, dim=-1), pooled_BD


@dataclass(frozen=True, kw_only=True)
class LatentSet:
    """Encoded training pictures of one size. Latents are scaled."""

    mean_NCHW: Tensor
    std_NCHW: Tensor
    captions: list[str]
    time_ids_N6: Tensor


def size_of(seed: int, index: int) -> tuple[int, int]:
    """(height, width) of training picture `index`: 60 % are 64x64, the rest is spread over the other sizes."""
    generator = shapes.keyed_generator(seed, "training size", index)
    return shapes.SIZES[int(generator.choice(5, p=(0.6, 0.1, 0.1, 0.1, 0.1)))]


def _time_ids(seed: int, index: int, size_hw: tuple[int, int]) -> list[float]:
    """original (h, w), crop (top, left), target (h, w): mostly the true size, at times another original or margin.

    Pictures of any size are scaled to their bucket, so the toy must bear other originals and letterbox margins.
    """
    generator = shapes.keyed_generator(seed, "training time ids", index)
    height, width = size_hw
    scale = float(generator.choice((1.0, 0.75, 1.5, 2.0, 4.0), p=(0.6, 0.1, 0.1, 0.1, 0.1)))
    top, left = 0, 0
    if generator.random() < 0.2:
        margin = int(generator.integers(1, 9))
        top, left = (margin, 0) if generator.random() < 0.5 else (0, margin)
    return [round(height * scale), round(width * scale), top, left, height, width]


@torch.no_grad()
def encode_pictures(vae: AutoencoderKL, *, seed: int) -> tuple[list[LatentSet], float]:
    """Draw and encode the training set, grouped by size. Returns the sets and the scaling factor 1 / std."""
    by_size: dict[tuple[int, int], list[int]] = {}
    for index in range(PICTURES):
        by_size.setdefault(size_of(seed, index), []).append(index)
    raw = []
    for size, indices in sorted(by_size.items(), reverse=True):
        pictures = [shapes.training_picture(seed, i, size) for i in indices]
        means, stds = [], []
        for start in range(0, len(pictures), 50):
            images_B3HW = to_images([p.pixels_HWC for p in pictures[start : start + 50]]) * 2 - 1
            posterior = vae.encode(images_B3HW).latent_dist
            means.append(posterior.mean)
            stds.append(posterior.std)
        ids_N6 = torch.tensor([_time_ids(seed, i, size) for i in indices], dtype=torch.float32)
        raw.append((torch.cat(means), torch.cat(stds), [p.caption for p in pictures], ids_N6))
    values = torch.cat([mean.flatten() for mean, *_ in raw])
    scaling = round(1 / float(values.std()), 4)
    sets = [
        LatentSet(mean_NCHW=m * scaling, std_NCHW=s * scaling, captions=captions, time_ids_N6=ids)
        for m, s, captions, ids in raw
    ]
    print(f"latents: mean {float(values.mean()):.3f} std {float(values.std()):.3f} scaling {scaling}", flush=True)
    return sets, scaling


def train_unet(
    folder: Path, vae: AutoencoderKL, *, seed: int, steps: int = 4500, batch: int = 20
) -> tuple[ToyModels, Loop, float]:
    """Train UNet and both text encoders together. Returns the models, the loop (with EMA) and the scaling factor."""
    models = build_models(TOY, seed=seed)
    models.vae.load_state_dict(vae.state_dict())
    sets, scaling = encode_pictures(vae, seed=seed)
    models.unet.to(memory_format=torch.channels_last)  # about a quarter faster on CPUs, same numbers up to rounding
    conditioner = Conditioner(models, TOY_FOLDER)
    draws, alphas_T = Draws(seed), alphas_cumprod()
    shares = [len(s.captions) / PICTURES for s in sets]

    def loss_of(step: int) -> Tensor:
        generator = draws.generator(0, "toy", "unet batch", step)
        chosen = sets[int(generator.choice(len(sets), p=shares))]
        picks = torch.from_numpy(generator.integers(0, len(chosen.captions), batch))
        captions = [chosen.captions[i] if generator.random() >= DROPOUT else "" for i in picks.tolist()]
        # Stratified timesteps: one in each of `batch` equal bands, which steadies the loss.
        offsets_B = torch.from_numpy(generator.random(batch))
        timesteps_B = ((torch.arange(batch) + offsets_B) * (1000 / batch)).long().clamp(0, 999)
        shape_BCHW = (batch, *chosen.mean_NCHW.shape[1:])
        jitter_BCHW = draws.normal(0, "toy", "unet latent", shape_BCHW, step)
        noise_BCHW = draws.normal(0, "toy", "unet noise", shape_BCHW, step)
        latents_BCHW = chosen.mean_NCHW[picks] + chosen.std_NCHW[picks] * jitter_BCHW
        alpha_B111 = alphas_T[timesteps_B][:, None, None, None]
        noisy_BCHW = alpha_B111.sqrt() * latents_BCHW + (1 - alpha_B111).sqrt() * noise_BCHW
        context_BTD, pooled_BD = conditioner(captions)
        added = {"text_embeds": pooled_BD, "time_ids": chosen.time_ids_N6[picks]}
        predicted_BCHW = models.unet(noisy_BCHW, timesteps_B, context_BTD, added_cond_kwargs=added).sample
        return functional.mse_loss(predicted_BCHW, noise_BCHW)

    trained = {"unet": models.unet, "text_encoder": models.text_encoder, "text_encoder_2": models.text_encoder_2}
    loop = Loop(name="unet", folder=folder, modules=trained, steps=steps, peak_rate=5e-4)
    loop.run(loss_of)
    return models, loop, scaling
