"""A data-set config file (TOML or JSON) with sd-scripts' keys: `[general]`, `[[datasets]]`, `[[datasets.subsets]]`.

The same keys are accepted and rejected as by sd-scripts (kohya.md 4.2; facts from its `library/config_util.py`), a
value of a subset standing above its data set's, that above `[general]`, that above the run's own settings. Differences,
each said in the message: what needs uncached latents (`color_aug`, `random_crop`, `face_crop_aug_range`) is refused
when switched on; `validation_split` may stand in subsets too. All problems come in one ConfigError.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import BucketConfig, DatasetConfig
from ..errors import ConfigError, DatasetError, Problem
from ..plain_text import parse_json, parse_toml
from .folders import clean_folder
from .sets import SetSpec, base_spec

_BOOL, _INT, _NUMBER, _TEXT, _SIZE, _PAIR, _TABLE = (
    "true or false",
    "a whole number",
    "a number",
    "text",
    ("a whole number or [width, height]"),
    "[low, high]",
    "a table",
)

ASCENDABLE: Mapping[str, str] = {
    "caption_dropout_every_n_epochs": _INT,
    "caption_dropout_rate": _NUMBER,
    "caption_extension": _TEXT,
    "caption_prefix": _TEXT,
    "caption_separator": _TEXT,
    "caption_suffix": _TEXT,
    "caption_tag_dropout_rate": _NUMBER,
    "cache_info": _BOOL,
    "class_tokens": _TEXT,
    "color_aug": _BOOL,
    "custom_attributes": _TABLE,
    "enable_wildcard": _BOOL,
    "face_crop_aug_range": _PAIR,
    "flip_aug": _BOOL,
    "keep_tokens": _INT,
    "keep_tokens_separator": _TEXT,
    "num_repeats": _INT,
    "random_crop": _BOOL,
    "resize_interpolation": _TEXT,
    "secondary_separator": _TEXT,
    "shuffle_caption": _BOOL,
    "token_warmup_min": _INT,
    "token_warmup_step": _NUMBER,
}
DATASET_KEYS: Mapping[str, str] = {
    "batch_size": _INT,
    "bucket_no_upscale": _BOOL,
    "bucket_reso_steps": _INT,
    "enable_bucket": _BOOL,
    "max_bucket_reso": _INT,
    "min_bucket_reso": _INT,
    "network_multiplier": _NUMBER,
    "resolution": _SIZE,
    "validation_seed": _INT,
    "validation_split": _NUMBER,
}
SUBSET_KEYS: Mapping[str, str] = {
    "alpha_mask": _BOOL,
    "conditioning_data_dir": _TEXT,
    "image_dir": _TEXT,
    "is_reg": _BOOL,
    "metadata_file": _TEXT,
    "validation_split": _NUMBER,
}
_COMMAND_LINE_ONLY = {"prior_loss_weight": "dataset.prior_loss_weight", "max_token_length": "dataset.max_token_length"}
_NEEDS_PIXELS = ("color_aug", "random_crop", "face_crop_aug_range")
_SHARES = ("caption_dropout_rate", "caption_tag_dropout_rate", "validation_split")
_AT_LEAST = {
    "num_repeats": 1,
    "batch_size": 1,
    "min_bucket_reso": 8,
    "max_bucket_reso": 8,
    "bucket_reso_steps": 8,
    "keep_tokens": 0,
    "caption_dropout_every_n_epochs": 0,
    "token_warmup_min": 0,
    "token_warmup_step": 0,
}
INTERPOLATIONS: Mapping[str, str] = {
    "lanczos": "lanczos",
    "lanczos4": "lanczos",
    "nearest": "nearest",
    "bilinear": "bilinear",
    "linear": "bilinear",
    "bicubic": "bicubic",
    "cubic": "bicubic",
    "area": "box",
    "box": "box",
}


def read_dataset_file(path: str, dataset: DatasetConfig, bucket: BucketConfig, native_size: int) -> list[SetSpec]:
    """The sets that a data-set config file describes, in its order.

    Raises ConfigError with every problem, DatasetError when the file cannot be read or a folder does not exist.
    """
    file = Path(path.strip().strip("\"'")).expanduser()
    reader = _Reader(file, dataset, bucket, native_size)
    return reader.read(load_dataset_file(file))


def load_dataset_file(file: Path) -> dict[str, Any]:
    """The tables of a TOML or JSON file. DatasetError with the place of the fault when it is neither."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DatasetError(f"The data-set config file '{file}' is not UTF-8: {error}.", file) from error
    except OSError as error:
        raise DatasetError(
            f"The data-set config file '{file}' cannot be read: {error.strerror or error}.", file
        ) from error
    try:
        content: Any = parse_json(text) if file.suffix.lower() == ".json" else parse_toml(text)
    except ValueError as error:
        raise DatasetError(f"The data-set config file '{file}' cannot be parsed: {error}.", file) from error
    if not isinstance(content, dict):
        raise DatasetError(f"The data-set config file '{file}' must hold tables, not {type(content).__name__}.", file)
    return content


