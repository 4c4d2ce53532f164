"""From clean latents to a per-sample loss: noise, timesteps, target, loss, loss weights."""

from __future__ import annotations

from .loss import elementwise_loss, huber_threshold, snr_weight
from .noise import input_perturbation, multires_noise, offset_noise
from .objective import NoisedBatch, Objective
from .schedule import NoiseSchedule

__all__ = [
    "NoiseSchedule",
    "NoisedBatch",
    "Objective",
    "elementwise_loss",
    "huber_threshold",
    "input_perturbation",
    "multires_noise",
    "offset_noise",
    "snr_weight",
]
