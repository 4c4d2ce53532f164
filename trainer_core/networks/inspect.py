"""What a LoRA file is: who trained what, ranks and scales by part, changes by block, hashes and metadata."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from .file_check import body_hash
from .kohya_file import hashes
from .lora_file import DOWN, UP, LoraFile, load_lora
from .naming import block_of_name, part_of_name
from .proof import changed_modules
from .targets import PART_LABELS

_SHOWN_METADATA = (
    ("ss_output_name", "name"),
    ("modelspec.title", "title"),
    ("modelspec.author", "author"),
    ("modelspec.license", "licence"),
    ("modelspec.trigger_phrase", "trigger words"),
    ("ss_sd_model_name", "base model"),
    ("ss_base_model_version", "base model version"),
    ("ss_network_module", "network module"),
    ("ss_steps", "steps"),
    ("ss_epoch", "epoch"),
    ("ss_num_train_images", "pictures x repeats"),
    ("ss_learning_rate", "learning rate"),
    ("ss_optimizer", "optimizer"),
    ("ss_seed", "seed"),
    ("modelspec.date", "date"),
    ("safe_scaler_run_id", "run"),
    ("safe_scaler_dataset_hash", "hash of the pictures and captions"),
    ("safe_scaler_health", "how the run went"),
    ("safe_scaler_made_by", "made by"),
    ("modelspec.implementation_version", "trained with"),
)
_TOP_TAGS = 12


@dataclass(frozen=True)
class BlockSummary:
    """Adapters of one block. `norm` is the root of the summed squares of all weight changes scale * up @ down."""

    part: str
    block: str
    modules: int
    changed: int
    norm: float


@dataclass(frozen=True)
class PartSummary:
    """Adapters of one part: how many of each rank and of each scale."""

    part: str
    modules: int
    changed: int
    parameters: int
    ranks: Mapping[int, int]
    scales: Mapping[float, int]


@dataclass(frozen=True)
class LoraInspection:
    """Everything `safe-scaler inspect FILE` shows about a LoRA."""

    path: str
    size: int
    dtypes: tuple[str, ...]
    parts: tuple[PartSummary, ...]
    blocks: tuple[BlockSummary, ...]
    does_something: bool
    model_hash: str
    claimed_hash: str | None
    round_trip: bool
    metadata: Mapping[str, str]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON)."""
        return {
            "kind": "lora",
            "path": self.path,
            "size": self.size,
            "dtypes": list(self.dtypes),
            "parts": [{**vars(part), "ranks": dict(part.ranks), "scales": dict(part.scales)} for part in self.parts],
            "blocks": [vars(block) for block in self.blocks],
            "does_something": self.does_something,
            "model_hash": self.model_hash,
            "claimed_hash": self.claimed_hash,
            "round_trip": self.round_trip,
            "metadata": dict(self.metadata),
            "warnings": list(self.warnings),
        }

    @property
    def text(self) -> str:
        """The whole finding as lines for the terminal."""
        lines = [f"LoRA for SDXL: {self.path}", f"  {self.size:,} bytes, {' and '.join(self.dtypes)}"]
        lines += [_part_line(part) for part in self.parts]
        lines += ["  changes by block (root of the summed squares of the weight changes):"]
        lines += [_block_line(block) for block in self.blocks]
        lines.append(f"  does something: {'yes' if self.does_something else 'NO, all weights that could act are zero'}")
        lines.append(f"  hash (A1111, Civitai AutoV3): {self.model_hash[:12]}, full {self.model_hash}")
        if self.claimed_hash is not None and self.claimed_hash != self.model_hash:
            lines.append(f"  the file claims another hash: {self.claimed_hash} (LyCORIS writes its own kind)")
        lines.append(f"  round trip (read, write again, compare): {'equal' if self.round_trip else 'DIFFERENT'}")
        lines += metadata_lines(self.metadata)
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def inspect_lora(path: str | Path) -> LoraInspection:
    """Look at a LoRA file; no model is needed.

    Raises:
        AdapterError: the file is damaged or no LoRA for SDXL (see `load_lora`).
    """
    file = load_lora(path)
    changed, acting = changed_modules(file)
    model_hash = body_hash(file.path)
    return LoraInspection(
        path=str(path),
        size=file.path.stat().st_size,
        dtypes=file.dtypes,
        parts=tuple(_part_summary(file, part, set(changed)) for part in file.parts),
        blocks=_block_summaries(file, set(changed)),
        does_something=bool(acting),
        model_hash=model_hash,
        claimed_hash=file.metadata.get("sshs_model_hash"),
        round_trip=_round_trip(file, model_hash),
        metadata=file.metadata,
        warnings=file.warnings,
    )


