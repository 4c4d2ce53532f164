"""Comparing a file on the disk with what was meant to be written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from ..errors import AdapterError
from .lora_file import read_lora_header


def compare_tensors(path: Path, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Raises AdapterError unless `found` holds exactly the tensors of `expected`."""
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    different = [key for key in expected.keys() & found.keys() if not torch.equal(expected[key], found[key])]
    if missing or unknown or different:
        name = (missing or unknown or sorted(different))[0]
        raise AdapterError(
            f"'{path}' failed its proof: of {len(expected)} tensors {len(missing)} are missing, {len(unknown)} were "
            f"not in the network and {len(different)} differ, such as '{name}'. Do not use this file."
        )


def check_hash(path: Path, metadata: Mapping[str, str]) -> None:
    """Raises AdapterError unless the content matches the file's own `sshs_model_hash` (if it has one)."""
    claimed = metadata.get("sshs_model_hash")
    if claimed is not None and claimed != body_hash(path):
        raise AdapterError(
            f"'{path}' failed its proof: its content does not match its own sshs_model_hash. Do not use this file."
        )


def body_hash(path: Path) -> str:
    """SHA-256 of a safetensors file's bytes after the header."""
    header = read_lora_header(path)
    start = min((entry.begin for entry in header.entries.values()), default=header.size)
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        stream.seek(start)
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
