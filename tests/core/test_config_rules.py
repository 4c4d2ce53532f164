"""Every rule of a config, each with a config that breaks only that rule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from trainer_core import config_rules_safety
from trainer_core.config import TrainConfig
from trainer_core.config_fields import FIELDS
from trainer_core.config_io import with_settings
from trainer_core.config_rules import advice, problems


@pytest.fixture
def good(tmp_path: Path) -> TrainConfig:
    (tmp_path / "pictures").mkdir()
    return with_settings(
        TrainConfig(),
        {
            "model.path": "toy",
            "dataset.path": str(tmp_path / "pictures"),
            "run.output_dir": str(tmp_path / "new" / "output"),
            "run.max_train_steps": 100,
        },
    )


def broken(good: TrainConfig, settings: dict[str, Any]) -> list[str]:
    return [f"{problem.field}|{problem}" for problem in problems(with_settings(good, settings))]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("run.seed", -1, "or leave it out (drawn once, printed and stored)."),
        ("run.max_train_steps", 0, "or leave it out (max_train_epochs)."),
        ("run.max_train_epochs", 0, "of at least 1, or leave it out."),
        ("lora.unet_rank", -1, "or leave it out (rank)."),
        ("lora.rank", 0, "Write a whole number from 1 to 1024."),
    ],
)
def test_a_number_that_means_unset_elsewhere_is_told_what_unset_is(
    good: TrainConfig, key: str, value: float, said: str
) -> None:
    (problem,) = [text for text in broken(good, {key: value}) if text.startswith(f"{key}|")]
    assert problem.endswith(said)


def test_a_good_config_has_no_problem(good: TrainConfig) -> None:
    assert problems(good) == []
    assert advice(good) == []


ONE_PROBLEM: list[tuple[dict[str, Any], str, str]] = [
    # single fields
    ({"optimizer.learning_rate": math.nan}, "optimizer.learning_rate", "not a finite number"),
    ({"optimizer.learning_rate": math.inf}, "optimizer.learning_rate", "not a finite number"),
    ({"optimizer.learning_rate": -1e-4}, "optimizer.learning_rate", "cannot be negative"),
    ({"dataset.batch_size": 0}, "dataset.batch_size", "cannot be 0"),
    ({"dataset.batch_size": -1}, "dataset.batch_size", "cannot be negative"),
    ({"gradient.accumulation": 0}, "gradient.accumulation", "cannot be 0"),
    ({"lora.dropout": 1.0}, "lora.dropout", "at most 0.99"),
    ({"lora.rank": 4000}, "lora.rank", "at most 1024"),
    ({"schedule.type": "cosin"}, "schedule.type", "Did you mean cosine?"),
    ({"precision.compute": "fp8"}, "precision.compute", "Allowed: auto, fp32"),
    ({"dataset.max_token_length": 77}, "dataset.max_token_length", "is not known"),
    ({"run.seed": 2**64}, "run.seed", "at most"),
    ({"dataset.resolution": (0, 512)}, "dataset.resolution", "cannot be 0 or negative"),
    ({"dataset.resolution": (-512, 512)}, "dataset.resolution", "cannot be 0 or negative"),
    ({"dataset.resolution": (510, 512)}, "dataset.resolution", "The nearest to 510 is 512"),
    ({"preview.width": 100}, "preview.width", "multiple of 8"),
    ({"run.output_name": "caf\udce9"}, "run.output_name", "no text in this system's encoding"),
    ({"preview.prompts": ("a", "caf\udce9")}, "preview.prompts", "no text in this system's encoding"),
    # what is trained
    ({"optimizer.learning_rate": 0.0}, "optimizer.learning_rate", "nothing would be learnt"),
    ({"optimizer.unet_lr": 0.0}, "optimizer.unet_lr", "no part is trained"),
    ({"lora.unet_rank": 0}, "optimizer.unet_lr", "no part is trained"),
    ({"optimizer.te1_lr": 1e-5, "lora.te1_rank": 0}, "lora.te1_rank", "rank 0"),
    ({"lora.alpha": 0.0}, "lora.alpha", "the LoRA would do nothing"),
    ({"lora.unet_alpha": 0.0}, "lora.unet_alpha", "would be 0"),
    ({"lora.conv_rank": 4, "lora.conv_alpha": 0.0}, "lora.conv_alpha", "would be 0"),
    ({"lora.conv_rank": 4, "optimizer.unet_lr": 0.0, "optimizer.te1_lr": 1e-4}, "lora.conv_rank", "not trained"),
    # caches
    ({"dataset.cache_text": "true", "optimizer.te2_lr": 1e-5}, "dataset.cache_text", "text encoder 2 would be trained"),
    ({"dataset.cache_text": "true", "dataset.shuffle_caption": True}, "dataset.cache_text", "shuffle_caption makes"),
    ({"dataset.cache_text": "true", "dataset.tag_dropout": 0.1}, "dataset.cache_text", "tag_dropout makes"),
    ({"dataset.cache_text": "true", "dataset.wildcards": True}, "dataset.cache_text", "wildcards makes"),
    # length
    ({"run.max_train_steps": None}, "run.max_train_steps", "neither run.max_train_steps nor"),
    ({"schedule.warmup_steps": 100.0}, "schedule.warmup_steps", "all of them would be warm-up"),
    ({"schedule.warmup_steps": 500.0}, "schedule.warmup_steps", "the run has 100 steps"),
    ({"schedule.warmup_steps": 1.5}, "schedule.warmup_steps", "neither whole steps nor a share"),
    # objective
    ({"objective.min_timestep": 500, "objective.max_timestep": 500}, "objective.min_timestep", "leaves no timestep"),
    ({"objective.min_snr_gamma": 0.0}, "objective.min_snr_gamma", "Unset it to switch it off"),
    # buckets
    ({"bucket.step": 20}, "bucket.step", "multiple of 8"),
    ({"bucket.min_size": 512, "bucket.max_size": 256}, "bucket.min_size", "above bucket.max_size"),
    ({"dataset.resolution": (512, 512), "bucket.min_size": 768}, "bucket.min_size", "shorter side"),
    ({"dataset.resolution": (1024, 512), "bucket.max_size": 768}, "bucket.max_size", "longer side"),
    # captions
    ({"dataset.caption_extensions": ()}, "dataset.caption_extensions", "no ending is left"),
    ({"dataset.caption_extensions": ("txt",)}, "dataset.caption_extensions", "with its dot"),
    ({"dataset.caption_encoding": "utf-9"}, "dataset.caption_encoding", "not a known encoding"),
    ({"dataset.background": "wihte"}, "dataset.background", "not a colour"),
    # paths
    ({"model.path": ""}, "model.path", "no base model"),
    ({"model.path": "/no/such.safetensors"}, "model.path", "no such file"),
    ({"model.path": "stabilityai/stable-diffusion-xl-base-1.0"}, "model.path", "hf download"),
    ({"model.vae": "/no/such.safetensors"}, "model.vae", "no such file"),
    ({"dataset.path": ""}, "dataset.path", "no picture folder"),
    ({"dataset.path": "/no/such/folder"}, "dataset.path", "no such folder"),
    ({"dataset.path": __file__}, "dataset.path", "is a file"),
    ({"dataset.prior_path": "/no/such/folder"}, "dataset.prior_path", "no such folder"),
    ({"lora.weights": "/no/such.safetensors"}, "lora.weights", "no such file"),
    ({"preview.prompt_file": "/no/such.txt"}, "preview.prompt_file", "No such file"),
    ({"run.output_dir": ""}, "run.output_dir", "no output folder"),
    ({"run.output_dir": f"{__file__}/x"}, "run.output_dir", "is a file"),
    ({"run.output_name": "a/b"}, "run.output_name", "cannot have (/)"),
    ({"run.output_name": ""}, "run.output_name", "is empty"),
    ({"run.output_name": "CON"}, "run.output_name", "Windows"),
    ({"run.output_name": "x.safetensors"}, "run.output_name", "Write x."),
    ({"preview.prompts": ("a cat --w abc",)}, "preview.prompts", "abc"),
    ({"run.output_name": "x" * 300}, "run.output_name", "300 bytes long"),
    ({"run.device": "gpu"}, "run.device", "no device name"),
    ({"run.device": "cuda0"}, "run.device", "Did you mean cuda:0?"),
]


@pytest.mark.parametrize(("settings", "field", "part"), ONE_PROBLEM)
def test_one_broken_rule_is_one_problem(good: TrainConfig, settings: dict[str, Any], field: str, part: str) -> None:
    found = broken(good, settings)
    assert len(found) == 1, found
    assert found[0].startswith(f"{field}|")
    assert part in found[0]
    assert found[0].rstrip().endswith((".", "?"))  # every problem ends with what to do


def test_steps_and_epochs_together(good: TrainConfig) -> None:
    import dataclasses

    config = dataclasses.replace(good, run=dataclasses.replace(good.run, max_train_epochs=3))
    assert [problem.field for problem in problems(config)] == ["run.max_train_steps"]


def test_prior_pictures(good: TrainConfig, tmp_path: Path) -> None:
    own = good.dataset.path
    assert "of the training pictures themselves" in broken(good, {"dataset.prior_path": f"{own}/."})[0]
    (tmp_path / "prior").mkdir()
    prior = {"dataset.prior_path": str(tmp_path / "prior")}
    assert broken(good, prior) == []
    assert "teach nothing" in broken(good, {**prior, "dataset.prior_loss_weight": 0.0})[0]


def test_all_problems_come_together(good: TrainConfig) -> None:
    settings = {
        "lora.rank": 0,
        "dataset.batch_size": 0,
        "objective.min_snr_gamma": 0.0,
        "dataset.path": "/no/such",
        "run.device": "gpu",
    }
    assert len(broken(good, settings)) == len(settings)


@pytest.mark.parametrize(
    "key", [key for key, spec in FIELDS.items() if spec.kind in ("number", "whole number") and spec.min is not None]
)
def test_every_lower_limit_holds(good: TrainConfig, key: str) -> None:
    low = FIELDS[key].min
    assert low is not None
    if FIELDS[key].kind == "number":
        assert f"{key}|" in broken(good, {key: math.nan})[0]
    assert any(found.startswith(f"{key}|") for found in broken(good, {key: low - 1}))


@pytest.mark.parametrize("key", [key for key, spec in FIELDS.items() if spec.choices])
def test_every_choice_is_allowed_and_nothing_else(good: TrainConfig, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_rules_safety, "find_spec", lambda name: name)  # an 8-bit base asks for torchao
    for choice in FIELDS[key].choices:
        assert not any(found.startswith(f"{key}|") for found in broken(good, {key: choice})), choice
    assert any(found.startswith(f"{key}|") for found in broken(good, {key: "no such choice"}))


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"precision.compute": "fp16", "run.device": "cpu"}, "fit a CPU"),
        ({"schedule.cycles": 3}, "schedule.cycles = 3 has no effect"),
        ({"dataset.keep_tokens": 1}, "keep_tokens has no effect"),
        ({"dataset.caption_dropout": 1.0}, "no sample is trained with its caption"),
        ({"preview.every_steps": 10}, "no preview prompts"),
        ({"optimizer.learning_rate": 0.5}, "far above the usual"),
        ({"lora.rank": 4, "lora.alpha": 64.0}, "more than four times the rank"),
        ({"dataset.shuffle_caption": True}, "captions change each time (shuffle_caption)"),
    ],
)
def test_advice_names_what_is_rarely_meant(good: TrainConfig, settings: dict[str, Any], part: str) -> None:
    config = with_settings(good, settings)
    assert problems(config) == []
    assert [text for text in advice(config) if part in text]


def test_caption_dropout_may_be_cached(good: TrainConfig) -> None:
    """The empty caption is cached along, so dropout needs no live encoding."""
    assert broken(good, {"dataset.cache_text": "true", "dataset.caption_dropout": 0.1}) == []
