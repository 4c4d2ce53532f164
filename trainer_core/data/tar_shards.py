"""Tar shards in WebDataset's layout: a picture and its caption share their name up to the ending.

The archive's index is read once; pictures are then read by offset, in any order. So shuffling, buckets, caches and
resuming at a sample work as with a folder. (Layout: WebDataset, https://github.com/webdataset/webdataset.)
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path

from .caption_files import CaptionIndex, normal_stem
from .decode import ENDINGS
from .folders import Folder, is_passed_over
from .locations import tar_name

_BLOCK = 512


def list_tar(path: Path, relative: str, caption_extensions: Sequence[str]) -> tuple[Folder, str | None]:
    """(what is in a tar file, what is wrong with it or None). A tar that ends early gives the members before that."""
    folder = Folder(path, relative, captions=CaptionIndex(caption_extensions))
    problem, last = None, 0
    try:
        with tarfile.open(path, "r:") as archive:
            while (member := archive.next()) is not None:
                last = member.offset_data + (member.size if member.isfile() else 0)
                if member.isfile():
                    _sort_in(folder, member)
    except tarfile.ReadError as error:
        problem = f"damaged or no plain tar archive ({error}); {len(folder.pictures)} pictures before that are used"
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    size = path.stat().st_size if path.exists() else 0
    cut = [name for name in folder.pictures if _end(name) > size]
    if cut and problem is None:
        problem = f"truncated: it ends inside its member {cut[0].partition(chr(31))[0]}"
    if problem is None and size < -(-last // _BLOCK) * _BLOCK + _BLOCK:
        problem = "truncated: it stops without an end mark, so members may be missing"
    folder.set_pictures(name for name in folder.pictures if _end(name) <= size)
    return folder, problem


def _end(name: str) -> int:
    offset, size = name.rpartition("\x1f")[2].split(":")
    return int(offset) + int(size)


def _sort_in(folder: Folder, member: tarfile.TarInfo) -> None:
    name = member.name.removeprefix("./")
    base = name.rpartition("/")[2]
    at = base.rfind(".")
    suffix = base[at:].lower() if at > 0 else ""
    piece = tar_name(name, member.offset_data, member.size)
    if is_passed_over(base):
        folder.others.append(name)
    elif suffix in ENDINGS:
        folder.pictures.append(piece)
    elif suffix in folder.captions.extensions:
        folder.captions.add(piece, suffix, normal_stem(piece))
    else:
        folder.others.append(name)
