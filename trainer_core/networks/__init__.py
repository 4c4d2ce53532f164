"""Networks: which layers are adapted, the LoRA layer itself, and the files it is stored in."""

from __future__ import annotations

from .dropout import DropoutDraws
from .lora import LoraModule
from .network import LoraNetwork, create_network
from .targets import PART_LABELS, PART_ORDER, Target, find_targets

__all__ = [
    "PART_LABELS",
    "PART_ORDER",
    "DropoutDraws",
    "LoraModule",
    "LoraNetwork",
    "Target",
    "create_network",
    "find_targets",
]
