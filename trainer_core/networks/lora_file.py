"""Reading LoRA files: kohya's keys to checked pairs of weights, with plain refusals of everything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from ..errors import AdapterError, ModelFileError
from ..models.tensor_file import TensorFile, read_header
from .foreign_files import describe_keys, seems_to_be
from .key_families import KohyaTensors, is_lora_key, to_kohya
from .naming import is_sdxl_place, part_of_name

_CANCELLED = 1e-7
"""A change below this share of its factors' norms is rounding."""

DOWN, UP, ALPHA = ".lora_down.weight", ".lora_up.weight", ".alpha"


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file, checked: every module has down, up and alpha; all numbers are finite.

    `state` holds kohya's keys in the file's number format, alpha as float32 0-dim tensors (a missing one means
    alpha = rank). `families` counts modules by the spelling they had in the file. `warnings` are plain sentences about
    what is odd but usable.
    """

    path: Path
    state: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    families: Mapping[str, int]
    warnings: tuple[str, ...] = ()

    @property
    def scales(self) -> dict[str, float]:
        """What up @ down is multiplied with, by module: alpha / rank."""
        return {name: self.alphas[name] / rank for name, rank in self.ranks.items()}

    def change_norm(self, name: str) -> float:
        """Frobenius norm of scale * up @ down, from the small matrices in float64: |UD|^2 = sum(U'U * DD')."""
        down, up = (self.state[name + key].double().flatten(1) for key in (DOWN, UP))
        squared = float(((up.T @ up) * (down @ down.T)).sum())
        return abs(self.alphas[name] / self.ranks[name]) * max(squared, 0.0) ** 0.5

    def changes(self, name: str) -> bool:
        """Whether a module changes anything: not with zero weights or alpha, nor where the ranks cancel out (PiSSA)."""
        down, up = self.state[name + DOWN], self.state[name + UP]
        if not up.any() or not down.any() or self.alphas[name] == 0:
            return False
        size = abs(self.alphas[name] / self.ranks[name]) * float(up.double().norm()) * float(down.double().norm())
        return self.change_norm(name) > _CANCELLED * size

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part for name in self.ranks if (part := part_of_name(name))))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Number formats of the weights, such as ("float16",)."""
        return tuple(
            sorted({str(value.dtype).removeprefix("torch.") for key, value in self.state.items() if key.endswith(UP)})
        )


def load_lora(path: str | Path) -> LoraFile:
    """Read a LoRA file in any spelling that `key_families.py` knows; the result has kohya's keys.

    Raises:
        AdapterError: missing, empty, damaged, truncated or foreign file, unpaired or misshapen weights, NaN or
            infinity; the message names the file, what it seems to be and what was counted.
    """
    file = Path(path)
    header = read_lora_header(file)
    if not any(is_lora_key(key) for key in header.entries):
        kind = seems_to_be(header.entries)
        raise AdapterError(
            f"'{file}' holds no LoRA weights"
            + (f"; it seems to be {kind}" if kind else "")
            + f" ({describe_keys(header.entries)}). Give a LoRA file for SDXL."
        )
    return read_tensors(file, safetensors.torch.load_file(file), header.metadata)


def read_lora_header(path: Path) -> TensorFile:
    """Names, shapes and metadata of a file, nothing big read.

    Raises:
        AdapterError: missing, unreadable, empty, damaged, truncated, or no safetensors file.
    """
    if path.is_dir():
        raise AdapterError(f"Cannot read '{path}' as a LoRA: it is a folder. Give a .safetensors file.")
    try:
        return read_header(path)
    except ModelFileError as error:
        raise AdapterError(f"Cannot read this LoRA file. {error}") from error


