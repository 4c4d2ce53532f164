"""Where the bytes of a picture or caption are: a file, or a piece of a tar shard.

A location is a path, or a tar's path with offset and size behind a separator that no sane file name holds.
"""

from __future__ import annotations

import hashlib
import os
import re

MARK = "\x1f"
_PIECE = re.compile(r"\x1f(\d+):(\d+)$")
_HASH_BYTES = 16


def tar_name(member: str, offset: int, size: int) -> str:
    """Name of a tar member that carries where its bytes are."""
    return f"{member}{MARK}{offset}:{size}"


def shown_name(name: str) -> str:
    """A name as people know it."""
    return name.partition(MARK)[0] if MARK in name and _PIECE.search(name) else name


def locate(folder: str, name: str) -> str:
    """Location of `name` in a folder, or of a `tar_name` in the tar file `folder`."""
    piece = _PIECE.search(name) if MARK in name else None
    return folder + piece.group(0) if piece else os.path.join(folder, name)


def file_of(location: str) -> str:
    """The file that must be there for a location: itself, or its tar."""
    return shown_name(location)


def size_of(location: str) -> int:
    """Bytes at a location."""
    piece = _PIECE.search(location)
    return int(piece.group(2)) if piece else os.stat(location).st_size


def read_location(location: str) -> bytes:
    """All bytes at a location. Raises OSError."""
    piece = _PIECE.search(location)
    with open(file_of(location), "rb") as stream:
        if piece is None:
            return stream.read()
        stream.seek(int(piece.group(1)))
        return stream.read(int(piece.group(2)))


def hash_bytes(data: bytes) -> str:
    """blake2b-128 of `data` in hex: the identity of a file's content."""
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).hexdigest()


def hash_location(location: str) -> str:
    """`hash_bytes` of what is at a location of any size, read in pieces."""
    if _PIECE.search(location):
        return hash_bytes(read_location(location))
    digest = hashlib.blake2b(digest_size=_HASH_BYTES)
    with open(location, "rb") as stream:
        while piece := stream.read(2**20):
            digest.update(piece)
    return digest.hexdigest()
