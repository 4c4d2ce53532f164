"""LoRA files in kohya's format: written durably and never over another file, read with plain refusals.

Format: kohya.md 2.1, 2.4, 2.6. Keys `<name>.{alpha, lora_down.weight, lora_up.weight}`, alpha a 0-dim float32 tensor of
the true alpha in every precision. Metadata is written sorted, so that equal content gives equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from ..errors import AdapterError

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Number formats of exported files."""

HEADER_LIMIT = 1 << 20
"""ComfyUI shows no metadata of a file whose header is longer (comfyui.md: `/view_metadata`)."""

_LEGACY_FROM, _LEGACY_TO, _LEGACY_DIGITS = 0x100000, 0x110000, 8
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class SavedLora:
    """What was written. `model_hash` is A1111's hash and Civitai's AutoV3 (there the first 12 digits)."""

    path: Path
    dtype: str
    size: int
    header_size: int
    model_hash: str
    legacy_hash: str


def free_path(path: str | Path) -> Path:
    """`path`, or the first of `-2`, `-3`, ... whose name is not taken."""
    wanted = Path(path)
    candidate, number = wanted, 1
    while candidate.exists() or candidate.is_symlink():
        number += 1
        candidate = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
    return candidate


def cast_for_file(state: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """`state` as a file of `dtype` ("fp32", "fp16", "bf16") holds it: weights cast, alpha float32.

    Raises:
        AdapterError: a value is NaN or infinite, or too large for the format.
    """
    if dtype not in DTYPES:
        raise AdapterError(f"'{dtype}' is no number format of LoRA files; allowed are {', '.join(DTYPES)}.")
    cast: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        target = (
            torch.float32 if key.endswith(".alpha") else DTYPES[dtype] if value.is_floating_point() else value.dtype
        )
        cast[key] = value.detach().to("cpu", target).contiguous()
        if not torch.isfinite(cast[key]).all():
            reason = "holds NaN or infinity" if not torch.isfinite(value).all() else f"is too large for {dtype}"
            raise AdapterError(f"The LoRA cannot be saved: '{key}' {reason}. Nothing was written.")
    return cast


def hashes(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[str, str]:
    """(`sshs_model_hash`, `sshs_legacy_hash`) of tensors as they will be written (kohya.md 2.6).

    The first is the SHA-256 of everything after the header. The second covers bytes 0x100000 to 0x110000 of the file as
    it would be with the `ss_*` metadata alone.
    """
    ss_only = {key: value for key, value in metadata.items() if key.startswith("ss_")}
    content = safetensors.torch.save(dict(tensors), ss_only or None)
    (length,) = struct.unpack("<Q", content[:_LENGTH_BYTES])
    model_hash = hashlib.sha256(memoryview(content)[_LENGTH_BYTES + length :]).hexdigest()
    return model_hash, hashlib.sha256(content[_LEGACY_FROM:_LEGACY_TO]).hexdigest()[:_LEGACY_DIGITS]


def save_lora(
    path: str | Path, state: Mapping[str, torch.Tensor], metadata: Mapping[str, str], dtype: str = "fp32"
) -> SavedLora:
    """Write a LoRA file: hashes added, temporary name, flushed to the disk, renamed.

    Args:
        path: its name must be free (see `free_path`); the folder is made.
        state: tensors under kohya's keys.
        metadata: strings; the two `sshs_*` hashes are added.
        dtype: "fp32", "fp16" or "bf16"; alpha stays fp32.

    Raises:
        AdapterError: a value does not fit the format, the metadata is too long, or the name is taken.
        OSError: the disk is full or the folder cannot be written.
    """
    target = Path(path)
    tensors = cast_for_file(state, dtype)
    if not tensors:
        raise AdapterError(f"There is nothing to save into '{target}': the network has no tensors.")
    model_hash, legacy_hash = hashes(tensors, metadata)
    full = {**metadata, "sshs_model_hash": model_hash, "sshs_legacy_hash": legacy_hash}
    body = memoryview(safetensors.torch.save(tensors))
    (length,) = struct.unpack("<Q", body[:_LENGTH_BYTES])
    header = _sorted_header(bytes(body[_LENGTH_BYTES : _LENGTH_BYTES + length]), full)
    if len(header) > HEADER_LIMIT:
        raise AdapterError(
            f"The metadata of '{target.name}' makes a header of {len(header)} bytes; ComfyUI reads at most "
            f"{HEADER_LIMIT}. Shorten it first (fit_metadata)."
        )
    _write_new(target, struct.pack("<Q", len(header)), header, body[_LENGTH_BYTES + length :])
    return SavedLora(target, dtype, target.stat().st_size, len(header), model_hash, legacy_hash)


def _sorted_header(header: bytes, metadata: Mapping[str, str]) -> bytes:
    """The header with sorted metadata, padded to a multiple of 8 as the format asks."""
    content = {"__metadata__": dict(sorted(metadata.items())), **json.loads(header)}
    raw = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    return raw + b" " * (-len(raw) % 8)


def _write_new(target: Path, *chunks: bytes | memoryview) -> None:
    """Write `chunks` under a temporary name, flush, and rename to a name that must be free."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if target.exists() or target.is_symlink():
            raise AdapterError(f"'{target}' exists and is not overwritten. Choose another name.")
        temporary.rename(target)
        _flush_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the system can (Windows flushes folders itself)."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
