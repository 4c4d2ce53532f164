"""What a file of another adapter kind is (LoHa, LoKr, OFT, DoRA, full differences): who trained what, in counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ..errors import AdapterError
from .file_check import body_hash
from .foreign_files import seems_to_be
from .inspect import metadata_lines
from .kohya_file import hashes
from .lora_file import read_lora_header
from .naming import foreign_part
from .targets import PART_LABELS, PART_ORDER


@dataclass(frozen=True)
class OtherInspection:
    """Counts of a file whose modules have SDXL's names, but other weights than LoRA's."""

    path: str
    kind: str
    size: int
    dtypes: tuple[str, ...]
    modules: Mapping[str, int]
    parameters: Mapping[str, int]
    weights: Mapping[str, int]
    not_finite: int
    model_hash: str
    claimed_hash: str | None
    round_trip: bool
    metadata: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON)."""
        return {**asdict(self), "adapter": self.kind, "kind": "adapter", "metadata": dict(self.metadata)}

    @property
    def text(self) -> str:
        """The finding as lines for the terminal."""
        lines = [f"{self.kind} for SDXL: {self.path}", f"  {self.size:,} bytes, {' and '.join(self.dtypes)}"]
        lines += [
            f"  {PART_LABELS[part]}: {count} modules, {self.parameters[part]:,} weights"
            for part, count in self.modules.items()
        ]
        lines.append("  weights: " + ", ".join(f"{name} ({count})" for name, count in self.weights.items()))
        if self.not_finite:
            lines.append(f"  warning: {self.not_finite} tensors hold NaN or infinity")
        lines.append(f"  hash (A1111, Civitai AutoV3): {self.model_hash[:12]}, full {self.model_hash}")
        if self.claimed_hash is not None and self.claimed_hash != self.model_hash:
            lines.append(f"  the file claims another hash: {self.claimed_hash} (LyCORIS writes its own kind)")
        lines.append(f"  round trip (read, write again, compare): {'equal' if self.round_trip else 'DIFFERENT'}")
        return "\n".join(lines + metadata_lines(self.metadata))


def inspect_other(path: str | Path) -> OtherInspection | None:
    """Look at a file of another adapter kind; None when its names are not those of SDXL's modules.

    Raises:
        AdapterError: the file is damaged.
    """
    file = Path(path)
    header = read_lora_header(file)
    parts = {key: foreign_part(key.split(".")[0]) for key in header.entries}
    kind = seems_to_be(header.entries)
    if not parts or None in parts.values() or kind is None:
        return None
    tensors = safetensors.torch.load_file(file)
    names: dict[str, set[str]] = {part: set() for part in PART_ORDER}
    parameters: Counter[str] = Counter()
    for key, part in parts.items():
        if part is None:
            raise AdapterError(f"'{file}': '{key}' has no place in SDXL.")
        names[part].add(key.split(".")[0])
        parameters[part] += 0 if key.endswith(".alpha") else tensors[key].numel()
    model_hash = body_hash(file)
    return OtherInspection(
        path=str(path),
        kind=kind,
        size=file.stat().st_size,
        dtypes=tuple(sorted({str(value.dtype).removeprefix("torch.") for value in tensors.values()})),
        modules={part: len(found) for part, found in names.items() if found},
        parameters=dict(parameters),
        weights=dict(Counter(key.partition(".")[2] for key in tensors)),
        not_finite=sum(not bool(torch.isfinite(v).all()) for v in tensors.values() if v.is_floating_point()),
        model_hash=model_hash,
        claimed_hash=header.metadata.get("sshs_model_hash"),
        round_trip=hashes(tensors, {})[0] == model_hash,
        metadata=header.metadata,
    )
