"""LoRA files without a training run: other names and number formats, other ranks. Every result is read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import AdapterError
from .file_formats import FORMATS, to_format
from .kohya_file import DTYPES, free_path, save_lora
from .lora_file import ALPHA, DOWN, UP, LoraFile, load_lora
from .metadata import ARCHITECTURE, BASE_MODEL_VERSION, MODELSPEC_VERSION, NETWORK_MODULE
from .metadata_size import fit_metadata
from .peft_folder import read_peft_folder, write_peft_folder
from .resize import smallest_rank, truncate

if TYPE_CHECKING:
    from ..models import SDXLModel

ALL_FORMATS = (*FORMATS, "peft")
_ROUNDING = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 1.6e-2}
"""Relative change that a number format may make: two rounded factors of 24, 11 and 8 bits."""


@dataclass(frozen=True)
class Written:
    """Files or folders that were written, and what was compared in plain words."""

    paths: tuple[Path, ...]
    text: str


def write_as(
    file: LoraFile, target: Path, model: SDXLModel, form: str, dtype: str, metadata: Mapping[str, str] | None = None
) -> Written:
    """Write a LoRA under the names of another format (a folder a part for "peft"), read it back and compare.

    Args:
        target: wished name; a taken one becomes `-2`, `-3`, ...
        model: gives the names of modules; it may be without weights.
        form: one of `ALL_FORMATS`.
        metadata: instead of the file's own.

    Raises:
        AdapterError: an unknown format, no names for these modules, or what was read back computes something else.
    """
    if form not in ALL_FORMATS:
        raise AdapterError(f"'{form}' is no format of LoRA files; allowed are {', '.join(ALL_FORMATS)}.")
    if dtype not in DTYPES:
        raise AdapterError(f"'{dtype}' is no number format of LoRA files; allowed are {', '.join(DTYPES)}.")
    metadata = file.metadata if metadata is None else metadata
    if form == "peft":
        root = free_path(target.with_suffix(""))
        paths = tuple(write_peft_folder(root / part, file.state, model, part, dtype) for part in file.parts)
        worst = max(_compare(file, read_peft_folder(path, model, path.name), dtype, part=path.name) for path in paths)
    else:
        tensors = to_format(file.state, model, form)
        fitting, _ = fit_metadata(metadata, tensors)
        saved = save_lora(free_path(target), tensors, fitting, dtype)
        paths = (saved.path,)
        worst = _compare(file, load_lora(saved.path), dtype)
    return Written(paths, f"read back: {len(file.ranks)} modules, largest relative difference {worst:.1e}")


def resize_lora(file: LoraFile, *, rank: int | None = None, keep: float | None = None) -> tuple[LoraFile, str]:
    """(a LoRA of lower ranks with the same scales, what was lost). Give `rank`, or the share `keep` of every change's
    squared norm.

    Raises:
        AdapterError: neither or both are given, or out of range.
    """
    if (rank is None) == (keep is None):
        raise AdapterError("Give either a rank or the share to keep.")
    if rank is not None and rank < 1:
        raise AdapterError(f"rank must be at least 1, got {rank}.")
    if keep is not None and not 0 < keep <= 1:
        raise AdapterError(f"the share to keep must be above 0 and at most 1, got {keep}.")
    state: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    worst = 0.0
    for name, old in file.ranks.items():
        down, up = file.state[name + DOWN].float(), file.state[name + UP].float()
        wanted = min(old, rank if rank is not None else smallest_rank(down, up, keep or 1.0))
        if wanted < old:
            factors = truncate(down, up, wanted)
            down, up, worst = factors.down, factors.up, max(worst, factors.lost)
        ranks[name] = wanted
        alphas[name] = file.alphas[name] / old * wanted
        state |= {name + DOWN: down, name + UP: up, name + ALPHA: torch.tensor(alphas[name])}
    result = LoraFile(file.path, state, file.metadata, ranks, alphas, file.families)
    before, after = sum(file.ranks.values()), sum(ranks.values())
    return result, f"{before} ranks became {after}; the largest loss in a module is {worst:.1%} of its change"


def made_metadata(file: LoraFile, action: str) -> dict[str, str]:
    """The file's metadata with the ranks of now and what was done; for a file without any, what loaders need."""
    ranks, scales = set(file.ranks.values()), {round(scale, 6) for scale in file.scales.values()}
    rank = ranks.pop() if len(ranks) == 1 else "Dynamic"
    alpha = scales.pop() * rank if len(scales) == 1 and isinstance(rank, int) else "Dynamic"
    needed = {
        "ss_base_model_version": BASE_MODEL_VERSION,
        "ss_network_module": NETWORK_MODULE,
        "ss_v2": "False",
        "modelspec.sai_model_spec": MODELSPEC_VERSION,
        "modelspec.architecture": ARCHITECTURE,
    }
    kept = {key: value for key, value in file.metadata.items() if not key.startswith("sshs_") and key != "format"}
    history = " | ".join(text for text in (file.metadata.get("safe_scaler_made_by"), action) if text)
    own = {"ss_network_dim": str(rank), "ss_network_alpha": str(alpha), "safe_scaler_made_by": history}
    return {**needed, **kept, **own}


def _compare(file: LoraFile, again: LoraFile, dtype: str, part: str | None = None) -> float:
    """Largest relative difference of the weight changes, over modules.

    Raises:
        AdapterError: modules are missing, or one differs by more than the number format explains.
    """
    from .naming import part_of_name

    wanted = [name for name in file.ranks if part is None or part_of_name(name) == part]
    if set(wanted) != set(again.ranks):
        raise AdapterError(
            f"'{again.path}' holds {len(again.ranks)} modules after reading, {len(wanted)} were written."
        )
    worst = 0.0
    for name in wanted:
        ours, theirs = _factors(file, name), _factors(again, name)
        change = _product_norm(*ours)
        size = float(ours[0].norm() * ours[1].norm())
        difference = _product_norm(torch.cat([ours[0], theirs[0]]), torch.cat([ours[1], -theirs[1]], dim=1))
        # Where ranks cancel (PiSSA), rounding is as large as the factors, not as the change.
        worst = max(worst, difference / max(change, size) if size else difference)
    if worst > _ROUNDING[dtype]:
        raise AdapterError(
            f"'{again.path}' computes something else than '{file.path}': relative difference {worst:.1e}."
        )
    return worst


def _factors(file: LoraFile, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    down, up = (file.state[name + key].double().flatten(1) for key in (DOWN, UP))
    return down, up * (file.alphas[name] / file.ranks[name])


def _product_norm(down: torch.Tensor, up: torch.Tensor) -> float:
    """Frobenius norm of up @ down from two small matrices."""
    _, left = torch.linalg.qr(up)
    _, right = torch.linalg.qr(down.T)
    return float((left @ right.T).norm())
