"""Whole runs with other optimizers than AdamW, with averaged weights, and what is refused before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_setup import Recorder, small_config, train
from safetensors import safe_open
from safetensors.torch import load_file

from trainer_core.build import resume_run
from trainer_core.config import TrainConfig
from trainer_core.config_optimizers import find_kind, install_command
from trainer_core.errors import ConfigError
from trainer_core.networks.file_check import body_hash

STEPS = {"max_train_steps": 5}
SHORT = {"max_train_steps": 2}
LOOKING: dict[str, Any] = {
    "preview": {"prompts": ("a red circle --s 1 --w 32 --h 32",), "every_steps": 2, "at_start": False},
    "validation": {"enabled": True, "split": 0.0, "every_steps": 2, "bands": 2},
}


@pytest.fixture
def config_for(micro_model: Path, pictures: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    def make(name: str = "out", **sections: dict[str, Any]) -> TrainConfig:
        return small_config(micro_model, pictures, tmp_path / name, **{"run": STEPS, **sections})

    return make


def optimizer(name: str, **options: Any) -> dict[str, Any]:
    kind = find_kind(name)
    assert kind is not None
    if install_command(kind) is not None:
        pytest.skip(f"the library of {name} is not installed")
    rate = 1.0 if kind.rate_free else 1e-3
    return {"type": name, "learning_rate": rate, "te1_lr": None, "te2_lr": None, **options}


@pytest.mark.parametrize(
    "options",
    [
        {"name": "adamwschedulefree"},
        {"name": "adamw", "ema_decay": 0.9, "loraplus_ratio": 4.0},
        {"name": "prodigy", "args": ("d_coef=2",)},
    ],
    ids=lambda options: options["name"],
)
def test_kind_resume_state_with_looks_in_between_is_exact(
    config_for: Callable[..., TrainConfig], options: dict[str, Any]
) -> None:
    """Unbroken without looking = stopped after 3, with previews and validation, resumed: losses, rates and file."""
    chosen = {"optimizer": optimizer(**options)}
    whole, unbroken = train(config_for("whole", **chosen))
    part, before = train(config_for("part", **chosen, **LOOKING), stop_after=3)
    assert part.status == "stopped"
    recorder = Recorder()
    done = resume_run(part.run_dir, sink=recorder)
    assert (done.status, done.step) == ("finished", 5)
    assert before.losses + recorder.losses == unbroken.losses
    rates = [data["lr"] for data in unbroken.of("StepFinished")]
    assert [data["lr"] for data in recorder.of("StepFinished")] == rates[3:]
    assert len(before.of("PreviewReady")) + len(recorder.of("PreviewReady")) == 3
    assert body_hash(done.lora) == body_hash(whole.lora)


def test_the_exported_lora_holds_the_average_and_the_checkpoint_what_is_trained(
    config_for: Callable[..., TrainConfig],
) -> None:
    averaged, one = train(config_for("ema", run=SHORT, optimizer=optimizer("adamw", ema_decay=0.9)))
    plain, two = train(config_for("plain", run=SHORT, optimizer=optimizer("adamw")))
    kept, _ = train(config_for("off", run=SHORT, optimizer=optimizer("adamw", ema_decay=0.9, ema_export=False)))
    assert one.losses == two.losses, "an average must not change what is trained"
    assert body_hash(averaged.lora) != body_hash(plain.lora) == body_hash(kept.lora)
    trained, average = load_file(str(plain.lora)), load_file(str(averaged.lora))
    # The average lags behind: nearer to the start, where lora_up is 0.
    shorter = [
        float(average[name].norm()) < float(value.norm())
        for name, value in trained.items()
        if "lora_up" in name and bool(value.any())
    ]
    assert all(shorter)
    assert shorter


def test_the_file_names_its_optimizer(config_for: Callable[..., TrainConfig]) -> None:
    config = config_for(
        optimizer=optimizer("lion", weight_decay=0.1),
        schedule={"type": "polynomial", "power": 2.0},
        run={"max_train_steps": 1},
        objective={"noise_offset": 0.05, "adaptive_noise_scale": 0.01},
    )
    result, _ = train(config)
    with safe_open(str(result.lora), "pt") as file:
        metadata = file.metadata()
    assert metadata["ss_optimizer"] == "pytorch_optimizer.Lion(weight_decay=0.1)"
    assert (metadata["ss_lr_scheduler"], metadata["ss_adaptive_noise_scale"]) == ("polynomial", "0.01")


def test_kind_step_count_warmup_longer_than_the_epochs_is_refused(config_for: Callable[..., TrainConfig]) -> None:
    """B69: the number of steps follows from the pictures, so the config alone cannot tell; both numbers are said."""
    config = config_for(run={"max_train_steps": None, "max_train_epochs": 2}, schedule={"warmup_steps": 50})
    result, recorder = train(config)
    assert result.status == "failed"
    assert "warmup_steps is 50, the run has" in result.message
    assert not recorder.of("StepFinished")
    assert all(data["phase"] == "scanning" for data in recorder.of("PhaseChanged"))


def test_a_loss_weight_that_does_not_fit_the_model_file_is_refused(config_for: Callable[..., TrainConfig]) -> None:
    """The micro toy predicts noise; that stands in its files, not in the config."""
    with pytest.raises(ConfigError, match="the model predicts noise"):
        train(config_for(objective={"scale_v_pred_loss_like_noise_pred": True}))


def test_kind_side_effects_every_objective_option_trains(config_for: Callable[..., TrainConfig]) -> None:
    """All noise options at once: finite, reproducible, and unlike the plain run."""
    options = {
        "noise_offset": 0.05,
        "noise_offset_random_strength": True,
        "adaptive_noise_scale": 0.01,
        "multires_noise_iterations": 3,
        "ip_noise_gamma": 0.1,
        "ip_noise_gamma_random_strength": True,
        "timestep_distribution": "shifted",
        "v_pred_like_loss": 0.1,
        "loss": "huber",
    }
    torch.manual_seed(1)
    _, first = train(config_for("a", objective=options, run={"max_train_steps": 2}))
    torch.manual_seed(2)
    _, again = train(config_for("b", objective=options, run={"max_train_steps": 2}))
    _, plain = train(config_for("c", run={"max_train_steps": 2}))
    assert first.losses == again.losses != plain.losses
    assert all(0 < loss < 10 for loss in first.losses)
