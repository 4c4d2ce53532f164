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
from .naming import part_of_name

DOWN, UP, ALPHA = ".lora_down.weight", ".lora_up.weight", ".alpha"


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file, checked: every module has down, up and alpha; all numbers are finite.

    `state` holds kohya's keys in the file's number format, alpha as float32 0-dim tensors (a missing one means
    alpha = rank). `warnings` are plain sentences about what is odd but usable.
    """

    path: Path
    state: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    warnings: tuple[str, ...] = ()

    @property
    def scales(self) -> dict[str, float]:
        """What up @ down is multiplied with, by module: alpha / rank."""
        return {name: self.alphas[name] / rank for name, rank in self.ranks.items()}

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
    """Read a LoRA file with kohya's keys.

    Raises:
        AdapterError: missing, empty, damaged, truncated or foreign file, unpaired or misshapen weights, NaN or
            infinity; the message names the file, what it seems to be and what was counted.
    """
    file = Path(path)
    header = read_lora_header(file)
    if not any(key.endswith((DOWN, UP)) for key in header.entries):
        kind = seems_to_be(header.entries)
        raise AdapterError(
            f"'{file}' holds no LoRA weights"
            + (f"; it seems to be {kind}" if kind else "")
            + f" ({describe_keys(header.entries)}). Give a LoRA file for SDXL."
        )
    return read_state(file, safetensors.torch.load_file(file), header.metadata)


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


def read_state(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> LoraFile:
    """Check tensors with kohya's suffixes and pair them up. `file` is for messages."""
    names = _paired_names(file, tensors)
    _refuse_unknown_names(file, names, tensors)
    _refuse_non_finite(file, tensors)
    state: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    without_alpha: list[str] = []
    for name in names:
        down, up = tensors[name + DOWN], tensors[name + UP]
        ranks[name] = _rank(file, name, down, up)
        alpha = tensors.get(name + ALPHA)
        if alpha is None:
            without_alpha.append(name)
        elif alpha.numel() != 1:
            raise AdapterError(f"'{file}': alpha of '{name}' has {alpha.numel()} values; it must be one number.")
        alphas[name] = float(ranks[name]) if alpha is None else float(alpha.reshape(()))
        state[name + ALPHA] = torch.tensor(alphas[name], dtype=torch.float32)
        state[name + DOWN], state[name + UP] = down, up
    return LoraFile(file, state, metadata, ranks, alphas, _warnings(alphas, without_alpha))


def _paired_names(file: Path, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    downs = {key.removesuffix(DOWN) for key in tensors if key.endswith(DOWN)}
    ups = {key.removesuffix(UP) for key in tensors if key.endswith(UP)}
    if lonely := sorted(downs ^ ups):
        raise AdapterError(
            f"'{file}' is damaged: {len(lonely)} of {len(downs | ups)} modules have only one of lora_down and lora_up, "
            f"such as '{lonely[0]}'. Get the file again."
        )
    extra = [key for key in tensors if not key.endswith((DOWN, UP)) and not (key.endswith(ALPHA) and key[:-6] in downs)]
    if extra:
        kind = seems_to_be(extra)
        raise AdapterError(
            f"'{file}' holds more than plain LoRA weights: {describe_keys(extra)}"
            + (f"; this part seems to be {kind}" if kind else "")
            + ". Only LoRA weights (lora_down, lora_up, alpha) can be read."
        )
    return sorted(downs)


def _refuse_unknown_names(file: Path, names: list[str], tensors: Mapping[str, torch.Tensor]) -> None:
    unknown = [name for name in names if part_of_name(name) is None]
    if unknown:
        kind = seems_to_be(tensors)
        raise AdapterError(
            f"'{file}' has {len(unknown)} of {len(names)} modules with names that are not SDXL's, such as "
            f"'{unknown[0]}'" + (f"; it seems to be {kind}" if kind else "") + ". Give a LoRA file for SDXL."
        )


def _refuse_non_finite(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    bad = [key for key, value in tensors.items() if not torch.isfinite(value).all()]
    if bad:
        raise AdapterError(
            f"'{file}' holds NaN or infinity in {len(bad)} of {len(tensors)} tensors, such as '{bad[0]}'. "
            "The training that wrote it diverged; use an earlier file of that run."
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
