"""What a model file or folder is, from its header alone: for refusals before anything big is read, and for people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .configs import find_configs
from .loading import found_prediction_type, found_zero_terminal_snr, ignored_note, native_size, plan, resolve_path
from .sources import PARTS, find_source


@dataclass(frozen=True)
class ModelInfo:
    """Facts of an SDXL base model. `parameters` counts numbers by part, `dtypes` names the stored types by part."""

    path: Path
    kind: str  # "single file" | "folder"
    family: str  # always "sdxl": everything else is refused
    size_bytes: int
    parameters: Mapping[str, int]
    dtypes: Mapping[str, str]
    has_vae: bool
    has_ema: bool
    prediction_type: str
    zero_terminal_snr: bool
    native_size: int
    config_origins: Mapping[str, str]
    notes: tuple[str, ...]
    metadata: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path), "notes": list(self.notes)}


def inspect_model(path: str | Path, *, config_dir: str | Path | None = None) -> ModelInfo:
    """Read headers only. Raises ModelFileError naming what the file is when it is no SDXL base model."""
    source = find_source(resolve_path(path))
    parts = tuple(part for part in PARTS if source.parts[part])
    configs = find_configs(source, source, Path(config_dir) if config_dir is not None else None, parts)
    slots = {part: source.parts[part].values() for part in parts}
    files = {slot.file.path: slot.file.size for values in slots.values() for slot in values}
    notes = (*configs.notes, *ignored_note(source))
    if "vae" not in parts:
        notes = (*notes, "There is no VAE in it: give one with model.vae.")
    return ModelInfo(
        path=source.path,
        kind=source.kind,
        family="sdxl",
        size_bytes=sum(files.values()),
        parameters={part: sum(math.prod(slot.shape) for slot in slots[part]) for part in parts},
        dtypes={part: _common_dtype([slot.entry.dtype for slot in slots[part]]) for part in parts},
        has_vae="vae" in parts,
        has_ema=any(name.startswith("model_ema.") for name in source.ignored),
        prediction_type=found_prediction_type(source, configs),
        zero_terminal_snr=found_zero_terminal_snr(source, configs),
        native_size=native_size(configs),
        config_origins=configs.origins,
        notes=notes,
        metadata={key: value for key, value in source.metadata.items() if not key.startswith("safe_scaler.")},
    )


def check_vae(path: str | Path, vae: str | Path | None, *, config_dir: str | Path | None = None) -> None:
    """Whether the model in `path`, sound by itself, has a VAE that SDXL can use (its own, or the one in `vae`).

    Headers only. Raises ModelFileError: there is none, or it is damaged or another family's.
    """
    plan(path, vae=vae, config_dir=config_dir)


def _common_dtype(names: list[str]) -> str:
    """The most frequent stored type; others are added in brackets."""
    counts = Counter(names).most_common()
    others = ", ".join(name for name, _ in counts[1:])
    return f"{counts[0][0]} (also {others})" if others else counts[0][0]
