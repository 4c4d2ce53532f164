"""Networks: which layers are adapted, the LoRA layer itself, and the files it is stored in."""

from __future__ import annotations

from .create import create_network
from .dropout import DropoutDraws
from .export import ExportedLora, export_lora
from .from_file import network_from_file
from .inspect import LoraInspection, inspect_lora
from .interface import Network
from .kohya_file import SavedLora, free_path, save_lora
from .lora import LoraModule
from .lora_file import LoraFile, load_lora
from .metadata import FolderFacts, TrainingFacts, build_metadata, model_file_hashes, tag_frequency
from .metadata_size import fit_metadata
from .network import LoraNetwork
from .proof import ProofResult, prove_lora_file
from .targets import PART_LABELS, PART_ORDER, Target, find_targets
from .warm_start import warm_start

__all__ = [
    "PART_LABELS",
    "PART_ORDER",
    "DropoutDraws",
    "ExportedLora",
    "FolderFacts",
    "LoraFile",
    "LoraInspection",
    "LoraModule",
    "LoraNetwork",
    "Network",
    "ProofResult",
    "SavedLora",
    "Target",
    "TrainingFacts",
    "build_metadata",
    "create_network",
    "export_lora",
    "find_targets",
    "fit_metadata",
    "free_path",
    "inspect_lora",
    "load_lora",
    "model_file_hashes",
    "network_from_file",
    "prove_lora_file",
    "save_lora",
    "tag_frequency",
    "warm_start",
]
