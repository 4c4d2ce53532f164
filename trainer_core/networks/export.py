"""One call from a live network to a proven LoRA file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .interface import Network, known_network
from .kohya_file import SavedLora, save_lora
from .metadata_size import fit_metadata
from .network import LoraNetwork
from .proof import ProofResult, prove_lora_file

if TYPE_CHECKING:
    from ..models import SDXLModel


@dataclass(frozen=True)
class ExportedLora:
    """A written and proven file. `notes` says what had to be left out of the metadata."""

    saved: SavedLora
    proof: ProofResult
    notes: tuple[str, ...]


def export_lora(
    path: str | Path,
    network: Network,
    model: SDXLModel,
    metadata: Mapping[str, str],
    *,
    dtype: str = "fp32",
    require_effect: bool = True,
) -> ExportedLora:
    """Save `network` to a free name and prove the file (see `proof.py`).

    A file that fails its proof is renamed to `<name>.failed`, so that nobody loads it by accident.

    Raises:
        AdapterError: the file cannot be written as asked, or it failed its proof.
    """
    network = known_network(network)
    state = network.state_dict() if isinstance(network, LoraNetwork) else network.export_state_dict()
    fitting, notes = fit_metadata(metadata, state)
    saved = save_lora(path, state, fitting, dtype)
    proven = False
    try:
        proof = prove_lora_file(saved.path, network, model, require_effect=require_effect)
        proven = True
    finally:
        if not proven:
            saved.path.replace(saved.path.with_name(f"{saved.path.name}.failed"))
    return ExportedLora(saved, proof, notes)
