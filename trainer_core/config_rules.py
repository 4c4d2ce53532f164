"""Every rule a config must keep, checked before anything is loaded, all at once.

Rules of one field come from its metadata in `config.py`; rules between fields are the functions gathered in `_RULES`.
`advice` names what is allowed but rarely meant. Nothing here opens a model or a picture: paths are only looked at.
"""

from __future__ import annotations

import codecs
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from .config import PARTS, TrainConfig, part_alpha, part_rank, part_rate, trained_parts
from .config_fields import FIELDS, FieldSpec, allowed, did_you_mean, or_unset
from .config_rules_health import HEALTH_RULES
from .config_rules_safety import SAFETY_RULES, safety_advice
from .config_rules_training import TRAINING_RULES, training_advice
from .errors import Problem

_UNDECODED = re.compile("[\ud800-\udfff]")  # how Python carries bytes of a path or an argument that it could not read
_WINDOWS_FORBIDDEN = '<>:"/\\|?*'
_WINDOWS_DEVICES = {"con", "prn", "aux", "nul", *(f"{name}{n}" for name in ("com", "lpt") for n in range(1, 10))}
_PART_NAMES = {"unet": "the UNet", "te1": "text encoder 1", "te2": "text encoder 2"}


def problems(config: TrainConfig) -> list[Problem]:
    """All problems of `config`, single fields first. Empty means the run may start loading."""
    found = [problem for spec in FIELDS.values() if (problem := field_problem(spec, value_of(config, spec.key)))]
    told = {problem.field for problem in found}
    sound = _with_defaults(config, sorted(told))
    for rule in _RULES:
        found.extend(problem for problem in rule(sound) if problem.field not in told)
    return found


def _with_defaults(config: TrainConfig, keys: list[str]) -> TrainConfig:
    """`config` with these fields at their defaults, so that one bad value is not reported once for each rule."""
    for key in keys:
        section, _, name = key.partition(".")
        changed = dataclasses.replace(getattr(config, section), **{name: FIELDS[key].default})
        config = dataclasses.replace(config, **{section: changed})
    return config


