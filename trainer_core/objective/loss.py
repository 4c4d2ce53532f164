"""Elementwise losses and per-sample loss weights.

Shapes: B batch, C channel, H height, W width of latents.
"""

from __future__ import annotations

import math

import torch

from ..config import ObjectiveConfig
from .schedule import TRAIN_TIMESTEPS, NoiseSchedule

_SNR_CAP = 1000.0  # keeps debiased weights finite at timestep 0, where the SNR passes 1000


def elementwise_loss(
    kind: str, prediction: torch.Tensor, target: torch.Tensor, threshold_B: torch.Tensor | None
) -> torch.Tensor:
    """Loss of every element in float32. `threshold_B` is the Huber threshold c of each sample.

    huber is 2c (sqrt(d^2 + c^2) - c) and smooth_l1 is 2 (sqrt(d^2 + c^2) - c): pseudo-Huber (Charbonnier et al. 1997)
    in the two scalings that sd-scripts users know.
    """
    difference = prediction.float() - target.float()
    if kind == "l2":
        return difference.square()
    if kind == "l1":
        return difference.abs()
    if threshold_B is None:
        raise ValueError(f"loss {kind!r} needs a Huber threshold a sample")
    c = threshold_B.view(-1, *([1] * (difference.dim() - 1)))
    shape = 2.0 * ((difference.square() + c.square()).sqrt() - c)
    return shape * c if kind == "huber" else shape


def huber_threshold(config: ObjectiveConfig, schedule: NoiseSchedule, timesteps_B: torch.Tensor) -> torch.Tensor | None:
    """Huber threshold (B,) or None for losses without one. The snr schedule takes no scale, as in sd-scripts."""
    if config.loss not in ("huber", "smooth_l1"):
        return None
    if config.huber_schedule == "constant":
        return torch.full(timesteps_B.shape, config.huber_c * config.huber_scale, device=timesteps_B.device)
    if config.huber_schedule == "exponential":
        decay = math.log(config.huber_c) / TRAIN_TIMESTEPS
        return torch.exp(timesteps_B.float() * decay) * config.huber_scale
    abar_B = schedule.alphas_cumprod[timesteps_B]
    sigma_B = ((1.0 - abar_B) / abar_B).sqrt()
    return (1.0 - config.huber_c) / (1.0 + sigma_B).square() + config.huber_c


def snr_weight(config: ObjectiveConfig, schedule: NoiseSchedule, timesteps_B: torch.Tensor) -> torch.Tensor:
    """Product (B,) of the SNR-based loss weights that are switched on; ones when none is.

    min-SNR: min(snr, gamma) / snr for epsilon, / (snr + 1) for v (Hang et al. 2023, eq. 5 and table 1).
    scale v like noise: snr / (snr + 1), the factor between a v loss and the epsilon loss of the same error.
    v-like loss: 1 + share (snr + 1) / snr, which adds `v_pred_like_loss` times the v loss to an epsilon loss.
    debiased estimation: 1 / sqrt(snr) for epsilon (Yu et al. 2023), 1 / (snr + 1) for v.
    All but min-SNR cap the SNR at 1000, as sd-scripts does.
    """
    snr_B = schedule.snr[timesteps_B]
    weight_B = torch.ones_like(snr_B)
    if config.min_snr_gamma is not None:
        over = snr_B + 1.0 if schedule.prediction_type == "v" else snr_B
        weight_B = weight_B * snr_B.clamp(max=config.min_snr_gamma) / over
    capped_B = snr_B.clamp(max=_SNR_CAP)
    if config.scale_v_pred_loss_like_noise_pred:
        weight_B = weight_B * (capped_B / (capped_B + 1.0))
    if config.v_pred_like_loss > 0:
        weight_B = weight_B * (1.0 + config.v_pred_like_loss / (capped_B / (capped_B + 1.0)))
    if config.debiased_estimation:
        weight_B = weight_B * (1.0 / (capped_B + 1.0) if schedule.prediction_type == "v" else capped_B.rsqrt())
    return weight_B
