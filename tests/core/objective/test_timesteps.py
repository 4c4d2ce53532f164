"""Timestep distributions against their closed forms, and their keys."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import pytest
import torch

from trainer_core.config import ObjectiveConfig
from trainer_core.draws import Draws
from trainer_core.objective import draw_timestep
from trainer_core.objective.timesteps import logit_normal, mode, shifted

COUNT = 4000
# Kolmogorov's bound for the distance of an empirical distribution at one per mille, plus half a timestep.
DISTANCE = 1.95 / math.sqrt(COUNT) + 0.001


def places(**options: Any) -> list[float]:
    config = ObjectiveConfig(**options)
    width = config.max_timestep - config.min_timestep
    drawn = [draw_timestep(config, Draws(5), 0, f"{i}:0") for i in range(COUNT)]
    assert all(config.min_timestep <= timestep < config.max_timestep for timestep in drawn)
    return sorted((timestep - config.min_timestep + 0.5) / width for timestep in drawn)


def distance(drawn: list[float], cdf: Any) -> float:
    return max(abs((i + 0.5) / len(drawn) - cdf(place)) for i, place in enumerate(drawn))


def inverse_mode(place: float, scale: float) -> float:
    """P(mode(u) <= place): mode falls in u, so it is 1 - the u that gives `place` (found by halving)."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mode(middle, scale) > place else (low, middle)
    return 1.0 - low


@pytest.mark.parametrize(
    ("options", "cdf"),
    [
        ({}, lambda p: p),
        ({"min_timestep": 200, "max_timestep": 700}, lambda p: p),
        (
            {"timestep_distribution": "logit_normal", "timestep_logit_mean": 0.5, "timestep_logit_std": 0.8},
            lambda p: NormalDist(0.5, 0.8).cdf(math.log(p / (1 - p))),
        ),
        ({"timestep_distribution": "mode", "timestep_mode_scale": 1.29}, lambda p: inverse_mode(p, 1.29)),
        ({"timestep_distribution": "mode", "timestep_mode_scale": -0.7}, lambda p: inverse_mode(p, -0.7)),
        ({"timestep_distribution": "shifted", "timestep_shift": 3.0}, lambda p: p / (3.0 - 2.0 * p)),
        (
            {"timestep_distribution": "shifted", "timestep_shift": 3.0, "min_timestep": 100, "max_timestep": 300},
            lambda p: p / (3.0 - 2.0 * p),
        ),
    ],
)
def test_distribution(options: dict[str, Any], cdf: Any) -> None:
    assert distance(places(**options), cdf) < DISTANCE


def test_the_distributions_are_told_apart() -> None:
    """The bound above is tight enough: each one fails against the uniform distribution."""
    for options in (
        {"timestep_distribution": "logit_normal"},
        {"timestep_distribution": "mode"},
        {"timestep_distribution": "shifted"},
    ):
        assert distance(places(**options), lambda p: p) > 2 * DISTANCE


@pytest.mark.parametrize("kind", ["uniform", "logit_normal", "mode", "shifted"])
def test_a_timestep_depends_on_its_key_alone(kind: str) -> None:
    config = ObjectiveConfig(timestep_distribution=kind)
    first = [draw_timestep(config, Draws(3), 2, f"{i}:0") for i in range(20)]
    torch.manual_seed(99)
    assert [draw_timestep(config, Draws(3), 2, f"{i}:0") for i in reversed(range(20))] == first[::-1]
    assert [draw_timestep(config, Draws(3), 3, f"{i}:0") for i in range(20)] != first
    assert [draw_timestep(config, Draws(4), 2, f"{i}:0") for i in range(20)] != first


def test_maps_by_hand() -> None:
    assert logit_normal(0.0, 0.0, 1.0) == 0.5
    assert logit_normal(1.0, 1.0, 2.0) == pytest.approx(1 / (1 + math.exp(-3)))
    assert [mode(u, 0.0) for u in (0.0, 0.25, 1.0)] == [1.0, 0.75, 0.0]
    assert mode(0.5, 1.29) == pytest.approx(0.5)
    assert mode(0.25, 1.29) == pytest.approx(0.75 - 1.29 * (math.cos(math.pi / 8) ** 2 - 0.75))
    assert [shifted(u, 3.0) for u in (0.0, 0.5)] == [0.0, 0.75]
    assert shifted(0.3, 1.0) == pytest.approx(0.3)


def test_the_highest_place_stays_in_the_range() -> None:
    """mode(0) is exactly 1: the timestep is the last one, not one past it."""
    config = ObjectiveConfig(timestep_distribution="mode", min_timestep=0, max_timestep=1000)

    class Zero(Draws):
        def generator(self, epoch: int, sample: str, purpose: str, index: int = 0) -> Any:
            class Fixed:
                def random(self) -> float:
                    return 0.0

            return Fixed()

    assert draw_timestep(config, Zero(0), 0, "a") == 999
