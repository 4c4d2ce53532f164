"""Denoising loops of the preview samplers, on diffusers' schedulers.

All noise is a keyed draw of the prompt's seed (`draws.py`): a picture depends on nothing but the model and its prompt,
not on global random state, on the pictures before it, or on its neighbours in the batch.

Samplers and what they are in diffusers:

- `euler`: `EulerDiscreteScheduler` (Karras et al. 2022, algorithm 2 without churn).
- `ddim`: `DPMSolverMultistepScheduler` of order 1, which is DDIM with eta 0 (Lu et al. 2022, "DPM-Solver++").
  `DDIMScheduler` is not used: it assumes evenly spaced timesteps and is wrong where 1000 / steps is far from whole.
- `dpmpp_2m`: the same of order 2 (DPM-Solver++ 2M).
- `euler_a`: the order-1 SDE variant. Its update is the ancestral Euler step (and DDIM with eta 1), and it takes its
  noise as an argument, where `EulerAncestralDiscreteScheduler` would draw it itself.

Timesteps are "trailing" (Lin et al. 2024): the first one is the last training timestep, where the noise really is.

Shapes: B batch, C channel, H height, W width of latents, T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers import DPMSolverMultistepScheduler, EulerDiscreteScheduler

from ..draws import Draws
from .prompts import PreviewPrompt

if TYPE_CHECKING:
    from ..models import SDXLModel

SAMPLERS = ("euler", "euler_a", "dpmpp_2m", "ddim")
_BETAS = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "timestep_spacing": "trailing",
}
_SOLVERS: dict[str, dict[str, Any]] = {
    "ddim": {"solver_order": 1, "algorithm_type": "dpmsolver++"},
    "dpmpp_2m": {"solver_order": 2, "algorithm_type": "dpmsolver++"},
    "euler_a": {"solver_order": 1, "algorithm_type": "sde-dpmsolver++"},
}


class SamplingStopped(Exception):
    """The run was asked to stop while a picture was being sampled."""


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts and negative prompts of a batch."""

    context_BTD: torch.Tensor
    pooled_BD: torch.Tensor
    negative_context_BTD: torch.Tensor
    negative_pooled_BD: torch.Tensor


@torch.no_grad()
def encode_prompts(model: SDXLModel, prompts: Sequence[PreviewPrompt], *, max_token_length: int = 75) -> Conditioning:
    """Text embeddings of prompts and negatives, encoded in one call (an empty negative is encoded, not zeroed).

    The text encoders are used as they are: with the network attached its text adapters act.
    """
    from ..models import encode_captions

    texts = [prompt.text for prompt in prompts] + [prompt.negative for prompt in prompts]
    embeds = encode_captions(model, texts, max_token_length=max_token_length)
    count = len(prompts)
    return Conditioning(
        embeds.context_BTD[:count], embeds.pooled_BD[:count], embeds.context_BTD[count:], embeds.pooled_BD[count:]
    )


def make_scheduler(sampler: str, *, prediction_type: str, zero_terminal_snr: bool) -> Any:
    """A fresh diffusers scheduler; `prediction_type` is "epsilon" or "v"."""
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, got {sampler!r}")
    common = {
        **_BETAS,
        "prediction_type": "v_prediction" if prediction_type == "v" else "epsilon",
        "rescale_betas_zero_snr": zero_terminal_snr,
    }
    if sampler == "euler":
        return EulerDiscreteScheduler(**common)
    return DPMSolverMultistepScheduler(**common, **_SOLVERS[sampler], final_sigmas_type="zero")


