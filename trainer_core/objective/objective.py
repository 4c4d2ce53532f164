"""One micro-batch: draw noise and timesteps for each sample, then turn a prediction into a per-sample loss.

Shapes: B batch, C channel, H height, W width of latents, T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..config import ObjectiveConfig
from ..config_rules_training import weight_problems
from ..draws import Draws
from ..errors import ConfigError
from .loss import elementwise_loss, huber_threshold, snr_weight
from .noise import adaptive_strength, input_perturbation, multires_noise, multires_sizes, offset_noise
from .schedule import NoiseSchedule
from .timesteps import draw_timestep

Denoise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class NoisedBatch:
    """What the denoiser sees and what it should answer; float32, on the schedule's device."""

    noisy_BCHW: torch.Tensor
    target_BCHW: torch.Tensor
    timesteps_B: torch.Tensor


class Objective:
    """Draws and losses of a run. Every draw is keyed by sample, so a batch's make-up changes nothing.

    Raises:
        ConfigError: a loss weight does not fit what the model predicts.
    """

    def __init__(self, schedule: NoiseSchedule, config: ObjectiveConfig, *, vae_scale: float) -> None:
        if trouble := weight_problems(config, schedule.prediction_type):
            raise ConfigError(trouble)
        self.schedule = schedule
        self.config = config
        self.vae_scale = vae_scale

    def latents(
        self, mean_BCHW: torch.Tensor, std_BCHW: torch.Tensor, draws: Draws, epoch: int, sample_keys: Sequence[str]
    ) -> torch.Tensor:
        """A sample of the VAE's posterior, or its mode, times the latent scale factor; float32."""
        if self.config.latents == "mode":
            return mean_BCHW * self.vae_scale
        noise_BCHW = _normals(draws, epoch, sample_keys, "posterior", mean_BCHW)
        return (mean_BCHW + std_BCHW * noise_BCHW) * self.vae_scale

    def noised(self, latents_BCHW: torch.Tensor, draws: Draws, epoch: int, sample_keys: Sequence[str]) -> NoisedBatch:
        """Noise and timestep of each sample, the noised latents, and the target."""
        config = self.config
        timesteps = [draw_timestep(config, draws, epoch, key) for key in sample_keys]
        timesteps_B = torch.tensor(timesteps, dtype=torch.long, device=latents_BCHW.device)
        noise_BCHW = self._noise(latents_BCHW, draws, epoch, sample_keys)
        entering_BCHW = noise_BCHW
        if config.ip_noise_gamma > 0:
            gamma: float | torch.Tensor = config.ip_noise_gamma
            if config.ip_noise_gamma_random_strength:
                gamma = gamma * _uniforms(draws, epoch, sample_keys, "input_perturbation_strength", latents_BCHW)
            draw_BCHW = _normals(draws, epoch, sample_keys, "input_perturbation", latents_BCHW)
            entering_BCHW = input_perturbation(noise_BCHW, draw_BCHW, gamma)
        return NoisedBatch(
            noisy_BCHW=self.schedule.add_noise(latents_BCHW, entering_BCHW, timesteps_B),
            target_BCHW=self.schedule.target(latents_BCHW, noise_BCHW, timesteps_B),
            timesteps_B=timesteps_B,
        )

    def loss(
        self,
        prediction_BCHW: torch.Tensor,
        noised: NoisedBatch,
        weights_B: torch.Tensor | None = None,
        mask_B1HW: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Per-sample loss (B,), float32: elementwise, mask, mean over C, H, W, sample weight, SNR weights.

        The masked mean is over the whole area, not over the mask's, as sd-scripts does.
        """
        threshold_B = huber_threshold(self.config, self.schedule, noised.timesteps_B)
        loss_BCHW = elementwise_loss(self.config.loss, prediction_BCHW, noised.target_BCHW, threshold_B)
        if mask_B1HW is not None:
            loss_BCHW = loss_BCHW * mask_B1HW
        loss_B = loss_BCHW.mean(dim=(1, 2, 3))
        if weights_B is not None:
            loss_B = loss_B * weights_B
        return loss_B * snr_weight(self.config, self.schedule, noised.timesteps_B)

    def _noise(self, latents_BCHW: torch.Tensor, draws: Draws, epoch: int, sample_keys: Sequence[str]) -> torch.Tensor:
        config = self.config
        noise_BCHW = _normals(draws, epoch, sample_keys, "noise", latents_BCHW)
        if config.noise_offset > 0:
            strength: float | torch.Tensor = config.noise_offset
            if config.noise_offset_random_strength:
                strength = strength * _uniforms(draws, epoch, sample_keys, "noise_offset_strength", latents_BCHW)
            if config.adaptive_noise_scale != 0:
                strength = adaptive_strength(latents_BCHW, strength, config.adaptive_noise_scale)
            draw_BC11 = _normals(draws, epoch, sample_keys, "noise_offset", latents_BCHW[:, :, :1, :1])
            noise_BCHW = offset_noise(noise_BCHW, draw_BC11, strength)
        if config.multires_noise_iterations > 0:
            noise_BCHW = torch.cat(
                [self._pyramid(noise_BCHW[i : i + 1], draws, epoch, key) for i, key in enumerate(sample_keys)]
            )
        return noise_BCHW

    def _pyramid(self, noise_1CHW: torch.Tensor, draws: Draws, epoch: int, key: str) -> torch.Tensor:
        count = self.config.multires_noise_iterations
        # Each level shrinks by its own factor in [2, 4).
        ratios = (draws.uniform(epoch, key, "multires_ratio", (count,)) * 2.0 + 2.0).tolist()
        channels, height, width = noise_1CHW.shape[1:]
        levels = [
            draws.normal(epoch, key, "multires_noise", (1, channels, *size), index=level).to(noise_1CHW.device)
            for level, size in enumerate(multires_sizes(height, width, ratios))
        ]
        return multires_noise(noise_1CHW, levels, self.config.multires_noise_discount)


def _normals(
    draws: Draws, epoch: int, sample_keys: Sequence[str], purpose: str, like_BCHW: torch.Tensor
) -> torch.Tensor:
    """A tensor like `like_BCHW`, each sample from its own key."""
    shape = like_BCHW.shape[1:]
    return torch.stack([draws.normal(epoch, key, purpose, shape) for key in sample_keys]).to(like_BCHW.device)


def _uniforms(
    draws: Draws, epoch: int, sample_keys: Sequence[str], purpose: str, like_BCHW: torch.Tensor
) -> torch.Tensor:
    """One number in [0, 1) a sample, shape (B, 1, 1, 1). sd-scripts draws one for the whole batch."""
    numbers = [draws.uniform(epoch, key, purpose, (1, 1, 1)) for key in sample_keys]
    return torch.stack(numbers).to(like_BCHW.device)
