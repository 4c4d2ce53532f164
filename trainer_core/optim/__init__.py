"""Optimizers, learning-rate schedules, and the one object that decides whether a step is applied."""

from __future__ import annotations

from .optimizers import build_optimizer, load_optimizer_state, optimizer_state
from .precision import Precision, StepReading, StepVerdict
from .schedules import learning_rate_factor

__all__ = [
    "Precision",
    "StepReading",
    "StepVerdict",
    "build_optimizer",
    "learning_rate_factor",
    "load_optimizer_state",
    "optimizer_state",
]
