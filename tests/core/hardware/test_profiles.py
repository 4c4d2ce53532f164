"""Profiles by memory: what is chosen for full-size SDXL, why, and what is left alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_setup import small_config

from trainer_core.config import TrainConfig
from trainer_core.errors import ConfigError
from trainer_core.hardware import profiles
from trainer_core.hardware.profiles import CAPACITIES, FILLED, Device, apply_profile, choose
from trainer_core.memory.estimate import GIB, sdxl_need
from trainer_core.prepare import create_run

ASKED: dict[str, Any] = {
    "targets": "all transformer layers (kohya's set)", "rank": 16, "batch": 8, "area": 1024 * 1024, "recompute": False,
    "text_cached": True, "moment_bytes": 8.0, "average": False,
}  # fmt: skip
GPU = Device("cuda", 23.6)


@pytest.mark.parametrize(
    ("profile", "recompute", "micro_batch"), [("12gb", True, 4), ("24gb", False, 1), ("40gb+", False, 3)]
)
def test_what_is_chosen_fits_and_has_a_reason(profile: str, recompute: bool, micro_batch: int) -> None:
    choice = choose(profile, ASKED, GPU)
    assert choice.settings["precision.gradient_checkpointing"] is recompute
    assert choice.settings["memory.micro_batch"] == micro_batch
    asked = {**ASKED, "compute": "bf16", "recompute": recompute, "batch": micro_batch}
    assert sdxl_need(**asked).total <= FILLED * CAPACITIES[profile] * GIB
    asked["batch"] += 1
    assert sdxl_need(**asked).total > FILLED * CAPACITIES[profile] * GIB, "one more would not fit"
    assert len(choice.reasons) == len(choice.settings)
    assert not choice.notes


def test_8_gb_are_too_few_and_what_would_help_is_said() -> None:
    choice = choose("8gb", ASKED, GPU)
    assert choice.settings["precision.gradient_checkpointing"] is True
    assert choice.settings["memory.micro_batch"] == 1
    assert "does not fit by the estimate" in choice.notes[0]
    assert "optimizer.type = adamw8bit" in choice.notes[0]
    smaller = choose("8gb", {**ASKED, "area": 512 * 512, "targets": "attention", "moment_bytes": 2.0}, GPU)
    assert not smaller.notes


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (Device("cuda", 7.8), "8gb"),
        (Device("cuda", 11.8), "12gb"),
        (Device("cuda", 15.9), "12gb"),
        (Device("cuda", 23.6), "24gb"),
        (Device("cuda", 79.0), "40gb+"),
        (Device("cpu", 64.0), "cpu"),
        (Device("mps", 64.0), "cpu"),
    ],
)
def test_auto_takes_what_is_there(device: Device, name: str) -> None:
    assert choose("auto", ASKED, device).name == name


def test_auto_counts_the_devices_own_memory() -> None:
    """16 GB lie between two profiles: one picture fits there without recomputation only at half the area."""
    sixteen = Device("cuda", 15.9)
    assert choose("auto", ASKED, sixteen).settings["precision.gradient_checkpointing"] is True
    half = choose("auto", {**ASKED, "area": 512 * 1024}, sixteen)
    assert half.settings["precision.gradient_checkpointing"] is False


def test_a_card_without_bf16_computes_in_fp16() -> None:
    choice = choose("24gb", ASKED, Device("cuda", 24.0, bf16=False))
    assert choice.settings["precision.compute"] == "fp16"
    assert "this card has no bf16" in choice.reasons[0]


def test_what_was_set_stays_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "_asked", lambda config: ASKED)
    config = TrainConfig()
    config = replace(
        config,
        hardware=replace(config.hardware, profile="12gb"),
        memory=replace(config.memory, micro_batch=1),
    )
    changed, told = apply_profile(config, GPU)
    assert changed.memory.micro_batch == 1
    assert changed.precision.gradient_checkpointing
    assert changed.precision.compute == "bf16"
    assert any("memory.micro_batch stays 1, as you set it" in line for line in told)
    assert any("gradient_checkpointing = true: without it one picture does not fit (estimated" in line for line in told)
    assert replace(changed, precision=config.precision) == config, "nothing else"
    assert apply_profile(TrainConfig(), GPU) == (TrainConfig(), [])


def test_other_models_keep_their_settings_and_it_is_said(micro_model: Path, pictures: Path, tmp_path: Path) -> None:
    config = small_config(micro_model, pictures, tmp_path, hardware={"profile": "auto"})
    stored = create_run(config, ["before"]).read_config()
    assert stored["config"]["precision"]["gradient_checkpointing"] is False
    assert stored["notes"][0] == "before"
    assert stored["notes"][1].startswith("hardware.profile = auto: the model is not a full-size SDXL")


def test_a_profile_that_contradicts_a_setting_is_refused_with_both_names(
    micro_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "_asked", lambda config: ASKED)
    config = small_config(micro_model, pictures, tmp_path, hardware={"profile": "12gb"}, safety={"sanitize": True})
    with pytest.raises(ConfigError, match=r"safety.sanitize.*precision.compute"):
        create_run(config)
