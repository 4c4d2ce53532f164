"""The alias table: every name of sd-scripts is understood, explained or refused with what to do instead."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from trainer_core.config_fields import FIELDS
from trainer_core.options import OPTIONS, Resolved, find, habit_notes, parse_argv, resolve
from trainer_core.options_help import short_name, train_help
from trainer_core.options_refused import REFUSED
from trainer_core.options_table import UNDERSTOOD

ISSUE_COMMAND = (
    "--pretrained_model_name_or_path=MODEL --train_data_dir=DATA --output_dir=OUT --resolution=512 "
    "--train_batch_size=4 --gradient_accumulation_steps=4 --learning_rate=1e-4 --lr_scheduler=cosine_with_restarts "
    "--lr_warmup_steps=100 --max_train_steps=1500 --lora_rank=16 --lora_alpha=16 --lora_dropout=0.1 --save_steps=250 "
    '--validation_prompt="a photo of sks dog" --validation_steps=250 --mixed_precision=fp16 --gradient_checkpointing'
)


def ask(line: str) -> Resolved:
    pairs, positional, problems = parse_argv(shlex.split(line))
    resolved = resolve(pairs, text=True)
    resolved.problems[:0] = problems
    assert positional == []
    return resolved


def settings(line: str) -> dict[str, Any]:
    resolved = ask(line)
    assert resolved.problems == []
    return resolved.settings


def test_the_command_of_the_issue() -> None:
    assert settings(ISSUE_COMMAND) == {
        "model.path": "MODEL",
        "dataset.path": "DATA",
        "run.output_dir": "OUT",
        "dataset.resolution": (512, 512),
        "dataset.batch_size": 4,
        "gradient.accumulation": 4,
        "optimizer.learning_rate": 1e-4,
        "schedule.type": "cosine_with_restarts",
        "schedule.warmup_steps": 100.0,
        "run.max_train_steps": 1500,
        "lora.rank": 16,
        "lora.alpha": 16.0,
        "lora.dropout": 0.1,
        "checkpoint.every_steps": 250,
        "checkpoint.lora_every_steps": 250,
        "preview.prompts": ("a photo of sks dog",),
        "preview.every_steps": 250,
        "precision.compute": "fp16",
        "precision.gradient_checkpointing": True,
    }


@pytest.fixture
def theirs(fixtures: Path) -> list[list[Any]]:
    rows = json.loads((fixtures / "sd_scripts_options.json").read_text(encoding="utf-8"))
    assert len(rows) == 197
    return [row for row in rows if row[0] != "-h"]


def test_every_name_of_sd_scripts_is_known(theirs: list[list[Any]]) -> None:
    assert [row[0] for row in theirs if find(row[0]) is None] == []


def test_switches_of_sd_scripts_are_switches_here(theirs: list[list[Any]]) -> None:
    for name, _, action, _, _ in theirs:
        option = find(name)
        assert option is not None
        assert (option.takes == "flag") == (action == "_StoreTrueAction"), name


def test_a_file_with_every_default_of_sd_scripts_is_read(theirs: list[list[Any]]) -> None:
    """Front ends write all options: a refused one passes where it asks for nothing."""
    pairs = [(row[0].removeprefix("--"), row[1]) for row in theirs]
    resolved = resolve(pairs, text=False)
    assert resolved.problems == []
    assert resolved.settings["optimizer.learning_rate"] == 2e-6
    assert resolved.settings["bucket.step"] == 64


def test_refused_options_say_why_and_what_instead(theirs: list[list[Any]]) -> None:
    for name, option in REFUSED.items():
        value = True if option.takes == "flag" else "something"
        resolved = resolve([(f"--{name}", value)], text=True)
        assert len(resolved.problems) == 1, name
        problem = resolved.problems[0]
        assert problem.field == f"--{name}"
        assert problem.why
        assert problem.fix.endswith((".", ")")), name
        assert resolved.settings == {}
        for word in problem.fix.replace(".", " ").replace(",", " ").replace(";", " ").split():
            if word.startswith("--") and "." not in word:
                first = word.removeprefix("--")
                assert find(word) or first in {key.split(".")[0] for key in FIELDS}, f"{name}: {word} does not exist"


def test_understood_options_set_real_fields() -> None:
    odd = {
        "prediction_type": "v_prediction",
        "network_module": "networks.lora",
        "network_args": ["conv_dim=4"],
        "text_encoder_lr": ["1e-5"],
        "optimizer_type": "AdamW",
        "optimizer": "AdamW",
        "optimizer_args": ["weight_decay=0.1"],
        "lr_scheduler_args": ["lr_end=1e-6"],
        "lr_scheduler": "linear",
        "mixed_precision": "bf16",
        "save_precision": "float",
        "save_model_as": "safetensors",
        "sample_sampler": "k_euler_a",
        "num_validation_images": "2",
        "loss_type": "huber",
        "resize_interpolation": "area",
        "image_interpolation_mode": "lanczos",
    }
    for name, option in UNDERSTOOD.items():
        value = True if option.takes == "flag" else odd.get(name, "1")
        resolved = resolve([(f"--{name}", value)], text=True)
        assert resolved.problems == [], name
        assert set(resolved.settings) <= set(FIELDS), name
        says = resolved.settings or resolved.special or resolved.notes
        assert says or name in odd, f"{name} is accepted and does nothing"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--rank 8", {"lora.rank": 8}),
        ("--lora.rank=8", {"lora.rank": 8}),
        ("--network-dim 8", {"lora.rank": 8}),
        ("--network_train_unet_only", {"optimizer.te1_lr": 0.0, "optimizer.te2_lr": 0.0}),
        ("--network_train_unet_only=false", {}),
        ("--train_text_encoder", {"optimizer.te1_lr": None, "optimizer.te2_lr": None}),
        ("--train_text_encoder --text_encoder_lr 5e-5", {"optimizer.te1_lr": 5e-5, "optimizer.te2_lr": 5e-5}),
        ("--text_encoder_lr 1e-5 2e-5", {"optimizer.te1_lr": 1e-5, "optimizer.te2_lr": 2e-5}),
        (
            "--network_train_text_encoder_only",
            {"optimizer.unet_lr": 0.0, "optimizer.te1_lr": None, "optimizer.te2_lr": None},
        ),
        ("--v_parameterization --zero_terminal_snr", {"model.prediction_type": "v", "model.zero_terminal_snr": "true"}),
        ("--prediction_type v_prediction", {"model.prediction_type": "v"}),
        ("--instance_prompt 'a sks dog'", {"dataset.default_caption": "a sks dog"}),
        ("--random_flip", {"dataset.flip": True}),
        ("--dataset.flip false", {"dataset.flip": False}),
        ("--bucket_no_upscale", {"bucket.upscale": False}),
        ("--lr_warmup_steps 10%", {"schedule.warmup_steps": 0.1}),
        ("--lr_scheduler constant_with_warmup", {"schedule.type": "constant"}),
        ("--checkpointing_steps 50", {"checkpoint.every_steps": 50, "checkpoint.lora_every_steps": 50}),
        ("--network_args conv_dim=8 conv_alpha=1", {"lora.conv_rank": 8, "lora.conv_alpha": 1.0}),
        (
            "--optimizer_args weight_decay=0.1 betas=0.9,0.99 eps=1e-7",
            {"optimizer.args": ("weight_decay=0.1", "betas=0.9,0.99", "eps=1e-7")},
        ),
        ("--optimizer_args 'betas=(0.8, 0.9)'", {"optimizer.args": ("betas=(0.8, 0.9)",)}),
        ("--optimizer_type AdamW8bit", {"optimizer.type": "adamw8bit"}),
        ("--optimizer_type pytorch_optimizer.SOAP", {"optimizer.type": "pytorch_optimizer.SOAP"}),
        ("--use_8bit_adam", {"optimizer.type": "adamw8bit"}),
        ("--use_lion_optimizer", {"optimizer.type": "lion"}),
        (
            "--lr_scheduler polynomial --lr_scheduler_power 2",
            {"schedule.type": "polynomial", "schedule.power": 2.0, "schedule.end_lr": 1e-7},
        ),
        (
            "--lr_scheduler polynomial --lr_scheduler_args lr_end=1e-6",
            {"schedule.type": "polynomial", "schedule.end_lr": 1e-6},
        ),
        (
            "--lr_scheduler piecewise_constant --lr_scheduler_args step_rules='1:10,0.1:20,0.01'",
            {"schedule.type": "piecewise_constant", "schedule.step_rules": "1:10,0.1:20,0.01"},
        ),
        ("--lr_decay_steps 20%", {"schedule.decay_steps": 0.2}),
        ("--lr_scheduler_timescale 50", {"schedule.timescale": 50}),
        (
            "--network_args loraplus_lr_ratio=16 loraplus_unet_lr_ratio=8 loraplus_text_encoder_lr_ratio=4",
            {
                "optimizer.loraplus_ratio": 16.0,
                "optimizer.loraplus_unet_ratio": 8.0,
                "optimizer.loraplus_te_ratio": 4.0,
            },
        ),
        (
            "--v_pred_like_loss 0.1 --noise_offset_random_strength",
            {"objective.v_pred_like_loss": 0.1, "objective.noise_offset_random_strength": True},
        ),
        ("--mixed_precision no", {"precision.compute": "fp32"}),
        ("--validation_prompt hi --num_validation_images 3", {"preview.prompts": ("hi", "hi", "hi")}),
        ("--preview.prompts 'a cat --w 64' 'a dog'", {"preview.prompts": ("a cat --w 64", "a dog")}),
        ("--learning_rate -1e-4", {"optimizer.learning_rate": -1e-4}),
        ("--lora.alpha none", {"lora.alpha": None}),
        ("--sample_sampler dpmsolver++", {"preview.sampler": "dpmpp_2m"}),
        ("--no_metadata", {"metadata.minimal": True}),
        ("--rank 4 --rank 8", {"lora.rank": 8}),
    ],
)
def test_what_a_line_means(line: str, expected: dict[str, Any]) -> None:
    assert settings(line) == expected


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--netwrok_dim 8", "Did you mean --network_dim?"),
        ("--text_encoder_lr1 1e-5", "Did you mean --text_encoder_lr?"),
        ("--type x", "Write one of: optimizer.type, schedule.type."),
        ("--lora.rnak 8", "Did you mean --lora.rank?"),
        ("--rank", "Write --rank VALUE."),
        ("--rank eight", "must be a whole number from 1 to 1024"),
        ("--rank 8.5", "must be a whole number from 1 to 1024"),
        ("--network_dim 8 --lora_rank 16", "--network_dim already set lora.rank to '8'"),
        ("--network_args conv_dmi=8", "Did you mean conv_dim?"),
        ("--network_args dropout=0.1", "use --network_dropout"),
        ("--network_args algo=loha", "LyCORIS"),
        ("--network_args conv_dim", "is not key=value"),
        ("--lr_warmup_steps 100%", "below 100%"),
        ("--network_module lycoris.kohya", "networks.lora is"),
        ("--lr_scheduler_args gamma=0.5", "Known in --lr_scheduler_args: step_rules, lr_end."),
        ("--save_model_as ckpt", "only safetensors"),
        ("--report_to wandb", "report.html"),
        ("--save_every_n_epochs 1", "Use --save_every_n_steps."),
        ("--text_encoder_lr 1 2 3", "SDXL has two text encoders"),
        ("--flip_aug=maybe", "=true or =false"),
        ("--num_validation_images 0 --validation_prompt x", "at least 1"),
        ("--sample_prompts p.toml", ".txt"),
    ],
)
def test_what_is_refused_and_why(line: str, part: str) -> None:
    resolved = ask(line)
    assert len(resolved.problems) == 1
    assert part in str(resolved.problems[0])


def test_all_problems_of_a_line_come_together() -> None:
    assert len(ask("--rnak 3 --rank x --v2 --fp8_base --lr_scheduler sine").problems) == 5


def test_a_switch_that_freezes_wins_and_says_so() -> None:
    resolved = ask("--text_encoder_lr 5e-5 --network_train_unet_only")
    assert resolved.settings == {"optimizer.te1_lr": 0.0, "optimizer.te2_lr": 0.0}
    assert "is not used: --network_train_unet_only" in resolved.notes[0]


def test_met_wishes_are_explained() -> None:
    notes = ask("--xformers --cache_latents --no_half_vae --enable_xformers_memory_efficient_attention").notes
    assert len(notes) == 4
    assert "torch's own memory-efficient attention" in notes[0]


def test_equal_wishes_do_not_clash() -> None:
    assert settings("--network_dim 8 --rank 8") == {"lora.rank": 8}
    assert settings("--cache_text_encoder_outputs --cache_text_encoder_outputs_to_disk") == {
        "dataset.cache_text": "true"
    }


def test_other_defaults_of_other_tools_are_told() -> None:
    assert "diffusers would take the rank" in habit_notes(["lora_rank"], {"lora.rank": 8})[0]
    notes = habit_notes(["network_dim"], {"lora.rank": 8})
    assert "sd-scripts would take 1" in notes[0]
    assert "text encoders are not trained" in notes[1]
    said = {"lora.rank": 8, "lora.alpha": 1.0, "optimizer.te1_lr": 0.0}
    assert habit_notes(["network_dim"], said) == []


def test_help_names_every_setting_and_every_alias() -> None:
    everything = train_help(everything=True)
    assert [key for key in FIELDS if f"--{key} " not in everything] == []
    assert [name for name, option in OPTIONS.items() if option.source != "safe-scaler" and name not in everything] == []
    common = train_help()
    assert "--lora.rank" in common
    assert "--lora.rank_dropout" not in common


def test_short_names_are_unambiguous() -> None:
    assert short_name(FIELDS["lora.conv_rank"]) == "conv_rank"
    assert short_name(FIELDS["optimizer.type"]) == "optimizer.type"
    assert short_name(FIELDS["preview.seed"]) == "preview.seed"


def test_the_documentation_is_up_to_date() -> None:
    """`python tools/make_config_docs.py` after a change of a field or an option."""
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("make_config_docs", root / "tools" / "make_config_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text(encoding="utf-8") == module.document()
