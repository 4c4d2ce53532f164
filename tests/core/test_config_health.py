"""Refusals of gradient health and freezing: with both names, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainer_core.config import TrainConfig
from trainer_core.config_rules import problems


def found(section: str, **values: Any) -> list[str]:
    config = TrainConfig()
    config = replace(config, **{section: replace(getattr(config, section), **values)})
    return [str(problem) for problem in problems(config) if problem.field.startswith(f"{section}.")]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ignore": ("STALLED",)}, ["'STALLED'", "is no verdict", "STALE"]),
        ({"stop_on": ("EXPLODING",)}, ["'EXPLODING'", "cannot end a run by itself"]),
        ({"stop_on": ("STALE",), "ignore": ("STALE",)}, ["health.stop_on", "health.ignore"]),
        ({"rms_warn": 9.0}, ["health.rms_warn", "health.rms_alarm = 8"]),
        ({"slow_every_early": 60}, ["health.slow_every_early", "health.slow_every = 50"]),
        ({"ring_steps": 10}, ["too short"]),
        ({"zero_share": 1.5}, ["must be at most 1"]),
        ({"enabled": False, "stop_on": ("STALE",)}, ["health.enabled is off"]),
    ],
)
def test_health(values: dict[str, Any], words: list[str]) -> None:
    (problem,) = found("health", **values)
    for word in words:
        assert word in problem


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stop_after": ("te1",)}, ["names no target and step", "TARGET:STEP"]),
        ({"stop_after": ("down9:5",)}, ["'down9'", "Targets are"]),
    ],
)
def test_freezing(values: dict[str, Any], words: list[str]) -> None:
    (problem,) = found("freezing", **values)
    for word in words:
        assert word in problem


def test_freezing_needs_health() -> None:
    config = TrainConfig()
    config = replace(
        config, health=replace(config.health, enabled=False), freezing=replace(config.freezing, rule="contribution")
    )
    assert any("health.enabled is off" in str(problem) for problem in problems(config))


def test_the_defaults_are_sound() -> None:
    assert found("health") == []
    assert found("freezing") == []