def read_tensors(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> LoraFile:
    """Rename tensors to kohya's keys, check them and pair them up. `file` is for messages.

    Raises:
        AdapterError: as `load_lora`.
    """
    tensors, narrow = _plain_numbers(file, tensors)
    try:
        converted = to_kohya(tensors, metadata)
    except AdapterError as error:
        raise AdapterError(f"'{file}': {error}") from error
    if converted.unknown:
        _refuse_unknown(file, converted, tensors)
    state = dict(converted.tensors)
    names = _paired_names(file, state)
    _refuse_other_models(file, names, tensors)
    _refuse_non_finite(file, state)
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    without_alpha: list[str] = []
    for name in names:
        ranks[name] = _rank(file, name, state[name + DOWN], state[name + UP])
        alpha = state.get(name + ALPHA)
        if alpha is None:
            without_alpha.append(name)
        elif alpha.numel() != 1:
            raise AdapterError(f"'{file}': alpha of '{name}' has {alpha.numel()} values; it must be one number.")
        alphas[name] = float(ranks[name]) if alpha is None else float(alpha.reshape(()))
        state[name + ALPHA] = torch.tensor(alphas[name], dtype=torch.float32)
    _refuse_beyond_float32(file, state)
    odd = (*narrow, *_warnings(alphas, without_alpha))
    return LoraFile(file, state, metadata, ranks, alphas, converted.families, odd)


def _plain_numbers(
    file: Path, tensors: Mapping[str, torch.Tensor]
) -> tuple[Mapping[str, torch.Tensor], tuple[str, ...]]:
    """The tensors with 8-bit floats as float16, which holds them exactly, and what is to be said about that.

    Whole, true-or-false and complex numbers are refused: as weights they come from a quantised file whose factors are
    kept elsewhere, or from damage. An alpha may be a whole number.
    """
    found = dict(tensors)
    narrow = [key for key, value in tensors.items() if value.is_floating_point() and value.element_size() == 1]
    found |= {key: tensors[key].to(torch.float16) for key in narrow}
    for key, value in tensors.items():
        if not value.is_floating_point() and (value.is_complex() or not key.endswith(ALPHA)):
            raise AdapterError(
                f"'{file}': '{key}' is stored as {str(value.dtype).removeprefix('torch.')}; LoRA weights are fp32, "
                "fp16 or bf16. The file is quantised in a way that cannot be read, or damaged; get another one."
            )
    if not narrow:
        return tensors, ()
    return found, (f"{len(narrow)} of {len(tensors)} tensors are in 8 bits and are read as fp16, which is exact.",)


def _refuse_unknown(file: Path, converted: KohyaTensors, tensors: Mapping[str, torch.Tensor]) -> None:
    kind = seems_to_be(tensors)
    known = sum(converted.families.values())
    raise AdapterError(
        f"'{file}': {len(converted.unknown)} of {len(tensors)} tensors have names that no LoRA for SDXL has, such as "
        f"'{converted.unknown[0]}'"
        + (f"; it seems to be {kind}" if kind else "")
        + f" ({known} modules were recognised). Give a LoRA file for SDXL."
    )


def _paired_names(file: Path, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    downs = {key.removesuffix(DOWN) for key in tensors if key.endswith(DOWN)}
    ups = {key.removesuffix(UP) for key in tensors if key.endswith(UP)}
    alphas = {key.removesuffix(ALPHA) for key in tensors if key.endswith(ALPHA)}
    if lonely := sorted((downs ^ ups) | (alphas - downs)):
        raise AdapterError(
            f"'{file}' is damaged: {len(lonely)} of {len(downs | ups | alphas)} modules have only one of lora_down and "
            f"lora_up, such as '{lonely[0]}'. Get the file again."
        )
    return sorted(downs)


def _refuse_other_models(file: Path, names: list[str], tensors: Mapping[str, torch.Tensor]) -> None:
    foreign = [name for name in names if not is_sdxl_place(name)]
    if foreign:
        kind = seems_to_be(tensors) or "a LoRA for SD 1.x or 2.x"
        raise AdapterError(
            f"'{file}': {len(foreign)} of {len(names)} modules are for blocks without attention in SDXL, such as "
            f"'{foreign[0]}'; it seems to be {kind}. Give a LoRA file for SDXL."
        )


def _refuse_non_finite(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    bad = [key for key, value in tensors.items() if not torch.isfinite(value).all()]
    if bad:
        raise AdapterError(
            f"'{file}' holds NaN or infinity in {len(bad)} of {len(tensors)} tensors, such as '{bad[0]}'. "
            "The training that wrote it diverged; use an earlier file of that run."
        )


def _refuse_beyond_float32(file: Path, state: Mapping[str, torch.Tensor]) -> None:
    """float64 holds numbers that become infinite in every format that LoRAs are computed in."""
    limit = torch.finfo(torch.float32).max
    for key, value in state.items():
        wide = value.dtype == torch.float64 and bool((value.abs() > limit).any())
        if wide or not torch.isfinite(value).all():
            raise AdapterError(
                f"'{file}': '{key}' holds numbers above {limit:.1e}, which are infinite in float32. The file is "
                "damaged, or the training that wrote it diverged; use an earlier one."
            )


def _rank(file: Path, name: str, down: torch.Tensor, up: torch.Tensor) -> int:
    if down.dim() not in (2, 4) or up.dim() != down.dim() or up.shape[1] != down.shape[0] or down.shape[0] == 0:
        raise AdapterError(
            f"'{file}' is damaged: '{name}' has lora_down {tuple(down.shape)} and lora_up {tuple(up.shape)}, "
            "which cannot be multiplied."
        )
    return int(down.shape[0])


def _warnings(alphas: Mapping[str, float], without_alpha: list[str]) -> tuple[str, ...]:
    found: list[str] = []
    if without_alpha:
        found.append(f"{len(without_alpha)} of {len(alphas)} modules have no alpha; alpha = rank is used (scale 1).")
    if zero := [name for name, alpha in alphas.items() if alpha == 0.0]:
        found.append(
            f"{len(zero)} of {len(alphas)} modules have alpha 0, so their scale is 0 and they have no effect, "
            f"such as '{zero[0]}'."
        )
    return tuple(found)
