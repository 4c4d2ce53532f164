"""Reading, writing and layering of configs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from trainer_core.config import FORMAT_VERSION, SECTIONS, TrainConfig
from trainer_core.config_fields import FIELDS, coerce
from trainer_core.config_io import from_dict, load_config, merge, migrate, to_dict, with_settings
from trainer_core.config_presets import PRESETS
from trainer_core.errors import ConfigError


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def fields_of(error: pytest.ExceptionInfo[ConfigError]) -> list[str]:
    return [problem.field for problem in error.value.problems]


def load(file: Path | None = None, flags: dict[str, object] | None = None, preset: str | None = None) -> TrainConfig:
    return load_config(file, flags or {}, preset, check=False)[0]


def test_default_survives_json() -> None:
    config = TrainConfig()
    assert from_dict(json.loads(json.dumps(to_dict(config), allow_nan=False))) == config


def test_every_field_survives_json_with_another_value() -> None:
    other = {
        "text": "other",
        "whole number": 7,
        "number": 0.25,
        "size": (640, 512),
        "list of texts": ("one", "two"),
    }
    settings = {
        key: (not spec.default) if spec.kind == "true or false" else (spec.choices or (other[spec.kind],))[-1]
        for key, spec in FIELDS.items()
        if key != "run.max_train_epochs"
    }
    config = with_settings(TrainConfig(), settings)
    changed = [key for key in settings if settings[key] != FIELDS[key].default]
    assert len(changed) > 100
    again = from_dict(json.loads(json.dumps(to_dict(config))))
    assert again == config
    for key in changed:
        section, _, name = key.partition(".")
        assert getattr(getattr(again, section), name) == settings[key], key


def test_defaults_are_of_their_declared_types() -> None:
    for key, spec in FIELDS.items():
        assert coerce(spec, spec.default) == spec.default, key
        assert spec.help, key


def test_toml_sections(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        [model]
        path = "toy"
        [lora]
        rank = 8
        alpha = 4
        [dataset]
        resolution = [64, 48]
        cache_text = true
        [run]
        max_train_steps = 1e3
        """,
    )
    config = load(file)
    assert config.model.path == "toy"
    assert config.lora.alpha == 4.0
    assert isinstance(config.lora.alpha, float)
    assert config.dataset.resolution == (64, 48)
    assert config.dataset.cache_text == "true"
    assert config.run.max_train_steps == 1000
    assert isinstance(config.run.max_train_steps, int)


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (512, (512, 512)),
        ("512", (512, 512)),
        ("512,768", (512, 768)),
        ("512x768", (512, 768)),
        ([512, 768], (512, 768)),
    ],
)
def test_resolution_in_every_spelling(given: object, size: tuple[int, int]) -> None:
    assert coerce(FIELDS["dataset.resolution"], given) == size


def test_json_file(tmp_path: Path) -> None:
    file = write(tmp_path, json.dumps({"format_version": 1, "lora": {"rank": 3, "alpha": None}}), "run.json")
    assert load(file).lora.rank == 3


def test_layers_flags_over_file_over_preset_over_default(tmp_path: Path) -> None:
    file = write(tmp_path, 'preset = "kohya"\n[lora]\nrank = 5\n')
    config = load(file, {"optimizer.learning_rate": 3e-4})
    assert config.optimizer.learning_rate == 3e-4  # flag
    assert config.lora.rank == 5  # file
    assert config.lora.alpha == 1.0  # preset
    assert config.gradient.max_norm == TrainConfig().gradient.max_norm  # default


def test_preset_kohya_is_what_sd_scripts_does(fixtures: Path) -> None:
    rows = json.loads((fixtures / "sd_scripts_options.json").read_text(encoding="utf-8"))
    theirs = {row[0].removeprefix("--"): row[1] for row in rows}
    config, notes = load_config(None, {}, "kohya", check=False)
    assert config.optimizer.learning_rate == theirs["learning_rate"]
    assert config.run.max_train_steps == theirs["max_train_steps"]
    assert config.lora.alpha == theirs["network_alpha"]
    assert config.lora.rank == 4  # sd-scripts: network_dim unset becomes 4
    assert config.optimizer.te1_lr is None  # unset = learning_rate: trained
    assert config.dataset.caption_extensions == (theirs["caption_extension"],)
    assert config.bucket.enabled is theirs["enable_bucket"]
    assert (config.bucket.min_size, config.bucket.max_size, config.bucket.step) == (
        theirs["min_bucket_reso"],
        theirs["max_bucket_reso"],
        theirs["bucket_reso_steps"],
    )
    assert config.preview.sampler == theirs["sample_sampler"]
    assert config.gradient.max_norm == theirs["max_grad_norm"]
    assert config.dataset.keep_tokens == theirs["keep_tokens"]
    assert config.objective.huber_c == theirs["huber_c"]
    assert config.precision.compute == "fp32"  # mixed_precision = no
    assert any("learn very slowly" in note for note in notes)