@dataclass
class _Reader:
    file: Path
    dataset: DatasetConfig
    bucket: BucketConfig
    native_size: int
    problems: list[Problem] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)

    def read(self, content: dict[str, Any]) -> list[SetSpec]:
        self._known_keys(content, {"general": _TABLE, "datasets": _TABLE}, "")
        general = content.get("general", {})
        datasets = content.get("datasets", [])
        if not isinstance(general, dict):
            self._wrong("general", general, "must be a table", "Write [general].")
            general = {}
        if not isinstance(datasets, list) or not datasets or not all(isinstance(one, dict) for one in datasets):
            self._wrong("datasets", datasets, "must be a list of at least one table", "Write [[datasets]].")
            datasets = []
        self._known_keys(general, {**ASCENDABLE, **DATASET_KEYS}, "general.")
        specs: list[SetSpec] = []
        for number, one in enumerate(datasets):
            specs += self._dataset(f"datasets[{number}].", general, one)
        if self.problems:
            raise ConfigError(self.problems)
        if not any(not spec.is_prior for spec in specs):
            raise DatasetError(f"The data-set config file '{self.file}' names no training pictures.", self.file)
        return _without_lone_label(specs)

    def _dataset(self, where: str, general: dict[str, Any], one: dict[str, Any]) -> list[SetSpec]:
        self._known_keys(one, {**ASCENDABLE, **DATASET_KEYS, "subsets": _TABLE}, where)
        subsets = one.get("subsets", [])
        if not isinstance(subsets, list) or not subsets or not all(isinstance(sub, dict) for sub in subsets):
            self._wrong(
                f"{where}subsets", subsets, "must be a list of at least one table", "Write [[datasets.subsets]]."
            )
            return []
        if len({"metadata_file" in sub for sub in subsets}) > 1:
            why = "some subsets have it and some do not; one data set has captions of one kind"
            self._wrong(f"{where}subsets.metadata_file", "", why, "Give every subset one, or make two [[datasets]].")
        above = {**general, **{key: value for key, value in one.items() if key != "subsets"}}
        specs: list[SetSpec] = []
        seen: set[Path] = set()
        for number, sub in enumerate(subsets):
            spec = self._subset(f"{where}subsets[{number}].", above, sub)
            if spec is not None and spec.folder.resolve() not in seen:  # twice in one data set counts once
                seen.add(spec.folder.resolve())
                specs.append(spec)
        return specs

    def _subset(self, where: str, above: dict[str, Any], sub: dict[str, Any]) -> SetSpec | None:
        allowed = {**ASCENDABLE, **SUBSET_KEYS}
        if "metadata_file" in sub:
            allowed = {key: kind for key, kind in allowed.items() if key not in ("is_reg", "class_tokens")}
        self._known_keys(sub, allowed, where)
        if not isinstance(sub.get("image_dir"), str):
            self._wrong(f"{where}image_dir", sub.get("image_dir"), "every subset needs a folder", "Add image_dir.")
            return None
        values = {**above, **sub}
        for key in _NEEDS_PIXELS:
            if values.get(key):
                why = "needs pixels in every step, but latents are cached"
                self._wrong(f"{where}{key}", values[key], why, "Leave it out.")
        if self.problems:
            return None
        return self._spec(values, clean_folder(str(self._place(sub["image_dir"]))))

    def _place(self, name: str) -> Path | str:
        """A folder named in the file: seen from the file's own folder where it exists there."""
        beside = self.file.parent / name.strip()
        return beside if beside.is_dir() else name

    def _spec(self, values: dict[str, Any], folder: Path) -> SetSpec:
        dataset, bucket = self._sections(values)
        is_prior = bool(values.get("is_reg", False))
        mask = dataset.mask
        if values.get("conditioning_data_dir"):
            mask = str(self._place(values["conditioning_data_dir"]))
        elif values.get("alpha_mask"):
            mask = "alpha"
        spec = base_spec(folder, dataset, bucket, self.native_size)
        return replace(
            spec,
            prefix=self._label(folder, is_prior),
            is_prior=is_prior,
            loss_weight=dataset.prior_loss_weight if is_prior else 1.0,
            numbered=False,
            class_tokens=values.get("class_tokens", ""),
            batch_size=values.get("batch_size"),
            mask=mask,
            metadata_file=values.get("metadata_file"),
            validation_split=values.get("validation_split"),
        )

    def _sections(self, values: dict[str, Any]) -> tuple[DatasetConfig, BucketConfig]:
        """The run's sections with the file's values in them."""
        names = {
            "num_repeats": "repeats",
            "caption_dropout_rate": "caption_dropout",
            "caption_tag_dropout_rate": "tag_dropout",
            "enable_wildcard": "wildcards",
            "flip_aug": "flip",
        }
        names |= {
            key: key
            for key in (
                "shuffle_caption", "keep_tokens", "keep_tokens_separator", "secondary_separator", "caption_separator",
                "caption_prefix", "caption_suffix", "caption_dropout_every_n_epochs", "token_warmup_min",
                "token_warmup_step",
            )
        }  # fmt: skip
        changes: dict[str, Any] = {names[key]: value for key, value in values.items() if key in names}
        if "caption_extension" in values:
            changes["caption_extensions"] = (values["caption_extension"],)
        if "resize_interpolation" in values:
            changes["interpolation"] = INTERPOLATIONS[values["resize_interpolation"]]
        if "resolution" in values:
            size = values["resolution"]
            changes["resolution"] = (size, size) if isinstance(size, int) else (size[0], size[1])
        sizes = {"enable_bucket": "enabled", "min_bucket_reso": "min_size", "max_bucket_reso": "max_size"}
        sizes["bucket_reso_steps"] = "step"
        bucket_changes: dict[str, Any] = {sizes[key]: value for key, value in values.items() if key in sizes}
        if "bucket_no_upscale" in values:
            bucket_changes["upscale"] = not values["bucket_no_upscale"]
        return replace(self.dataset, **changes), replace(self.bucket, **bucket_changes)

    def _label(self, folder: Path, is_prior: bool) -> str:
        name, number = folder.name or "set", 1
        start = "prior:" if is_prior else ""
        label = f"{start}{name}/"
        while label in self.labels:
            number += 1
            label = f"{start}{name}-{number}/"
        self.labels.add(label)
        return label

    # ------------------------------------------------------------------ checking
    def _known_keys(self, table: dict[str, Any], allowed: Mapping[str, str], where: str) -> None:
        for key, value in table.items():
            if key in _COMMAND_LINE_ONLY:
                fix = f"Set {_COMMAND_LINE_ONLY[key]} of the run instead."
                self._wrong(where + key, value, "extra keys not allowed: it belongs to the run, not to a data set", fix)
            elif key not in allowed:
                near = difflib.get_close_matches(key, list(allowed), 1)
                fix = f"Did you mean {near[0]}?" if near else "Remove it."
                self._wrong(
                    where + key, value, f"extra keys not allowed here; known are {', '.join(sorted(allowed))}", fix
                )
            elif allowed[key] != _TABLE:
                self._value(where + key, key, value, allowed[key])

    def _value(self, where: str, key: str, value: Any, kind: str) -> None:
        if not _is_kind(value, kind):
            self._wrong(where, value, f"must be {kind}", "Correct it.")
        elif key in _SHARES and not 0 <= value <= 1:
            self._wrong(where, value, "must lie between 0 and 1", "Correct it.")
        elif key in _AT_LEAST and value < _AT_LEAST[key]:
            self._wrong(where, value, f"must be at least {_AT_LEAST[key]}", "Correct it.")
        elif key == "resize_interpolation" and value not in INTERPOLATIONS:
            self._wrong(where, value, f"must be one of {', '.join(INTERPOLATIONS)}", "Correct it.")
        elif key == "bucket_reso_steps" and self.native_size >= 256 and value % 32:
            self._wrong(where, value, "must be a multiple of 32 for SDXL", "Use 64 or 32.")

    def _wrong(self, where: str, value: object, why: str, fix: str) -> None:
        self.problems.append(Problem(f"{self.file.name}: {where}", value, why, fix))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_kind(value: Any, kind: str) -> bool:
    whole = _is_whole(value)
    pair: list[Any] = value if isinstance(value, list) and len(value) == 2 else []
    if kind == _SIZE:
        return whole or (bool(pair) and all(_is_whole(side) for side in pair))
    if kind == _PAIR:
        return bool(pair) and all(isinstance(side, int | float) for side in pair)
    checks = {
        _BOOL: isinstance(value, bool),
        _INT: whole,
        _NUMBER: whole or isinstance(value, float),
        _TEXT: isinstance(value, str),
    }
    return checks[kind]


def _without_lone_label(specs: list[SetSpec]) -> list[SetSpec]:
    """A single training folder needs no label before its files."""
    own = [spec for spec in specs if not spec.is_prior]
    if len(own) != 1:
        return specs
    return [replace(spec, prefix="") if spec is own[0] else spec for spec in specs]
