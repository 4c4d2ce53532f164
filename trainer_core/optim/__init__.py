"""Optimizers, learning-rate schedules, averaged weights, and the object that decides whether a step is applied."""

from __future__ import annotations

from .ema import Ema
from .live_weights import LiveWeights
from .optimizers import build_optimizer, effective_rates, set_learning_rates
from .precision import Precision, StepReading, StepVerdict
from .schedules import learning_rate_factor, schedule_problem
from .state import load_optimizer_state, optimizer_state

__all__ = [
    "Ema",
    "LiveWeights",
    "Precision",
    "StepReading",
    "StepVerdict",
    "build_optimizer",
    "effective_rates",
    "learning_rate_factor",
    "load_optimizer_state",
    "optimizer_state",
    "schedule_problem",
    "set_learning_rates",
]