def test_a_note_about_settings_of_a_preset_is_not_said_to_who_sets_them() -> None:
    flags = {"optimizer.learning_rate": 1e-4}
    assert any("learn very slowly" in note for note in load_config(None, flags, "kohya", check=False)[1])
    flags["lora.alpha"] = 8.0
    assert not any("learn very slowly" in note for note in load_config(None, flags, "kohya", check=False)[1])


def test_presets_name_real_fields() -> None:
    for name, preset in PRESETS.items():
        for key, value in preset.settings.items():
            assert coerce(FIELDS[key], value) == value, f"{name}: {key}"


def test_a_higher_layer_takes_back_the_rival() -> None:
    config = load(None, {"run.max_train_epochs": 10}, "kohya")
    assert config.run.max_train_epochs == 10
    assert config.run.max_train_steps is None
    assert merge([{"run.max_train_epochs": 3}, {"run.max_train_steps": 9}]) == {"run.max_train_steps": 9}


def test_all_problems_at_once_with_nearest_names(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        [lora]
        rnak = 8
        alpha = "eight"
        [dataset]
        flip = 1
        [optimiser]
        learning_rte = 1e-4
        """,
    )
    with pytest.raises(ConfigError) as error:
        load_config(file, {"lora.dropout": "high"})
    text = str(error.value)
    assert "Did you mean lora.rank?" in text
    assert "lora.alpha = 'eight': must be a number of at least 0, not a text" in text
    assert "dataset.flip = 1: must be true or false, not a whole number" in text
    assert "Did you mean learning_rate?" in text
    assert "lora.dropout = 'high'" in text
    assert "model.path" in text  # the rules are checked in the same go
    assert len(error.value.problems) >= 8


def test_from_dict_refuses_unknown_names_and_sections() -> None:
    with pytest.raises(ConfigError) as error:
        from_dict({"lora": {"rnak": 1}, "lroa": {"rank": 1}, "model": 3})
    assert fields_of(error) == ["lora.rnak", "lroa", "model"]
    assert "Did you mean rank?" in str(error.value)
    assert "Did you mean lora?" in str(error.value)


@pytest.mark.parametrize("value", [True, 1.5, "4", None, [4], {"a": 1}])
def test_wrong_types_of_a_whole_number(value: object) -> None:
    with pytest.raises(ConfigError, match=r"lora\.rank"):
        from_dict({"lora": {"rank": value}})


def test_newer_format_is_refused_naming_both_versions() -> None:
    with pytest.raises(ConfigError, match=rf"version {FORMAT_VERSION + 1}.*up to version {FORMAT_VERSION}"):
        from_dict({"format_version": FORMAT_VERSION + 1})
    with pytest.raises(ConfigError, match="whole number"):
        from_dict({"format_version": "one"})


def test_migrations_run_in_order_and_leave_their_input_alone() -> None:
    old = {"format_version": 1, "lora": {"dim": 4}}
    steps = {
        1: lambda data: {**data, "lora": {"rank": data["lora"]["dim"]}},
        2: lambda data: {**data, "lora": {"rank": data["lora"]["rank"] * 2}},
    }
    assert migrate(old, steps, current=3) == {"format_version": 3, "lora": {"rank": 8}}
    assert old == {"format_version": 1, "lora": {"dim": 4}}


def test_flat_sd_scripts_file(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        pretrained_model_name_or_path = "model.safetensors"
        [training_arguments]
        network_module = "networks.lora"
        network_dim = 32
        network_alpha = 16
        network_args = ["conv_dim=8", "conv_alpha=4"]
        text_encoder_lr = [5e-5, 1e-5]
        mixed_precision = "bf16"
        max_train_epochs = 10
        lr_warmup_steps = "10%"
        xformers = true
        huggingface_repo_id = ""
        log_with = ""
        token_warmup_step = 0
        v2 = false
        lr_scheduler_power = 1
        [dataset_arguments]
        train_data_dir = "pictures"
        resolution = "1024,1024"
        caption_extension = ".txt"
        enable_bucket = true
        """,
    )
    config, notes = load_config(file, {}, check=False)
    assert (config.lora.rank, config.lora.alpha) == (32, 16.0)
    assert (config.lora.conv_rank, config.lora.conv_alpha) == (8, 4.0)
    assert (config.optimizer.te1_lr, config.optimizer.te2_lr) == (5e-5, 1e-5)
    assert config.precision.compute == "bf16"
    assert config.run.max_train_epochs == 10
    assert config.schedule.warmup_steps == pytest.approx(0.1)
    assert config.dataset.resolution == (1024, 1024)
    assert config.dataset.caption_extensions == (".txt",)
    assert any("xformers" in note and "torch's own" in note for note in notes)


