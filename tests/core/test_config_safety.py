"""Rules of numerical safety: every refusal names both settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainer_core.config import TrainConfig
from trainer_core.config_rules import advice
from trainer_core.config_rules_safety import SAFETY_RULES


def found(**sections: dict[str, Any]) -> list[str]:
    config = TrainConfig()
    for name, fields in sections.items():
        config = replace(config, **{name: replace(getattr(config, name), **fields)})
    return [str(problem) for rule in SAFETY_RULES for problem in rule(config)]


def test_the_defaults_hold() -> None:
    assert found() == []


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"checkpoint": {"every_steps": 0, "every_minutes": 0.0}}, ("safety.ladder", "checkpoint.every_steps")),
        ({"precision": {"min_loss_scale": 2.0**20}}, ("precision.min_loss_scale", "precision.initial_loss_scale")),
        ({"precision": {"max_loss_scale": 2.0}}, ("precision.max_loss_scale", "precision.initial_loss_scale")),
        (
            {"safety": {"sanitize": True}, "precision": {"compute": "bf16"}},
            ("safety.sanitize", "precision.compute = bf16"),
        ),
        ({"safety": {"rungs": ("rolback",)}}, ("safety.rungs", "Did you mean", "rollback")),
        ({"safety": {"rungs": ("rollback", "full_weights")}}, ("safety.rungs", "full_weights", "not in this version")),
        (
            {"safety": {"rungs": ("rollback", "freeze_module"), "diagnose": False}},
            ("safety.rungs", "freeze_module", "safety.diagnose"),
        ),
        ({"run": {"drill": "nan-latent"}, "model": {"path": "a.safetensors"}}, ("run.drill", "model.path", "no toy")),
        ({"run": {"drill": "nan-latents"}, "model": {"path": "toy"}}, ("run.drill", "Did you mean", "nan-latent")),
        ({"safety": {"rungs": ()}}, ("safety.rungs", "safety.ladder")),
        ({"safety": {"max_rollbacks": 0}}, ("safety.rungs", "safety.max_rollbacks")),
        ({"safety": {"rungs": ("rollback", "rollback")}}, ("safety.rungs", "twice")),
        ({"gradient": {"zclip_z": 3.0}}, ("gradient.zclip_z", "gradient.clip = fixed")),
    ],
)
def test_contradictions_are_refused_with_both_names(sections: dict[str, Any], names: tuple[str, ...]) -> None:
    (problem,) = found(**sections)
    for name in names:
        assert name in problem


def test_without_the_ladder_no_checkpoints_are_needed() -> None:
    assert found(checkpoint={"every_steps": 0, "every_minutes": 0.0}, safety={"ladder": False, "rungs": ()}) == []


def test_a_percentile_below_half_is_told() -> None:
    config = TrainConfig()
    config = replace(config, gradient=replace(config.gradient, clip="percentile"))
    assert any("90 % of the steps are clipped by design" in line for line in advice(config))