@torch.no_grad()
def sample_latents(
    model: SDXLModel,
    conditioning: Conditioning,
    prompts: Sequence[PreviewPrompt],
    *,
    should_stop: Callable[[], bool] | None = None,
    compute: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> torch.Tensor:
    """Denoised latents (B, C, H, W), float32, times the latent scale factor, on the model's device.

    All prompts of a batch share size, steps and sampler; seeds and guidance are their own. A guidance of 1 or less
    means none, as in sd-scripts. `compute` makes the context around every UNet call (autocast); the loop is float32.

    Raises:
        ValueError: the prompts differ in what must be shared.
        SamplingStopped: `should_stop` said so; it is asked before every step.
    """
    first = _shared(prompts)
    device = model.device
    scheduler = make_scheduler(
        first.sampler, prediction_type=model.prediction_type, zero_terminal_snr=model.zero_terminal_snr
    )
    scheduler.set_timesteps(first.steps)  # tables stay on the CPU: no host read in the loop
    shape = (model.unet.config["in_channels"], first.height // model.vae_factor, first.width // model.vae_factor)
    latents_BCHW = _noise(prompts, "preview noise", shape, device) * float(scheduler.init_noise_sigma)
    guided = _Guided(model, conditioning, prompts, compute)
    for index, timestep in enumerate(scheduler.timesteps):
        if should_stop is not None and should_stop():
            raise SamplingStopped
        input_BCHW = scheduler.scale_model_input(latents_BCHW, timestep)
        prediction_BCHW = guided(input_BCHW, float(timestep))
        extra = {}
        if first.sampler == "euler_a":
            extra["variance_noise"] = _noise(prompts, "preview step noise", shape, device, index=index)
        latents_BCHW = scheduler.step(prediction_BCHW, timestep, latents_BCHW, return_dict=False, **extra)[0]
    return latents_BCHW


class _Guided:
    """The UNet with classifier-free guidance (Ho & Salimans 2022): negative + g (positive - negative)."""

    def __init__(
        self,
        model: SDXLModel,
        conditioning: Conditioning,
        prompts: Sequence[PreviewPrompt],
        compute: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.model = model
        self.compute = compute
        self.doubled = any(prompt.guidance > 1.0 for prompt in prompts)
        device = model.device
        context, pooled = [conditioning.context_BTD], [conditioning.pooled_BD]
        if self.doubled:
            context.append(conditioning.negative_context_BTD)
            pooled.append(conditioning.negative_pooled_BD)
        self.context_BTD = torch.cat(context).to(device)
        self.pooled_BD = torch.cat(pooled).to(device)
        scales = [max(prompt.guidance, 1.0) for prompt in prompts]
        self.scale_B111 = torch.tensor(scales, device=device).view(-1, 1, 1, 1)
        size = [(p.height, p.width, 0, 0, p.height, p.width) for p in prompts] * len(context)
        self.time_ids_B6 = torch.tensor(size, dtype=torch.float32, device=device)

    def __call__(self, input_BCHW: torch.Tensor, timestep: float) -> torch.Tensor:
        """Prediction (B, C, H, W) in float32."""
        copies_BCHW = torch.cat([input_BCHW, input_BCHW]) if self.doubled else input_BCHW
        timesteps_B = torch.full((len(copies_BCHW),), timestep, device=copies_BCHW.device)
        with self.compute():
            prediction_BCHW = self.model.denoise(
                copies_BCHW, timesteps_B, self.context_BTD, self.pooled_BD, self.time_ids_B6
            ).float()
        if not self.doubled:
            return prediction_BCHW
        positive_BCHW, negative_BCHW = prediction_BCHW.chunk(2)
        return negative_BCHW + self.scale_B111 * (positive_BCHW - negative_BCHW)


def _shared(prompts: Sequence[PreviewPrompt]) -> PreviewPrompt:
    """The first prompt, after a check that the others agree with it in all that a batch shares."""
    shared = {(p.width, p.height, p.steps, p.sampler) for p in prompts}
    if len(shared) != 1:
        raise ValueError(f"prompts of one batch must share size, steps and sampler, got {sorted(shared)}")
    return prompts[0]


def _noise(
    prompts: Sequence[PreviewPrompt], purpose: str, shape: Sequence[int], device: torch.device, index: int = 0
) -> torch.Tensor:
    return torch.stack([Draws(p.seed).normal(0, "", purpose, shape, index) for p in prompts]).to(device)