def test_flat_file_refuses_what_it_asks_for_in_vain(tmp_path: Path) -> None:
    file = write(tmp_path, "v2 = true\nfull_fp16 = true\nnetwork_dim = 4\nlora_rank = 8\nconfig_file = 'x'\n")
    with pytest.raises(ConfigError) as error:
        load_config(file, {}, check=False)
    text = str(error.value)
    assert "v2 in run.toml" in text
    assert "Use --mixed_precision fp16." in text
    assert "already set lora.rank to 4" in text
    assert "belongs on the command line" in text


def test_alias_inside_our_own_section(tmp_path: Path) -> None:
    config = load(write(tmp_path, "[lora]\nnetwork_dim = 12\n"))
    assert config.lora.rank == 12
    with pytest.raises(ConfigError, match="must be a whole number"):
        load_config(write(tmp_path, "[lora]\nnetwork_dim = 'x'\n"), {}, check=False)
    with pytest.raises(ConfigError, match="is set twice"):
        load_config(write(tmp_path, "[lora]\nrank = 3\nnetwork_dim = 12\n"), {}, check=False)


def test_dataset_config_of_sd_scripts_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, "[general]\nresolution = 1024\n[[datasets]]\nbatch_size = 4\n")
    with pytest.raises(ConfigError, match="data-set config"):
        load_config(file, {}, check=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[lora\nrank = 4", "is not valid"),
        (b'[model]\npath = "C:\\Users\\me"', "single quotes"),
        (b"\xff\xfe[\x00", "not UTF-8"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(file, {})


def test_missing_file_folder_and_list(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(tmp_path / "no.toml", {})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path, {})
    with pytest.raises(ConfigError, match="holds no settings"):
        load_config(write(tmp_path, "[1]", "run.json"), {})


def test_byte_order_mark_is_fine(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbf[lora]\nrank = 6\n")
    assert load(file).lora.rank == 6


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean kohya"):
        load_config(None, {}, "khoya", check=False)


def test_config_is_frozen_and_sections_are_complete() -> None:
    config = TrainConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lora.rank = 3  # type: ignore[misc]
    assert list(SECTIONS) == [field.name for field in dataclasses.fields(TrainConfig)]


@pytest.mark.parametrize(
    ("text", "field", "why"),
    [
        ('[model]\npath = "a\\u0000b"', "model.path", "holds a zero byte"),
        ('[preview]\nprompt_file = "\\u0000"', "preview.prompt_file", "holds a zero byte"),
        ('[preview]\nprompts = ["a cat", "a\\u0000"]', "preview.prompts", "holds a zero byte"),
        ('[preview]\nprompts = "a\\u0000"', "preview.prompts", "holds a zero byte"),
        (f"[lora]\nrank = {'9' * 400}", "lora.rank", "is too large for a whole number"),
        ("[run]\nmax_train_steps = 9223372036854775808", "run.max_train_steps", "is too large for a whole number"),
        ("[dataset]\nkeep_tokens = 1e300", "dataset.keep_tokens", "is too large for a whole number"),
        (f"[lora]\nalpha = {'9' * 400}", "lora.alpha", "is too large for a number"),
    ],
)
def test_values_that_nothing_can_hold(tmp_path: Path, text: str, field: str, why: str) -> None:
    """They broke the rules' own arithmetic, or the first system call that met them; all are told with the others."""
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), {})
    (problem,) = [problem for problem in caught.value.problems if problem.field == field]
    assert problem.why == why
    assert len(caught.value.problems) > 1