def value_of(config: TrainConfig, key: str) -> Any:
    """The value of `section.field`."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def field_problem(spec: FieldSpec, value: Any) -> Problem | None:
    """What is wrong with one value by itself: not a number, outside its range, or not among its choices."""
    if value is None:
        return None
    if _is_undecoded(value):
        why = "holds bytes that are no text in this system's encoding"
        return Problem(spec.key, value, why, "Rename it, or set the environment variable PYTHONUTF8=1.")
    if spec.choices and value not in spec.choices:
        names = [str(choice) for choice in spec.choices]
        return Problem(
            spec.key, value, "is not known", did_you_mean(str(value), names, f"Allowed: {', '.join(names)}.")
        )
    if spec.kind == "size":
        return _size_problem(spec.key, value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    why = _range_problem(spec, value)
    return Problem(spec.key, value, why, f"Write {allowed(spec)}{or_unset(spec)}.") if why else None


def _is_undecoded(value: object) -> bool:
    """Whether a text, or one of a list of texts, holds bytes that Python could not read."""
    texts = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
    return any(isinstance(text, str) and _UNDECODED.search(text) for text in texts)


def _range_problem(spec: FieldSpec, value: float) -> str | None:
    if not math.isfinite(value):
        return "is not a finite number"
    if spec.min is not None and value < spec.min:
        if value < 0 <= spec.min:
            return "cannot be negative"
        return "cannot be 0" if value == 0 else f"must be at least {spec.min:g}"
    if spec.max is not None and value > spec.max:
        return f"must be at most {spec.max:g}"
    return None


def _size_problem(key: str, value: tuple[int, int]) -> Problem | None:
    for side in value:
        if side <= 0:
            return Problem(key, value, "a side cannot be 0 or negative", "Write a size such as 1024 or 1024,768.")
        if side % 8 or side > 16384:
            nearest = max(8, min(16384, round(side / 8) * 8))
            return Problem(
                key, value, "sides must be multiples of 8 up to 16384", f"The nearest to {side} is {nearest}."
            )
    return None


Found = Iterator[Problem]


def _something_trained(config: TrainConfig) -> Found:
    rate = config.optimizer.learning_rate
    if rate == 0 and not trained_parts(config):
        yield Problem("optimizer.learning_rate", rate, "nothing would be learnt", "LoRA rates are 1e-5 to 1e-3.")
    elif not trained_parts(config):
        why = "no part is trained: each has rate 0 or rank 0"
        frozen = {part: (part_rank(config.lora, part), part_rate(config.optimizer, part)) for part in PARTS}
        by_rank = all(rank == 0 for rank, _ in frozen.values())
        shown = {part: f"rank {rank:g}, rate {rate:g}" for part, (rank, rate) in frozen.items()}
        field = "lora.unet_rank" if by_rank else "optimizer.unet_lr"
        yield Problem(field, shown, why, "Give at least one part a rate and a rank above 0.")
    for part in PARTS:
        own_rate = getattr(config.optimizer, f"{part}_lr")
        if own_rate and getattr(config.lora, f"{part}_rank") == 0:
            why = f"{_PART_NAMES[part]} has a learning rate of {own_rate:g} but rank 0"
            yield Problem(f"lora.{part}_rank", 0, why, f"Give it a rank, or set optimizer.{part}_lr to 0.")


def _alphas(config: TrainConfig) -> Found:
    lora = config.lora
    fix = "Unset it (rank / 2), or write a number above 0; sd-scripts' 0 means the rank itself."
    if lora.alpha == 0:
        yield Problem("lora.alpha", lora.alpha, "scale = alpha / rank would be 0: the LoRA would do nothing", fix)
    for part in trained_parts(config):
        if lora.alpha != 0 and getattr(lora, f"{part}_alpha") == 0:
            yield Problem(f"lora.{part}_alpha", 0.0, f"the scale in {_PART_NAMES[part]} would be 0", fix)
    if lora.conv_alpha == 0 and lora.conv_rank > 0:
        yield Problem("lora.conv_alpha", 0.0, "the scale of the convolutions would be 0", fix)
    if lora.conv_rank > 0 and "unet" not in trained_parts(config):
        why = "the convolutions are in the UNet, which is not trained"
        yield Problem("lora.conv_rank", lora.conv_rank, why, "Set it to 0, or train the UNet.")


def _text_cache(config: TrainConfig) -> Found:
    data = config.dataset
    if data.cache_text != "true":
        return
    encoders = _encoders(config)
    if encoders:
        why = (
            f"{' and '.join(_PART_NAMES[part] for part in encoders)} would be trained on outputs cached before training"
        )
        yield Problem("dataset.cache_text", "true", why, "Write auto, or set optimizer.te1_lr and te2_lr to 0.")
    for name in varying(config):
        why = f"{name} makes a new caption each time, a cached output would always be the same one"
        yield Problem("dataset.cache_text", "true", why, f"Write auto, or switch dataset.{name} off.")


def varying(config: TrainConfig) -> list[str]:
    """Settings of the data set that give a picture a new caption each time, so that none can be encoded beforehand."""
    data = config.dataset
    on = {
        "shuffle_caption": data.shuffle_caption,
        "tag_dropout": data.tag_dropout > 0,
        "wildcards": data.wildcards,
        "token_warmup_step": data.token_warmup_step > 0,
    }
    return [name for name, is_on in on.items() if is_on]


def _length(config: TrainConfig) -> Found:
    run = config.run
    if run.max_train_steps is None and run.max_train_epochs is None:
        why = "neither run.max_train_steps nor run.max_train_epochs says when the run ends"
        yield Problem("run.max_train_steps", None, why, "Set one of them; 1500 steps are usual for 20 to 40 pictures.")
    if run.max_train_steps is not None and run.max_train_epochs is not None:
        why = f"run.max_train_epochs = {run.max_train_epochs} is set too; only one can end the run"
        yield Problem("run.max_train_steps", run.max_train_steps, why, "Keep one of the two.")


def _prior(config: TrainConfig) -> Found:
    if config.dataset.prior_path and config.dataset.prior_loss_weight == 0:
        why = "prior pictures of weight 0 teach nothing and cost their whole time"
        yield Problem("dataset.prior_loss_weight", 0.0, why, "Write 1, or unset dataset.prior_path.")


def _buckets(config: TrainConfig) -> Found:
    bucket, size = config.bucket, config.dataset.resolution
    if bucket.step is not None and bucket.step % 8:
        yield Problem("bucket.step", bucket.step, "is not a multiple of 8", "Write 64, or 32.")
    if not bucket.enabled:
        return
    low, high = bucket.min_size, bucket.max_size
    if low is not None and high is not None and low > high:
        yield Problem("bucket.min_size", low, f"is above bucket.max_size = {high}", "Swap the two.")
        return
    if size is not None and low is not None and low > min(size):
        why = f"is above the shorter side of dataset.resolution ({min(size)})"
        yield Problem("bucket.min_size", low, why, "Lower it, or unset it.")
    if size is not None and high is not None and high < max(size):
        why = f"is below the longer side of dataset.resolution ({max(size)})"
        yield Problem("bucket.max_size", high, why, "Raise it (twice the resolution is usual), or unset it.")


def _captions(config: TrainConfig) -> Found:
    data = config.dataset
    if not data.caption_extensions:
        yield Problem("dataset.caption_extensions", [], "no ending is left", "Write .txt and .caption.")
    for ending in data.caption_extensions:
        if not ending.startswith(".") or len(ending) < 2:
            yield Problem("dataset.caption_extensions", ending, "is not an ending", "Write it with its dot, as .txt.")
    if data.caption_encoding is not None:
        try:
            codecs.lookup(data.caption_encoding)
        except LookupError:
            fix = "Known are utf-8, utf-16, cp1252, shift_jis, gb18030 and many more."
            yield Problem("dataset.caption_encoding", data.caption_encoding, "is not a known encoding", fix)
    yield from _background(data.background)


def _background(colour: str) -> Found:
    from PIL import ImageColor

    try:
        ImageColor.getrgb(colour)
    except ValueError:
        yield Problem("dataset.background", colour, "is not a colour", "Write a name (white) or a code (#808080).")


def _sizes(config: TrainConfig) -> Found:
    for name in ("width", "height"):
        side = getattr(config.preview, name)
        if side is not None and side % 8:
            fix = f"The nearest is {max(8, round(side / 8) * 8)}."
            yield Problem(f"preview.{name}", side, "is not a multiple of 8", fix)


def _model_path(config: TrainConfig) -> Found:
    path = config.model.path
    if not path:
        fix = "Give an SDXL .safetensors file or a diffusers folder, or 'toy' for a first try."
        yield Problem("model.path", path, "no base model is given", fix)
    elif path != "toy" and not Path(path).expanduser().exists():
        fix = "Check the path."
        if re.fullmatch(r"[\w.-]+/[\w.-]+", path):
            fix = f"If it is a name on Hugging Face, download it first: hf download {path} --local-dir FOLDER."
        yield Problem("model.path", path, "there is no such file or folder", fix)


def _paths(config: TrainConfig) -> Found:
    yield from _model_path(config)
    data = config.dataset
    if not data.path and not data.config_file:
        yield Problem("dataset.path", data.path, "no picture folder is given", "Give the folder with your pictures.")
    for key in ("dataset.path", "dataset.prior_path", "model.config_dir"):
        path = value_of(config, key)
        if not path:
            continue
        path = _as_meant(path)
        if not Path(path).expanduser().exists():
            yield Problem(key, path, "there is no such folder", "Check the path.")
        elif not Path(path).expanduser().is_dir():
            yield Problem(key, path, "is a file", "Give the folder.")
    for key in ("model.vae", "lora.weights", "dataset.config_file"):
        path = value_of(config, key)
        if path and not Path(path).expanduser().exists():
            yield Problem(key, path, "there is no such file", "Check the path, or unset it.")
    if data.path and data.prior_path and _same_folder(data.path, data.prior_path):
        why = "is the folder of the training pictures themselves"
        yield Problem("dataset.prior_path", data.prior_path, why, "Give another folder, or unset it.")


def _as_meant(folder: str) -> str:
    """A folder as typed or pasted, without blanks, quotes and line ends around it, where that exists."""
    from .data.folders import clean_folder
    from .errors import DatasetError

    try:
        return str(clean_folder(folder))
    except DatasetError:
        return folder


def _same_folder(one: str, other: str) -> bool:
    return Path(_as_meant(one)).expanduser().resolve() == Path(_as_meant(other)).expanduser().resolve()


_LONGEST_NAME = 100  # encrypted file systems allow 143 bytes; "-step00000500.safetensors" and "-2" come on top


def _folder_to_write(key: str, folder: str) -> Found:
    """A folder that is there or can be made, and written as far as permissions tell."""
    path = Path(folder).expanduser().absolute()
    existing = next((p for p in (path, *path.parents) if p.exists()), None)
    if existing is not None and not existing.is_dir():
        yield Problem(key, folder, f"{existing} is a file", "Give a folder.")
    elif existing is not None and not os.access(existing, os.W_OK):
        yield Problem(key, folder, f"{existing} cannot be written", "Give a folder of your own.")


def _output(config: TrainConfig) -> Found:
    folder, name = config.run.output_dir, config.run.output_name
    if not folder:
        yield Problem("run.output_dir", folder, "no output folder is given", "Write output, or any folder.")
    else:
        yield from _folder_to_write("run.output_dir", folder)
    if config.dataset.cache_dir:
        yield from _folder_to_write("dataset.cache_dir", config.dataset.cache_dir)
    bad = sorted({c for c in name if c in _WINDOWS_FORBIDDEN or ord(c) < 32})
    if not name.strip(" ."):
        yield Problem("run.output_name", name, "is empty", "Write a name, such as my_lora.")
    elif bad:
        fix = "Write a name alone; the folder is run.output_dir."
        yield Problem("run.output_name", name, f"holds characters that file names cannot have ({' '.join(bad)})", fix)
    elif name.split(".")[0].lower() in _WINDOWS_DEVICES or name != name.rstrip(" ."):
        yield Problem("run.output_name", name, "is not a file name that Windows can have", "Choose another name.")
    elif name.endswith(".safetensors"):
        fix = f"Write {name.removesuffix('.safetensors')}."
        yield Problem("run.output_name", name, "already has the ending that is added", fix)
    elif len(name.encode("utf-8", "replace")) > _LONGEST_NAME:
        why = (
            f"is {len(name.encode('utf-8', 'replace'))} bytes long; with step and ending it would pass what disks allow"
        )
        yield Problem("run.output_name", name[:40] + "...", why, f"Write a name of at most {_LONGEST_NAME} bytes.")


def _prompts(config: TrainConfig) -> Found:
    """Flags and files of the preview prompts; their reader needs no model."""
    from .validation.prompts import prompt_problems

    yield from prompt_problems(config.preview)


def _device(config: TrainConfig) -> Found:
    device = config.run.device
    if not re.fullmatch(r"auto|cpu|mps|xpu|cuda(:\d{1,3})?", device):
        fix = did_you_mean(device, ("auto", "cpu", "cuda", "cuda:0", "mps"), "Write auto, cpu, cuda, cuda:1 or mps.")
        yield Problem("run.device", device, "is no device name", fix)


_RULES: tuple[Callable[[TrainConfig], Found], ...] = (
    _paths,
    _output,
    _something_trained,
    _alphas,
    _length,
    _prior,
    *TRAINING_RULES,
    *HEALTH_RULES,
    *SAFETY_RULES,
    _text_cache,
    _buckets,
    _captions,
    _sizes,
    _device,
    _prompts,
)


def advice(config: TrainConfig) -> list[str]:
    """What is allowed and rarely meant, one sentence each."""
    data, run, schedule = config.dataset, config.run, config.schedule
    conditions: tuple[tuple[bool, str], ...] = (
        (
            config.precision.compute == "fp16" and run.device == "cpu",
            "precision.compute = fp16 on a CPU is slow and imprecise; bf16 or fp32 fit a CPU",
        ),
        (
            schedule.cycles > 1 and schedule.type != "cosine_with_restarts",
            f"schedule.cycles = {schedule.cycles} has no effect with the schedule {schedule.type}",
        ),
        (
            data.keep_tokens > 0 and not data.shuffle_caption and data.tag_dropout == 0,
            "dataset.keep_tokens has no effect: neither shuffle_caption nor tag_dropout is on",
        ),
        (data.caption_dropout == 1, "dataset.caption_dropout = 1: no sample is trained with its caption"),
        (
            config.preview.every_steps > 0 and not config.preview.prompts and not config.preview.prompt_file,
            "preview.every_steps has no effect: there are no preview prompts",
        ),
        (
            config.optimizer.type == "adamw" and config.optimizer.learning_rate > 0.01,
            f"optimizer.learning_rate = {config.optimizer.learning_rate:g} is far above the usual 1e-5 to 1e-3",
        ),
        (
            any(part_alpha(config.lora, part) > 4 * part_rank(config.lora, part) for part in trained_parts(config)),
            "alpha is more than four times the rank: the LoRA acts very strongly, training may diverge",
        ),
        (
            bool(data.cache_text == "auto" and not _encoders(config) and varying(config)),
            f"text-encoder outputs are not cached because captions change each time ({', '.join(varying(config))})",
        ),
    )
    return [*(text for holds, text in conditions if holds), *training_advice(config), *safety_advice(config)]


def _encoders(config: TrainConfig) -> list[str]:
    return [part for part in trained_parts(config) if part != "unet"]
