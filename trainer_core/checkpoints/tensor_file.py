"""Tensors to and from safetensors files in one pass: digested while written, digested while read.

The library's own `save_file` cannot flush to the disk or hand out a digest, and its `load` copies everything once
more. The format (8-byte little-endian header length, JSON header, raw little-endian data) is that of
https://huggingface.co/docs/safetensors; tests read our files with the library and the library's files with ours.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..collector import collector_paused
from .manifest import Damaged, FileEntry

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_CHUNK = 8 << 20
_MAX_HEADER = 100 << 20


@dataclass(frozen=True)
class TensorFile:
    """Content of a file and what was found on the way."""

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]
    entry: FileEntry


def pieces(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The bytes of a safetensors file, header first, without a second copy of the tensors (which are on the CPU)."""
    if sys.byteorder != "little":
        raise RuntimeError("safetensors files are little-endian; this machine is not")
    # Widest types first keeps every tensor aligned to its own size, as the library does.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    with collector_paused():  # it would hold the interpreter's lock, and with it the training
        text = _header(tensors, metadata, order)
    yield memoryview(struct.pack("<Q", len(text)) + text)
    for name in order:
        if tensors[name].numel():
            yield raw_bytes(tensors[name])


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], order: Sequence[str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} has dtype {tensor.dtype}, which a checkpoint cannot hold")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    return text + b" " * (-len(text) % 8)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, row-major."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data.cast("B")


def read(path: Path, expected: FileEntry | None = None) -> TensorFile:
    """Read a file, hashing it in the same pass. Damaged when size, digest or header are wrong."""
    size = path.stat().st_size
    if expected is not None and size != expected.bytes:
        raise Damaged(f"{path.name} has {size} bytes instead of {expected.bytes}")
    # One buffer that the tensors are views of (the data begins at a multiple of 8 after an 8-byte length), and it is
    # what is hashed. Pages of a mapped file would save the copy, but may be dropped after the hashing and come from the
    # disk a second time, as something else.
    buffer = torch.empty(size, dtype=torch.uint8)
    digest = hashlib.sha256()
    view = buffer.numpy().data if size else memoryview(b"")
    done = 0
    # One piece is hashed while the next one is read: both let go of the interpreter's lock.
    with path.open("rb", buffering=0) as stream, ThreadPoolExecutor(1) as beside:
        hashed: list[Future[None]] = []
        while done < size:
            count = stream.readinto(view[done : done + _CHUNK])
            if not count:
                raise Damaged(f"{path.name} ended after {done} of {size} bytes")
            hashed.append(beside.submit(digest.update, view[done : done + count]))
            done += count
        for future in hashed:
            future.result()
    entry = FileEntry(size, digest.hexdigest())
    if expected is not None and entry.sha256 != expected.sha256:
        raise Damaged(f"{path.name} does not match its SHA-256")
    tensors, metadata = _views(path.name, buffer, view)
    return TensorFile(tensors, metadata, entry)


def _views(name: str, buffer: torch.Tensor, view: memoryview) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    if len(view) < 8:
        raise Damaged(f"{name} is too short to be a safetensors file")
    (length,) = struct.unpack("<Q", view[:8])
    start = 8 + length
    if length > _MAX_HEADER or start > len(view):
        raise Damaged(f"{name} is cut inside its header")
    try:
        header: dict[str, Any] = json.loads(bytes(view[8:start]))
        metadata: dict[str, str] = header.pop("__metadata__", {})
        tensors = _cut(header, buffer, start)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Damaged(f"{name} has a damaged header ({error})") from error
    return tensors, metadata


def _cut(header: dict[str, Any], buffer: torch.Tensor, start: int) -> dict[str, torch.Tensor]:
    """The tensors as views of the file's bytes, whose data begin at `start`. One view each out of the buffer seen as
    that type: slicing bytes and then changing type and shape takes four times as long, for thousands of tensors."""
    size = len(buffer)
    typed: dict[torch.dtype, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    for key, entry in header.items():
        dtype, shape = DTYPES[entry["dtype"]], [int(length) for length in entry["shape"]]
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= size - start or min(shape, default=0) < 0:
            raise ValueError("offsets do not fit the file")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError("offsets do not fit the shape")
        place, odd = divmod(start + begin, dtype.itemsize)
        if odd:
            tensors[key] = buffer[start + begin : start + end].clone().view(dtype).reshape(shape)
            continue
        if dtype not in typed:
            typed[dtype] = buffer[: size // dtype.itemsize * dtype.itemsize].view(dtype)
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        tensors[key] = typed[dtype].as_strided(shape, strides, place)
    return tensors
