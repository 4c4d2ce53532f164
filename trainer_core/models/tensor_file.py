"""Reading and writing `.safetensors` files one tensor at a time.

Format (safetensors README): 8 bytes little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`
with an optional `__metadata__`, then the raw tensors without gaps. Only the header is read to find out what a file is.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from ..errors import ModelFileError
from ..plain_text import parse_json
from .foreign import describe_foreign

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its type in safetensors' spelling, its shape, and the bytes [begin, end) of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file whose header was read and checked against the file's length."""

    path: Path
    size: int
    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]

    def read(
        self, name: str, handle: BinaryIO, rows: tuple[int, int] | None = None, scratch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Copy a tensor, or its rows [first, last), into memory with plain reads.

        Unlike with `MappedTensors` no page of the file stays in this process's memory. With `scratch` (bytes) the
        result is a view of its beginning: use it before the next read.
        """
        entry = self.entries[name]
        shape, begin = entry.shape, entry.begin
        if rows is not None:
            begin += rows[0] * ((entry.end - entry.begin) // shape[0])
            shape = (rows[1] - rows[0], *shape[1:])
        if scratch is None:
            tensor = torch.empty(shape, dtype=entry.torch_dtype)
        else:
            length = math.prod(shape) * entry.torch_dtype.itemsize
            tensor = scratch[:length].view(entry.torch_dtype).reshape(shape)
        if tensor.numel():
            target = _bytes_of(tensor)
            handle.seek(begin)
            filled = 0
            while filled < len(target):
                count = handle.readinto(target[filled:])  # type: ignore[attr-defined]  # raw file: may be short
                if not count:
                    raise ModelFileError(f"'{self.path}' became shorter while it was read. Copy it again.", self.path)
                filled += count
        return tensor

    def open_raw(self) -> BinaryIO:
        return open(self.path, "rb", buffering=0)  # type: ignore[return-value]


def read_header(path: Path) -> TensorFile:
    """Read and check the header of a safetensors file.

    Raises ModelFileError saying what the file is when it is something else, is cut off, empty, or cannot be read.
    """
    size, head = _first_bytes(path)
    foreign = describe_foreign(path, head, size)
    if foreign is not None:
        raise ModelFileError(foreign, path)
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > size:
        raise ModelFileError(
            f"'{path}' is not a usable safetensors file: its header should take {length:,} bytes, but the file has "
            f"{size:,}. The download is incomplete or this is another kind of file. Get it again and compare its size.",
            path,
        )
    with open(path, "rb") as file:
        file.seek(8)
        text = file.read(length)
    header = _parsed(path, text)
    metadata = header.pop("__metadata__", {})
    entries = _entries(path, header, 8 + length)
    _check_length(path, size, entries, 8 + length)
    return TensorFile(path=path, size=size, metadata=dict(metadata), entries=entries)


def _first_bytes(path: Path) -> tuple[int, bytes]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            # Opening a named pipe would wait for ever for somebody to write into it.
            raise ModelFileError(
                f"'{path}' is a device or pipe, not a file. Give a .safetensors file or a folder.", path
            )
        with open(path, "rb") as file:
            return status.st_size, file.read(512)
    except FileNotFoundError as error:
        hub = not path.is_absolute() and len(path.parts) == 2 and not path.suffix.startswith(".s")
        hint = (
            " If it is the name of a model on the Hugging Face Hub: download it first and give its folder."
            if hub
            else ""
        )
        raise ModelFileError(
            f"There is no file '{path}'. Check the path; a relative one is looked for from '{Path.cwd()}'.{hint}", path
        ) from error
    except PermissionError as error:
        raise ModelFileError(
            f"'{path}' cannot be read: permission denied. Give your user read permission on the file and its folder.",
            path,
        ) from error
    except OSError as error:
        raise ModelFileError(f"'{path}' cannot be read: {error}. Check the disk or the network share.", path) from error


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = parse_json(text)
    except ValueError as error:
        raise ModelFileError(
            f"'{path}' is not a safetensors file: its header is not readable ({error}). "
            "The file is damaged or of another kind. Get it again.",
            path,
        ) from error
    if not isinstance(header, dict):
        raise ModelFileError(f"'{path}' is not a safetensors file: its header is no table. Get it again.", path)
    return header


def _entries(path: Path, header: Mapping[str, Any], start: int) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for name, fields in header.items():
        try:
            begin, end = (int(value) + start for value in fields["data_offsets"])
            entry = Entry(str(fields["dtype"]), tuple(int(side) for side in fields["shape"]), begin, end)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFileError(
                f"'{path}' is damaged: the header entry of '{name}' is not readable. Get it again.", path
            ) from error
        if entry.dtype in TORCH_DTYPES:
            expected = math.prod(entry.shape) * entry.torch_dtype.itemsize
            if end - begin != expected:
                raise ModelFileError(
                    f"'{path}' is damaged: '{name}' takes {end - begin} bytes instead of {expected}. Get it again.",
                    path,
                )
        entries[name] = entry
    return entries


def _check_length(path: Path, size: int, entries: Mapping[str, Entry], start: int) -> None:
    expected = max((entry.end for entry in entries.values()), default=start)
    if size < expected:
        raise ModelFileError(
            f"'{path}' is cut off: it has {size:,} bytes and its header tells of {expected:,} "
            f"({(expected - size) / 1e6:,.1f} MB are missing). Download or copy it again.",
            path,
        )
    if size > expected:
        raise ModelFileError(
            f"'{path}' is damaged: it has {size:,} bytes but its header tells of only {expected:,}. Get it again.", path
        )


class MappedTensors:
    """The tensors of one file as views of its memory map: nothing is read before it is touched, nothing is copied.

    The map is private (a write to a tensor never reaches the file) and lives as long as any of its tensors.
    """

    def __init__(self, file: TensorFile) -> None:
        self.file = file
        self._handle = safe_open(str(file.path), framework="pt")

    def get(self, name: str) -> torch.Tensor:
        return self._handle.get_tensor(name)


@dataclass(frozen=True)
class Outgoing:
    """A tensor to be written: type and shape now, the values when their turn comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Callable[[], torch.Tensor]


def write_tensors(path: Path, tensors: Mapping[str, Outgoing], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file holding one tensor in memory at a time: temporary name, flush, rename.

    Metadata is written sorted. Raises OSError when the disk cannot take it (nothing is left behind then).
    """
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    offset = 0
    for name, tensor in tensors.items():
        length = math.prod(tensor.shape) * tensor.dtype.itemsize
        kind = SAFETENSORS_DTYPES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            _write_values(file, tensors.items())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_values(file: BinaryIO, tensors: Iterable[tuple[str, Outgoing]]) -> None:
    for name, outgoing in tensors:
        values = outgoing.values().detach().to(device="cpu", dtype=outgoing.dtype).contiguous()
        if tuple(values.shape) != outgoing.shape:
            raise ValueError(f"{name}: announced shape {outgoing.shape}, got {tuple(values.shape)}")
        if values.numel():
            file.write(_bytes_of(values))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
