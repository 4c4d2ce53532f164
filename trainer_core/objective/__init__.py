"""From clean latents to a per-sample loss: noise, timesteps, target, loss, loss weights."""

from __future__ import annotations

from .loss import elementwise_loss, huber_threshold, snr_weight
from .noise import adaptive_strength, input_perturbation, multires_noise, offset_noise
from .objective import NoisedBatch, Objective
from .schedule import NoiseSchedule
from .timesteps import draw_timestep

__all__ = [
    "NoiseSchedule",
    "NoisedBatch",
    "Objective",
    "adaptive_strength",
    "draw_timestep",
    "elementwise_loss",
    "huber_threshold",
    "input_perturbation",
    "multires_noise",
    "offset_noise",
    "snr_weight",
]
