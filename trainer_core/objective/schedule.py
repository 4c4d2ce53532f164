"""The noise schedule SDXL was trained with, and what follows from it.

Shapes: B batch, C channel, H height, W width of latents.
"""

from __future__ import annotations

import torch
from diffusers import DDPMScheduler

TRAIN_TIMESTEPS = 1000


class NoiseSchedule:
    """DDPM "scaled linear" betas 0.00085 to 0.012 over 1000 timesteps (Rombach et al. 2022).

    With `zero_terminal_snr`, sqrt(alphas_cumprod) is shifted and scaled so that the last value is 0 (Lin et al. 2024,
    algorithm 1). `snr` (1000,) is alphas_cumprod / (1 - alphas_cumprod) of the schedule *before* that change, as
    sd-scripts has it: the terminal value stays above 0 and SNR weights stay finite.
    """

    def __init__(self, *, prediction_type: str, zero_terminal_snr: bool = False) -> None:
        if prediction_type not in ("epsilon", "v"):
            raise ValueError(f"prediction_type must be 'epsilon' or 'v', got {prediction_type!r}")
        self.prediction_type = prediction_type
        self.zero_terminal_snr = zero_terminal_snr
        plain = _alphas_cumprod(zero_terminal_snr=False)
        self.snr = plain / (1.0 - plain)
        self.alphas_cumprod = _alphas_cumprod(zero_terminal_snr=True) if zero_terminal_snr else plain

    def to(self, device: torch.device | str) -> NoiseSchedule:
        """Move the tables to `device`, in place."""
        self.snr = self.snr.to(device)
        self.alphas_cumprod = self.alphas_cumprod.to(device)
        return self

    def add_noise(
        self, latents_BCHW: torch.Tensor, noise_BCHW: torch.Tensor, timesteps_B: torch.Tensor
    ) -> torch.Tensor:
        """x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise (Ho et al. 2020, eq. 4)."""
        signal_B111, sigma_B111 = self._coefficients(timesteps_B)
        return signal_B111 * latents_BCHW + sigma_B111 * noise_BCHW

    def target(self, latents_BCHW: torch.Tensor, noise_BCHW: torch.Tensor, timesteps_B: torch.Tensor) -> torch.Tensor:
        """The noise, or v = sqrt(abar) noise - sqrt(1 - abar) x_0 (Salimans & Ho 2022): what to predict."""
        if self.prediction_type == "epsilon":
            return noise_BCHW
        signal_B111, sigma_B111 = self._coefficients(timesteps_B)
        return signal_B111 * noise_BCHW - sigma_B111 * latents_BCHW

    def _coefficients(self, timesteps_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        abar_B111 = self.alphas_cumprod[timesteps_B].view(-1, 1, 1, 1)
        return abar_B111.sqrt(), (1.0 - abar_B111).sqrt()


def _alphas_cumprod(*, zero_terminal_snr: bool) -> torch.Tensor:
    scheduler = DDPMScheduler(
        num_train_timesteps=TRAIN_TIMESTEPS,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        rescale_betas_zero_snr=zero_terminal_snr,
        clip_sample=False,
    )
    return scheduler.alphas_cumprod.clone()
