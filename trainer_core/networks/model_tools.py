"""LoRA files and whole models: merging into a single file, extracting from the difference of two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import AdapterError
from ..models import inspect_model, load_sdxl
from ..models.single_file import save_single_file
from .file_tools import made_metadata
from .inspect import inspect_lora
from .kohya_file import DTYPES, free_path, save_lora
from .lora_file import LoraFile, load_lora, read_tensors
from .merge import extract_lora, merge_lora
from .targets import PART_ORDER

_STORED = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


def merge_files(base: str, loras: Sequence[tuple[Path, float]], target: Path, dtype: str = "auto") -> tuple[Path, str]:
    """Write a single file of `base` with LoRAs merged in, one after the other; nothing is written if one does not fit.

    Args:
        dtype: number format of the file; "auto" is the UNet's in the base model.

    Raises:
        AdapterError: a LoRA does not fit, or the format cannot hold a weight.
        ModelFileError: the base model cannot be read.
    """
    files = [(load_lora(path), strength) for path, strength in loras]
    wanted = _dtype(base, dtype)
    model = load_sdxl(base, dtype=DTYPES[wanted])
    lines = []
    for file, strength in files:
        result = merge_lora(model, file, strength)
        change = f"{result.modules} layers changed by {result.relative_change:.2%} of their norm"
        lines.append(f"{file.path.name} at {strength:g}: {change}")
    path = free_path(target)
    merged = ", ".join(f"{file.path.name} at {strength:g}" for file, strength in files)
    save_single_file(model, path, DTYPES[wanted], metadata={"modelspec.merged_from": f"{base}; {merged}"})
    return path, "\n".join(lines)


def _dtype(base: str, asked: str) -> str:
    if asked != "auto":
        return asked
    stored = inspect_model(base).dtypes.get("unet", "F16")
    return _STORED.get(stored, stored if stored in DTYPES else "fp16")


def extract_file(
    base: str,
    tuned: str,
    target: Path,
    rank: int,
    *,
    conv_rank: int = 0,
    parts: Sequence[str] = PART_ORDER,
    dtype: str = "fp16",
    compute: torch.dtype = torch.float32,
) -> tuple[Path, str]:
    """Write the best LoRA of `rank` for what `tuned` has and `base` has not.

    Raises:
        AdapterError: the models do not differ, or have other layers.
        ModelFileError: a model cannot be read.
    """
    if dtype not in DTYPES:
        raise AdapterError(f"'{dtype}' is no number format of LoRA files; allowed are {', '.join(DTYPES)}.")
    first, second = load_sdxl(base, dtype=compute), load_sdxl(tuned, dtype=compute)
    found = extract_lora(first, second, rank, conv_rank=conv_rank, parts=parts)
    file: LoraFile = read_tensors(target, found.state, {})
    metadata = made_metadata(file, f"extracted: {Path(tuned).name} minus {Path(base).name}, rank {rank}")
    saved = save_lora(free_path(target), found.state, metadata, dtype)
    again = inspect_lora(saved.path)
    if not again.does_something:
        raise AdapterError(f"'{saved.path}' changes nothing after reading. The difference is too small for {dtype}.")
    return saved.path, (
        f"{len(file.ranks)} modules hold {found.kept:.1%} of the squared difference; "
        f"{found.unchanged} layers do not differ"
    )
