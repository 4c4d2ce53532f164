"""Merging LoRA files into a base model, and extracting one from the difference of two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..draws import Draws
from ..errors import AdapterError
from .from_file import network_from_file
from .lora_file import LoraFile
from .lowrank import top_singular
from .targets import PART_LABELS, PART_ORDER, Target, find_targets, part_root

if TYPE_CHECKING:
    from ..models import SDXLModel


@dataclass(frozen=True)
class MergeResult:
    """What a merge changed. `relative_change` is |change| / |weights before| over all merged layers."""

    modules: int
    relative_change: float


@torch.no_grad()
def merge_lora(model: SDXLModel, file: LoraFile, multiplier: float = 1.0) -> MergeResult:
    """Add multiplier * scale * up @ down to the base weights, computed in float32 and cast once.

    Everything is checked before the first weight is changed.

    Raises:
        AdapterError: the file does not fit the model, or a merged weight would not be finite in the model's format.
    """
    network = network_from_file(model, file)
    changed = before = 0.0
    for name, module in network.modules.items():
        weight = module.base.weight
        change = multiplier * module.delta_weight()
        if not torch.isfinite((weight.float() + change).to(weight.dtype)).all():
            raise AdapterError(
                f"'{file.path}' cannot be merged: the weight of '{module.path}' ({name}) would not be finite in "
                f"{str(weight.dtype).removeprefix('torch.')}. Use a smaller multiplier, or load the model in float32."
            )
        changed += float(change.double().square().sum())
        before += float(weight.double().square().sum())
    for module in network.modules.values():
        weight = module.base.weight
        weight.copy_((weight.float() + multiplier * module.delta_weight()).to(weight.dtype))
    return MergeResult(len(network.modules), (changed / before) ** 0.5 if before > 0 else 0.0)


@dataclass(frozen=True)
class Extraction:
    """A LoRA taken from the difference of two models: `state` has kohya's keys (alpha = rank), `kept` is the share of
    the squared difference that it holds, `unchanged` counts layers without a difference (they are left out)."""

    state: dict[str, torch.Tensor]
    kept: float
    unchanged: int


@torch.no_grad()
def extract_lora(
    base: SDXLModel,
    tuned: SDXLModel,
    rank: int,
    *,
    conv_rank: int = 0,
    parts: Sequence[str] = PART_ORDER,
    seed: int = 0,
) -> Extraction:
    """The best LoRA of `rank` for `tuned` - `base`, layer by layer (Eckart and Young 1936).

    Raises:
        AdapterError: the models have different layers, or do not differ in any that a LoRA can hold.
    """
    state: dict[str, torch.Tensor] = {}
    total = kept = 0.0
    unchanged = 0
    for part in parts:
        for target, other in _pairs(base, tuned, part, conv=conv_rank > 0):
            difference = other.module.weight.float() - target.module.weight.float()
            squared = float(difference.double().square().sum())
            if squared == 0:
                unchanged += 1
                continue
            size = conv_rank if target.is_wide_conv else rank
            u, s, vh = top_singular(difference.flatten(1), size, Draws(seed), target.name)
            root = s.sqrt()
            tail = [1, 1] if difference.dim() == 4 else []
            state[f"{target.name}.alpha"] = torch.tensor(float(s.numel()))
            state[f"{target.name}.lora_down.weight"] = (root[:, None] * vh).reshape(-1, *difference.shape[1:]).cpu()
            state[f"{target.name}.lora_up.weight"] = (u * root).reshape(difference.shape[0], -1, *tail).cpu()
            total += squared
            kept += float(s.double().square().sum())
    if not state:
        raise AdapterError(
            f"The two models do not differ in any of {unchanged} layers that a LoRA can hold "
            f"({', '.join(PART_LABELS[part] for part in parts)}). Are they the same file?"
        )
    return Extraction(state, kept / total, unchanged)


def _pairs(base: SDXLModel, tuned: SDXLModel, part: str, *, conv: bool) -> list[tuple[Target, Target]]:
    ours, theirs = (find_targets(part_root(model, part), part, conv=conv) for model in (base, tuned))
    if [(t.name, t.module.weight.shape) for t in ours] != [(t.name, t.module.weight.shape) for t in theirs]:
        raise AdapterError(
            f"The two models have different layers in {PART_LABELS[part]} ({len(ours)} and {len(theirs)}). "
            "Extract from two models of the same kind."
        )
    return list(zip(ours, theirs, strict=True))
