"""A content identity of weights that costs little even for 7 GB.

blake2b over the name, type, shape and bytes of every tensor used; of a tensor larger than 8 KiB only the first and the
last 4 KiB are read (about 20 MB for SDXL). Two files that differ only in the middle of large tensors would look equal:
training, merging and converting change every tensor throughout, so that does not happen by accident; a deliberate
forgery is not what this is for. Files up to `WHOLE_BYTES` are read completely.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from .sources import Slot

SAMPLE_BYTES = 4096
WHOLE_BYTES = 64_000_000


def part_fingerprint(slots: Mapping[str, Slot]) -> str:
    """32 hex digits for the weights of one part; independent of path, of file order and of other parts' weights."""
    digest = hashlib.blake2b(digest_size=16)
    tensors = {(str(slot.file.path), slot.key): slot for slot in slots.values()}
    with ExitStack() as stack:
        handles: dict[Path, BinaryIO] = {}
        for _, slot in sorted(tensors.items(), key=lambda pair: pair[0][1]):
            if slot.file.path not in handles:
                handles[slot.file.path] = stack.enter_context(slot.file.open_raw())
            entry = slot.entry
            digest.update(f"{slot.key}\0{entry.dtype}\0{entry.shape}\0".encode())
            _add_bytes(digest, slot, handles[slot.file.path])
    return digest.hexdigest()


def _add_bytes(digest: hashlib.blake2b, slot: Slot, handle: BinaryIO) -> None:
    begin, end = slot.entry.begin, slot.entry.end
    whole = slot.file.size <= WHOLE_BYTES or end - begin <= 2 * SAMPLE_BYTES
    pieces = [(begin, end)] if whole else [(begin, begin + SAMPLE_BYTES), (end - SAMPLE_BYTES, end)]
    for start, stop in pieces:
        handle.seek(start)
        while start < stop:
            block = handle.read(stop - start)
            if not block:
                raise OSError(f"{slot.file.path} became shorter while it was read")
            digest.update(block)
            start += len(block)


def joined_fingerprint(parts: Mapping[str, str]) -> str:
    """One identity for a model made of several parts."""
    text = "\n".join(f"{part}:{value}" for part, value in sorted(parts.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
