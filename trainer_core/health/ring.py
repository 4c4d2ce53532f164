"""The flight recorder: the last steps in a memory-mapped file that can be read after the process was killed.

Layout: 16 bytes (magic, version, length of the header), a JSON header (tensor names, losses a step, slots), padding to
4096, then the slots. One writer. A slot's sequence number is odd while it is written, so a torn slot is recognised;
what was written is in the page cache and outlives the process, whatever ends it.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .records import FastRecord

_MAGIC = b"SSRING"
_VERSION = 1
_ALIGN = 4096
_OUTCOMES = ("applied", "POISON", "OVERFLOW", "FLOOR", "NORM-OVERFLOW", "WEIGHTS", "other")
_MOST_LOSSES = 64


class RingWriter:
    """Writes one record a step. `names`: the trained tensors; a step's norms stand in this order."""

    def __init__(self, path: str | Path, names: Sequence[str], *, slots: int, losses: int = 16) -> None:
        self.path = Path(path)
        self.names = tuple(names)
        self._losses = max(1, min(losses, _MOST_LOSSES))
        self._slots = slots
        self._dtype = _slot_type(len(self.names), self._losses)
        header = json.dumps({"names": list(self.names), "losses": self._losses, "slots": slots}).encode()
        offset = -(-(16 + len(header)) // _ALIGN) * _ALIGN
        size = offset + slots * self._dtype.itemsize
        self._written = self._went_on(header, size)
        if self._written == 0:
            with self.path.open("wb") as file:
                file.write(_head(len(header)) + header)
                file.truncate(size)
        self._file = self.path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), size)
        self._array: np.ndarray[Any, Any] = np.ndarray((slots,), self._dtype, buffer=self._map, offset=offset)

    def write(self, record: FastRecord) -> None:
        """Put `record` into the next slot."""
        slot = self._array[self._written % self._slots]
        self._written += 1
        slot["sequence"] = 2 * self._written - 1
        slot["step"], slot["applied"] = record.step, record.applied
        slot["time_ns"] = time.time_ns()
        slot["outcome"] = _OUTCOMES.index(record.outcome) if record.outcome in _OUTCOMES else len(_OUTCOMES) - 1
        slot["loss"], slot["grad_norm"] = record.loss, record.grad_norm
        slot["loss_scale"], slot["clip"] = record.loss_scale, record.clip
        count = min(len(record.losses), self._losses)
        slot["samples"] = count
        slot["losses"][:count] = record.losses[:count]
        get = record.norms.get
        slot["norms"][:] = [get(name, -1.0) for name in self.names]
        slot["sequence"] = 2 * self._written

    def close(self) -> None:
        del self._array
        self._map.close()
        self._file.close()

    def _went_on(self, header: bytes, size: int) -> int:
        """Records already in the file, when it is one of the same run with the same tensors; 0 to begin anew."""
        try:
            if self.path.stat().st_size != size:
                return 0
            with self.path.open("rb") as file:
                if file.read(16 + len(header)) != _head(len(header)) + header:
                    return 0
            offset = size - self._slots * self._dtype.itemsize
            found = np.fromfile(self.path, self._dtype, offset=offset)
        except OSError:
            return 0
        return int(found["sequence"].max(initial=0) + 1) // 2


def read_ring(path: str | Path) -> list[FastRecord]:
    """Records of a flight recorder, oldest first; a slot that was being written when the process ended is left out.

    Raises:
        CheckpointError: the file is missing, or no flight recorder.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"The flight recorder {path} cannot be read: {error}.") from error
    if len(data) < 16 or data[:6] != _MAGIC:
        raise CheckpointError(f"{path} is no flight recorder of a run (health.ring in the run folder).")
    version, length = struct.unpack_from("<HQ", data, 6)
    if version != _VERSION:
        raise CheckpointError(f"{path} has format {version}, this version reads {_VERSION}.")
    header = json.loads(data[16 : 16 + length])
    kind = _slot_type(len(header["names"]), header["losses"])
    slots = np.frombuffer(data, kind, count=header["slots"], offset=-(-(16 + length) // _ALIGN) * _ALIGN)
    whole = slots[(slots["sequence"] > 0) & (slots["sequence"] % 2 == 0)]
    return [_record(slot, header["names"]) for slot in whole[np.argsort(whole["sequence"])]]


def _record(slot: Any, names: Sequence[str]) -> FastRecord:
    norms = slot["norms"].tolist()
    return FastRecord(
        step=int(slot["step"]),
        applied=int(slot["applied"]),
        outcome=_OUTCOMES[int(slot["outcome"])],
        loss=float(slot["loss"]),
        losses=tuple(slot["losses"][: int(slot["samples"])].tolist()),
        grad_norm=float(slot["grad_norm"]),
        loss_scale=float(slot["loss_scale"]),
        clip=float(slot["clip"]),
        # -1 stands for "no gradient"; a NaN compares as false and is kept.
        norms={name: norm for name, norm in zip(names, norms, strict=True) if norm >= 0 or math.isnan(norm)},
        time=float(slot["time_ns"]) / 1e9,
    )


def _head(length: int) -> bytes:
    return _MAGIC + struct.pack("<HQ", _VERSION, length)


def _slot_type(tensors: int, losses: int) -> np.dtype[Any]:
    return np.dtype(
        [
            ("sequence", "<u8"),
            ("step", "<i8"),
            ("applied", "<i8"),
            ("time_ns", "<i8"),
            ("outcome", "<u1"),
            ("samples", "<u1"),
            ("loss", "<f4"),
            ("grad_norm", "<f8"),
            ("loss_scale", "<f4"),
            ("clip", "<f4"),
            ("losses", "<f4", (losses,)),
            ("norms", "<f4", (tensors,)),
        ]
    )