def _part_summary(file: LoraFile, part: str, changed: set[str]) -> PartSummary:
    names = [name for name in file.ranks if part_of_name(name) == part]
    scales = file.scales
    return PartSummary(
        part=part,
        modules=len(names),
        changed=sum(1 for name in names if name in changed),
        parameters=sum(file.state[name + key].numel() for name in names for key in (DOWN, UP)),
        ranks=dict(sorted(Counter(file.ranks[name] for name in names).items())),
        scales=dict(sorted(Counter(round(scales[name], 6) for name in names).items())),
    )


def _block_summaries(file: LoraFile, changed: set[str]) -> tuple[BlockSummary, ...]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name in file.ranks:
        groups.setdefault((part_of_name(name) or "", block_of_name(name)), []).append(name)
    return tuple(
        BlockSummary(
            part=part,
            block=block,
            modules=len(names),
            changed=sum(1 for name in names if name in changed),
            norm=sum(file.change_norm(name) ** 2 for name in names) ** 0.5,
        )
        for (part, block), names in sorted(groups.items(), key=lambda item: _block_order(item[0]))
    )


def _block_order(key: tuple[str, str]) -> tuple[int, int, int]:
    part, block = key
    kind = ("IN", "MID", "OUT").index(block.rstrip("0123456789 ")) if part == "unet" and block != "base" else 3
    digits = "".join(filter(str.isdigit, block))
    return ("te1", "te2", "unet").index(part), kind, int(digits or 0)


def _round_trip(file: LoraFile, model_hash: str) -> bool:
    """Whether writing the tensors again gives the same content."""
    return hashes(safetensors.torch.load_file(file.path), {})[0] == model_hash


def _counts(table: Mapping[Any, int], total: int) -> str:
    if len(table) == 1:
        return f"{next(iter(table)):g}"
    return ", ".join(f"{value:g} ({count} of {total})" for value, count in table.items())


def _part_line(part: PartSummary) -> str:
    return (
        f"  {PART_LABELS[part.part]}: {part.modules} modules, {part.changed} changed, {part.parameters:,} weights, "
        f"rank {_counts(part.ranks, part.modules)}, scale {_counts(part.scales, part.modules)}"
    )


def _block_line(block: BlockSummary) -> str:
    changed = "all changed" if block.changed == block.modules else f"{block.changed} changed"
    return f"    {block.part:>4} {block.block:<9} {block.modules:>3} modules, {changed}, {block.norm:.4g}"


def metadata_lines(metadata: Mapping[str, str]) -> list[str]:
    """Who trained what, as far as the metadata says."""
    lines = [f"  {label}: {metadata[key]}" for key, label in _SHOWN_METADATA if metadata.get(key) not in (None, "None")]
    tags = _top_tags(metadata.get("ss_tag_frequency", ""))
    if tags:
        lines.append(f"  most frequent tags: {', '.join(tags)}")
    return lines if metadata else ["  no metadata"]


def _top_tags(text: str) -> Sequence[str]:
    try:
        table = json.loads(text or "{}")
        counts: Counter[str] = Counter()
        for tags in table.values():
            counts.update(tags)
        return [f"{tag} ({count})" for tag, count in counts.most_common(_TOP_TAGS)]
    except (ValueError, AttributeError, TypeError, RecursionError):
        return ()
