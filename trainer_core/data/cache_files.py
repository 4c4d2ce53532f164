"""Content-addressed shards of tensors: safetensors files written once, whole, under their final name.

A shard holds the entries of one write; its header says which, with a checksum each, so opening a cache reads headers
only. A damaged shard is set aside and its entries are made again. Names stay far below 143 bytes (the limit of
encrypted file systems).
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..errors import ResourceError

log = logging.getLogger(__name__)

_SUMS = "checksums"
_OPEN_SHARDS = 32


def digest(*parts: object) -> str:
    """Key of a cache entry: blake2b-128 over everything that changes the result."""
    text = json.dumps([str(part) for part in parts], ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


HOLE = "\0"
"""Stands for the part that a `DigestMaker` is called with."""


class DigestMaker:
    """`digest` for many keys that differ in one part (hexadecimal digits), at a quarter of the time."""

    def __init__(self, *parts: object) -> None:
        text = json.dumps([str(part) for part in parts], ensure_ascii=True)
        start, self._end = (piece.encode() for piece in text.split(json.dumps(HOLE)[1:-1]))
        self._start = hashlib.blake2b(start, digest_size=16)

    def __call__(self, hexadecimal: str) -> str:
        total = self._start.copy()
        total.update(hexadecimal.encode() + self._end)
        return total.hexdigest()


class ShardStore:
    """All shards named `<prefix>-*.safetensors` of one folder. An entry is the tensors `parts` under one key.

    Raises ResourceError when the folder cannot be made.
    """

    def __init__(self, folder: Path, prefix: str, parts: Sequence[str]) -> None:
        self.folder = folder
        self.prefix = prefix
        self.parts = tuple(parts)
        self.damaged: list[str] = []
        self._shard_of: dict[str, str] = {}
        self._sums: dict[str, str] = {}
        self._verified: set[str] = set()
        self._read: set[str] = set()
        self._handles: OrderedDict[str, Any] = OrderedDict()
        self.refresh()

    def __contains__(self, key: object) -> bool:
        return key in self._shard_of

    def __len__(self) -> int:
        return len(self._shard_of)

    def refresh(self) -> None:
        """Take in shards that were not there before."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(
                f"The cache folder '{self.folder}' cannot be made: {error.strerror or error}. "
                "Set dataset.cache_dir to another."
            ) from error
        for path in sorted(self.folder.glob(f"{self.prefix}-*.safetensors")):
            if path.name not in self._read:
                self._take_in(path)

    def _take_in(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as shard:
                sums: dict[str, str] = json.loads((shard.metadata() or {})[_SUMS])
                names = set(shard.keys())
            if names != {f"{key}/{part}" for key in sums for part in self.parts}:
                raise ValueError("its entries and its checksums do not agree")
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            self._set_aside(path, str(error))
            return
        self._read.add(path.name)
        self._sums.update(sums)
        self._shard_of.update(dict.fromkeys(sums, path.name))

    def _set_aside(self, path: Path, why: str) -> None:
        """Forget and remove a damaged shard: its entries will be made again."""
        log.warning("the cache file %s is damaged (%s); its entries are made again", path.name, why)
        self.damaged.append(path.name)
        self._read.discard(path.name)
        self._handles.pop(path.name, None)
        self._shard_of = {key: name for key, name in self._shard_of.items() if name != path.name}
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("the damaged cache file %s cannot be removed: %s", path, error)

    def get(self, key: str) -> dict[str, torch.Tensor] | None:
        """Tensors of an entry by part, or None when it is not there or turned out to be damaged."""
        name = self._shard_of.get(key)
        if name is None:
            return None
        path = self.folder / name
        try:
            shard = self._handle(name)
            # cloned, because a tensor of a memory-mapped file would keep it open
            own = {part: shard.get_tensor(f"{key}/{part}").clone() for part in self.parts}
        except (SafetensorError, OSError) as error:
            self._set_aside(path, str(error))
            return None
        if key not in self._verified:
            if checksum(own) != self._sums[key]:
                self._set_aside(path, f"the checksum of entry {key} is wrong")
                return None
            self._verified.add(key)
        return own

    def _handle(self, name: str) -> Any:
        """The open shard, one of the last few used: parsing a header again for every entry would be slow."""
        handle = self._handles.pop(name, None) or safe_open(self.folder / name, "pt").__enter__()
        self._handles[name] = handle
        while len(self._handles) > _OPEN_SHARDS:
            self._handles.popitem(last=False)
        return handle

    def put(self, entries: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Write entries as one new shard. Raises ResourceError when the disk is full or cannot be written."""
        if not entries:
            return
        tensors = {f"{key}/{part}": entries[key][part].contiguous() for key in entries for part in self.parts}
        sums = {key: checksum(parts) for key, parts in entries.items()}
        data = save(tensors, {_SUMS: json.dumps(sums, sort_keys=True)})
        name = f"{self.prefix}-{digest(*sorted(sums.items()))}.safetensors"
        write_whole(self.folder / name, data)
        self._read.add(name)
        self._sums.update(sums)
        self._shard_of.update(dict.fromkeys(sums, name))


def checksum(parts: Mapping[str, torch.Tensor]) -> str:
    """blake2b-64 over names and bytes of an entry's tensors."""
    total = hashlib.blake2b(digest_size=8)
    for name in sorted(parts):
        total.update(name.encode())
        total.update(parts[name].contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Write under a temporary name, flush to disk, rename. ResourceError with the sizes when there is no room."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(path.parent).free
            raise ResourceError(
                f"No room for the cache file '{path}': it needs {len(data):,} bytes, {free:,} are free. "
                "Free some space or set dataset.cache_dir to another disk."
            ) from error
        raise ResourceError(f"The cache file '{path}' cannot be written: {error}.") from error
