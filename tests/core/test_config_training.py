"""How objective, optimizer and schedule are written: shares and per cent, arguments, sd-scripts' names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer_core.config_fields import FIELDS, BadValue, coerce
from trainer_core.config_io import load_config
from trainer_core.errors import ConfigError
from trainer_core.options import habit_notes, parse_argv, resolve


def settings(line: list[str]) -> dict[str, Any]:
    pairs, _, problems = parse_argv(line)
    resolved = resolve(pairs, text=True)
    assert [*problems, *resolved.problems] == []
    return resolved.settings


@pytest.mark.parametrize("key", ["schedule.warmup_steps", "schedule.decay_steps"])
@pytest.mark.parametrize(
    ("typed", "value"), [("10%", 0.1), (" 2.5 % ", 0.025), ("0%", 0.0), ("100", 100.0), ("0.1", 0.1)]
)
def test_steps_are_written_as_steps_share_or_per_cent(key: str, typed: str, value: float) -> None:
    assert coerce(FIELDS[key], typed, text=True) == pytest.approx(value)


@pytest.mark.parametrize("typed", ["100%", "250%", "-5%", "x%", "%"])
def test_per_cent_that_is_no_share_is_refused(typed: str) -> None:
    """100% would become the number 1, which means one step."""
    with pytest.raises(BadValue, match="from 0% to below 100%"):
        coerce(FIELDS["schedule.warmup_steps"], typed, text=True)


def test_per_cent_belongs_to_steps_only() -> None:
    with pytest.raises(BadValue):
        coerce(FIELDS["optimizer.learning_rate"], "10%", text=True)


def test_a_file_in_our_form(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        """
        [optimizer]
        type = "AdamW"
        args = ["betas=(0.9, 0.99)", "weight_decay=0.1"]
        loraplus_ratio = 16
        ema_decay = 0.99
        [schedule]
        type = "warmup_stable_decay"
        warmup_steps = "10%"
        decay_steps = 0.2
        [objective]
        timestep_distribution = "logit_normal"
        noise_offset = 0.05
        noise_offset_random_strength = true
        """,
        encoding="utf-8",
    )
    config, _ = load_config(file, {}, check=False)
    assert config.optimizer.args == ("betas=(0.9, 0.99)", "weight_decay=0.1")
    assert (config.schedule.warmup_steps, config.schedule.decay_steps) == (0.1, 0.2)
    assert config.objective.noise_offset_random_strength
    assert config.optimizer.loraplus_ratio == 16.0


def test_a_file_of_sd_scripts(tmp_path: Path) -> None:
    file = tmp_path / "kohya.toml"
    file.write_text(
        """
        optimizer_type = "AdamW8bit"
        optimizer_args = ["weight_decay=0.1", "betas=0.9,0.99"]
        lr_scheduler = "cosine_with_min_lr"
        lr_scheduler_min_lr_ratio = 0.1
        lr_scheduler_num_cycles = 1
        lr_warmup_steps = 0.1
        noise_offset = 0.0357
        noise_offset_random_strength = true
        adaptive_noise_scale = 0.00357
        ip_noise_gamma = 0.1
        ip_noise_gamma_random_strength = true
        v_pred_like_loss = 0.05
        network_args = ["loraplus_lr_ratio=16"]
        """,
        encoding="utf-8",
    )
    config, _ = load_config(file, {}, check=False)
    assert (config.optimizer.type, config.optimizer.args) == ("adamw8bit", ("weight_decay=0.1", "betas=0.9,0.99"))
    assert (config.schedule.type, config.schedule.min_lr_ratio, config.schedule.warmup_steps) == (
        "cosine_with_min_lr", 0.1, 0.1,
    )  # fmt: skip
    objective = config.objective
    assert (objective.noise_offset, objective.adaptive_noise_scale, objective.ip_noise_gamma) == (0.0357, 0.00357, 0.1)
    assert objective.noise_offset_random_strength
    assert objective.ip_noise_gamma_random_strength
    assert (objective.v_pred_like_loss, config.optimizer.loraplus_ratio) == (0.05, 16.0)


def test_all_problems_of_the_training_sections_come_together(tmp_path: Path) -> None:
    flags = {
        "optimizer.type": "adamww",
        "schedule.decay_steps": 0.5,
        "objective.adaptive_noise_scale": 0.1,
        "objective.min_snr_gamma": 0.0,
        "optimizer.ema_decay": float("nan"),
    }
    with pytest.raises(ConfigError) as caught:
        load_config(None, flags)
    found = {problem.field for problem in caught.value.problems}
    assert set(flags) <= found


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--optimizer_type AdaFactor", "relative_step"),
    ],
)
def test_habits_of_sd_scripts_that_differ_are_told(line: str, part: str) -> None:
    pairs, _, _ = parse_argv(line.split())
    resolved = resolve(pairs, text=True)
    assert any(part in note for note in habit_notes(resolved.used, resolved.settings))
    ours = settings(["--optimizer.type", "adafactor", "--schedule.type", "polynomial"])
    assert not any(part in note for note in habit_notes(["optimizer.type", "schedule.type"], ours))
