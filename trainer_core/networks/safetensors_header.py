"""The header of a safetensors file, read without its tensors, and a plain word for files that are something else.

Layout (huggingface/safetensors, README "Format"): 8 bytes little-endian length N, N bytes JSON, then the tensors' bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AdapterError

_LENGTH_BYTES = 8
_HEADER_LIMIT = 100_000_000
"""The format's own limit on N."""

_OTHER_FORMATS = (
    (b"PK\x03\x04", "a zip or PyTorch pickle file (.pt, .ckpt); convert it to .safetensors first"),
    (b"\x80", "a Python pickle file (.pt, .ckpt); convert it to .safetensors first"),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"<", "a web page, so the download was probably refused or asked for a log-in"),
    (b"version https://git-lfs", "a Git LFS pointer; the file itself was not downloaded"),
    (b"{", "a JSON file"),
)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as the header describes it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about itself. `data_start` is where the tensors' bytes begin."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int
    file_size: int


def read_header(path: Path) -> Header:
    """Read and check the header of `path`; nothing big is read.

    Raises:
        AdapterError: the file is missing, unreadable, empty, damaged, or of another format; the message says which.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_LENGTH_BYTES + 56)
            return _parse(path, file, head, size)
    except FileNotFoundError:
        raise AdapterError(f"There is no file '{path}'. Check the path.") from None
    except IsADirectoryError:
        raise AdapterError(f"'{path}' is a folder; give a .safetensors file.") from None
    except PermissionError:
        raise AdapterError(f"'{path}' cannot be read: no permission. Check who owns it.") from None


def _parse(path: Path, file: Any, head: bytes, size: int) -> Header:
    if size == 0:
        raise AdapterError(f"'{path}' is empty (0 bytes); the download or copy failed. Get it again.")
    for magic, meaning in _OTHER_FORMATS:
        if head.startswith(magic) and not _looks_like_header(head):
            raise AdapterError(f"'{path}' is not a safetensors file but {meaning}.")
    if size < _LENGTH_BYTES + 2:
        raise AdapterError(f"'{path}' is damaged: {size} bytes are too few for a safetensors file. Get it again.")
    (length,) = struct.unpack("<Q", head[:_LENGTH_BYTES])
    if length > _HEADER_LIMIT:
        raise AdapterError(
            f"'{path}' is damaged, or not a safetensors file: its header claims {length} bytes. Get it again."
        )
    data_start = _LENGTH_BYTES + length
    if data_start > size:
        raise AdapterError(
            f"'{path}' is truncated inside its header: {data_start} bytes are needed, {size} are there. Get it again."
        )
    file.seek(_LENGTH_BYTES)
    tensors, metadata = _decode(path, file.read(length))
    needed = data_start + max((entry.end for entry in tensors.values()), default=0)
    if needed != size:
        kind = "truncated" if needed > size else "damaged (there is more than the header describes)"
        raise AdapterError(f"'{path}' is {kind}: its header describes {needed} bytes, {size} are there. Get it again.")
    return Header(tensors, metadata, data_start, size)


def _looks_like_header(head: bytes) -> bool:
    return head[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{" and head[5:_LENGTH_BYTES] == b"\0\0\0"


def _decode(path: Path, raw: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    try:
        content = json.loads(raw)
        metadata = content.pop("__metadata__", {})
        tensors = {
            name: TensorEntry(str(entry["dtype"]), tuple(entry["shape"]), *map(int, entry["data_offsets"]))
            for name, entry in content.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterError(
            f"'{path}' is damaged, or not a safetensors file: its header cannot be read ({error}). Get it again."
        ) from None
    return tensors, {str(key): str(value) for key, value in metadata.items()}
