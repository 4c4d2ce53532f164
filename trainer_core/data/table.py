"""All items of a scan in columns: about 60 bytes a picture plus its name and caption, whatever the number of pictures.

An `Item` is made when it is looked at. Names and captions are UTF-8 in two blobs with offsets.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from .buckets import Placement
from .locations import MARK, locate, shown_name
from .records import Item
from .sets import SetSpec

_ROW = struct.Struct("<HIHIIIII16sQQ")
"""Set, folder, bucket; width, height; resized width, height; repeats; content; where name and caption end."""
_START, _ENDS = struct.Struct("<HIHIIIII"), struct.Struct("<QQ")
_COLUMNS = np.dtype(
    [
        ("set", "<u2"),
        ("folder", "<u4"),
        ("bucket", "<u2"),
        ("size", "<u4", (2,)),
        ("resized", "<u4", (2,)),
        ("repeats", "<u4"),
        ("content", "<u8", (2,)),
        ("name_end", "<u8"),
        ("caption_end", "<u8"),
    ]
)
_PARTS = np.dtype([("start", f"V{_START.size}"), ("content", "V16"), ("name_end", "<u8"), ("caption_end", "<u8")])
"""The same row as `add_many` puts it together."""
_REPEATS_AT = struct.calcsize("<HIHIIII")


class ItemTable(Sequence[Item]):
    """Append with `add`; read as a sequence of items."""

    def __init__(self) -> None:
        self.specs: list[SetSpec] = []
        self.buckets: list[tuple[int, int]] = []
        self._folders: list[tuple[str, str, str]] = []
        self._spec_ids: dict[int, int] = {}
        self._bucket_ids: dict[tuple[int, int], int] = {}
        self._rows = bytearray()
        self._names = bytearray()
        self._captions = bytearray()
        self._notes: dict[int, tuple[str, ...]] = {}
        self._masks: dict[int, str] = {}

    @property
    def _columns(self) -> np.ndarray:
        """The rows as a structured array (a copy: the table may still grow)."""
        return np.frombuffer(bytes(self._rows), _COLUMNS)

    def folder(self, path: str, relative: str) -> int:
        """Number of a folder: `path` on disk, `relative` the start of its files' names in the report."""
        self._folders.append((path, os.path.join(path, ""), relative))
        return len(self._folders) - 1

    def add(
        self,
        spec: SetSpec,
        folder: int,
        name: str,
        *,
        content_hash: str,
        size: tuple[int, int],
        place: Placement,
        caption: str,
        notes: tuple[str, ...] = (),
        mask: str | None = None,
    ) -> None:
        """Append a picture `name` of a folder that `folder()` gave the number of."""
        row = len(self)
        self.add_known(self.row_start(spec, folder, size, place), bytes.fromhex(content_hash), name, caption)
        if notes:
            self._notes[row] = notes
        if mask is not None:
            self._masks[row] = mask

    def row_start(self, spec: SetSpec, folder: int, size: tuple[int, int], place: Placement) -> bytes:
        """The part of a row that pictures of one set, folder and size share, for `add_known`."""
        ids = (self._spec_id(spec), folder, self._bucket_id(place.bucket))
        return _START.pack(*ids, *size, *place.resized, spec.repeats)

    def add_known(self, start: bytes, content: bytes, name: str, caption: str) -> None:
        """`add` for a picture without notes or mask; `start` as given by `row_start`. Made for many calls."""
        self._names += name.encode("utf-8", "surrogateescape")
        self._captions += caption.encode("utf-8", "surrogatepass")
        self._rows += start + content + _ENDS.pack(len(self._names), len(self._captions))

    def add_many(
        self, starts: Sequence[bytes], contents: Sequence[bytes], names: Sequence[str], captions: Sequence[str]
    ) -> None:
        """`add_known` for many pictures at once; the four have one entry a picture."""
        files = [name.encode("utf-8", "surrogateescape") for name in names]
        texts = [caption.encode("utf-8", "surrogatepass") for caption in captions]
        rows = np.empty(len(files), _PARTS)
        rows["start"] = np.frombuffer(b"".join(starts), _PARTS["start"])
        rows["content"] = np.frombuffer(b"".join(contents), _PARTS["content"])
        rows["name_end"] = len(self._names) + np.cumsum([len(name) for name in files])
        rows["caption_end"] = len(self._captions) + np.cumsum([len(text) for text in texts])
        self._names += b"".join(files)
        self._captions += b"".join(texts)
        self._rows += rows.tobytes()

    def _spec_id(self, spec: SetSpec) -> int:
        found = self._spec_ids.get(id(spec))
        if found is None:
            found = self._spec_ids[id(spec)] = len(self.specs)
            self.specs.append(spec)
        return found

    def _bucket_id(self, bucket: tuple[int, int]) -> int:
        found = self._bucket_ids.get(bucket)
        if found is None:
            found = self._bucket_ids[bucket] = len(self.buckets)
            self.buckets.append(bucket)
        return found

    def __len__(self) -> int:
        return len(self._rows) // _ROW.size

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self._item(row) for row in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._item(index % len(self))

    def __iter__(self) -> Iterator[Item]:
        return (self._item(row) for row in range(len(self)))

    def _item(self, row: int) -> Item:
        at = row * _ROW.size
        spec, folder, bucket, width, height, *resized, repeats, content, name_end, caption_end = _ROW.unpack_from(
            self._rows, at
        )
        name_start, caption_start = _ROW.unpack_from(self._rows, at - _ROW.size)[-2:] if row else (0, 0)
        path, start, relative = self._folders[folder]
        name = self._names[name_start:name_end].decode("utf-8", "surrogateescape")
        piece = MARK in name
        return Item(
            file=relative + (shown_name(name) if piece else name),
            source=locate(path, name) if piece else start + name,
            content_hash=content.hex(),
            upright_size=(width, height),
            resized=(resized[0], resized[1]),
            bucket=self.buckets[bucket],
            spec=self.specs[spec],
            caption=self._captions[caption_start:caption_end].decode("utf-8", "surrogatepass"),
            repeats=repeats,
            mask=self._masks.get(row) if self._masks else None,
            notes=self._notes.get(row, ()) if self._notes else (),
        )

    def set_repeats(self, row: int, repeats: int) -> None:
        struct.pack_into("<I", self._rows, row * _ROW.size + _REPEATS_AT, repeats)

    def repeats_of(self, row: int) -> int:
        return struct.unpack_from("<I", self._rows, row * _ROW.size + _REPEATS_AT)[0]

    def rows_of(self, *, prior: bool) -> list[int]:
        """Rows of prior pictures, or of the others."""
        wanted = [number for number, spec in enumerate(self.specs) if spec.is_prior == prior]
        return np.flatnonzero(np.isin(self._columns["set"], wanted)).tolist()

    def upscaled(self, limit: float) -> list[int]:
        """Rows of pictures that are enlarged by more than `limit`."""
        columns = self._columns
        return np.flatnonzero((columns["resized"] / columns["size"]).max(axis=1, initial=0) > limit).tolist()

    def copies(self) -> list[list[int]]:
        """Groups of rows with the same content."""
        if len(self) < 2:
            return []
        halves = self._columns["content"]
        firsts = np.sort(halves[:, 0])
        if not (firsts[1:] == firsts[:-1]).any():  # the usual case, told at a tenth of the price
            return []
        order = np.lexsort((halves[:, 1], halves[:, 0]))
        same = (halves[order][1:] == halves[order][:-1]).all(axis=1)
        groups: list[list[int]] = []
        for at in np.flatnonzero(same).tolist():
            if groups and groups[-1][-1] == order[at]:
                groups[-1].append(int(order[at + 1]))
            else:
                groups.append([int(order[at]), int(order[at + 1])])
        return sorted(groups)

    @property
    def has_masks(self) -> bool:
        return bool(self._masks)

    def plan_columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of every row: number of its set in `specs`, of its bucket in `buckets`, and its repeats."""
        columns = self._columns
        return columns["set"].astype(np.int64), columns["bucket"].astype(np.int64), columns["repeats"].astype(np.int64)

    def without_unused(self) -> Sequence[Item]:
        """The items that have at least one repeat."""
        if self._columns["repeats"].all():
            return self
        return [item for item in self if item.repeats > 0]
