"""How often each timestep is trained.

Every distribution is a map from a uniform or normal number to a place u in [0, 1), and from there to a timestep of the
range [min_timestep, max_timestep). Higher timesteps hold more noise.

Source: Esser et al. 2024, "Scaling rectified flow transformers", section 3.1 and appendix: logit-normal (eq. 19), mode
sampling with heavy tails (eq. 20), shift (eq. 23). There they are for flow models; here u is the share of SDXL's 1000
timesteps.
"""

from __future__ import annotations

import math

from ..config import ObjectiveConfig
from ..draws import Draws


def draw_timestep(config: ObjectiveConfig, draws: Draws, epoch: int, sample: str) -> int:
    """The timestep of one sample; a function of its key alone."""
    low, high = config.min_timestep, config.max_timestep
    if config.timestep_distribution == "uniform":
        return draws.integer(low, high, epoch, sample, "timestep")
    generator = draws.generator(epoch, sample, "timestep")
    if config.timestep_distribution == "logit_normal":
        place = logit_normal(float(generator.standard_normal()), config.timestep_logit_mean, config.timestep_logit_std)
    elif config.timestep_distribution == "mode":
        place = mode(float(generator.random()), config.timestep_mode_scale)
    elif config.timestep_distribution == "shifted":
        place = shifted(float(generator.random()), config.timestep_shift)
    else:
        raise ValueError(f"no timestep distribution is called {config.timestep_distribution!r}")
    return min(high - 1, low + int(place * (high - low)))


def logit_normal(normal: float, mean: float, std: float) -> float:
    """sigmoid(mean + std normal)."""
    return 1.0 / (1.0 + math.exp(-(mean + std * normal)))


def mode(uniform: float, scale: float) -> float:
    """1 - u - s (cos^2(pi u / 2) - 1 + u), for scales s from -1 to 2 / (pi - 2); s = 0 is uniform."""
    place = 1.0 - uniform - scale * (math.cos(math.pi * uniform / 2.0) ** 2 - 1.0 + uniform)
    return min(1.0, max(0.0, place))


def shifted(uniform: float, shift: float) -> float:
    """shift u / (1 + (shift - 1) u)."""
    return shift * uniform / (1.0 + (shift - 1.0) * uniform)
