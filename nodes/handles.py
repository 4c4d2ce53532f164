"""What travels between nodes: small frozen values with settings and names, never weights.

`settings` are config values by `section.field`. ComfyUI prints every input of a failed node, so each repr is one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "SAFE_SCALER_MODEL"
DATASET = "SAFE_SCALER_DATASET"
TARGETS = "SAFE_SCALER_TARGETS"
MONITOR = "SAFE_SCALER_MONITOR"
CHECKPOINT = "SAFE_SCALER_CHECKPOINT"
RUN = "SAFE_SCALER_RUN"

Settings = Mapping[str, Any]


class AnyLora(str):
    """The type of an output that fits ComfyUI's lists of LoRA files, which are compared as Python lists, and text."""

    __hash__ = str.__hash__

    def __ne__(self, other: object) -> bool:
        return False if isinstance(other, list) else str.__ne__(self, other)


LORA_NAME = AnyLora("COMBO,STRING")


@dataclass(frozen=True, repr=False)
class ModelHandle:
    """A base model, known by its header. `native_size` in pixels."""

    title: str
    native_size: int
    settings: Settings

    def __repr__(self) -> str:
        return f"<Safe-Scaler model {self.title}, {self.native_size} px>"


@dataclass(frozen=True, repr=False)
class DatasetHandle:
    """Pictures and captions. `captions`: a few of them, for preview prompts; `digest`: identity of all of it."""

    title: str
    pictures: int
    digest: str
    captions: tuple[str, ...]
    settings: Settings

    def __repr__(self) -> str:
        return f"<Safe-Scaler data set {self.title}, {self.pictures} pictures>"


@dataclass(frozen=True, repr=False)
class TargetsHandle:
    """Which layers get adapters and how they learn."""

    title: str
    settings: Settings

    def __repr__(self) -> str:
        return f"<Safe-Scaler LoRA targets {self.title}>"


@dataclass(frozen=True, repr=False)
class MonitorHandle:
    """How health is judged, and the node that shows it."""

    node_id: str
    settings: Settings

    def __repr__(self) -> str:
        return f"<Safe-Scaler monitor of node {self.node_id}>"


@dataclass(frozen=True, repr=False)
class CheckpointHandle:
    """A place to go on from. `mode`: exact (same run, bit-equal) or warm (a new run from the LoRA of that step)."""

    run_dir: Path
    checkpoint: str
    step: int
    mode: str

    def __repr__(self) -> str:
        return f"<Safe-Scaler checkpoint {self.checkpoint} of run {self.run_dir.name}, {self.mode}>"


@dataclass(frozen=True, repr=False)
class RunHandle:
    """A run that has ended. `lora`: its LoRA file."""

    run_dir: Path
    status: str
    step: int
    lora: Path | None
    model: ModelHandle | None = None

    @property
    def run_id(self) -> str:
        return self.run_dir.name

    def __repr__(self) -> str:
        return f"<Safe-Scaler run {self.run_id}, {self.status} at step {self.step}>"
