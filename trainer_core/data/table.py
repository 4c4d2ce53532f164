"""All items of a scan in columns: about 60 bytes a picture plus its name and caption, whatever the number of pictures.

An `Item` is made when it is looked at. Names and captions are UTF-8 in two blobs with offsets.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from .buckets import Placement
from .locations import locate, shown_name
from .records import Item
from .sets import SetSpec


class ItemTable(Sequence[Item]):
    """Append with `add`; read as a sequence of items."""

    def __init__(self) -> None:
        self.specs: list[SetSpec] = []
        self.buckets: list[tuple[int, int]] = []
        self._folders: list[tuple[str, str]] = []
        self._spec_ids: dict[int, int] = {}
        self._bucket_ids: dict[tuple[int, int], int] = {}
        self._set, self._folder, self._bucket = array("H"), array("I"), array("H")
        self._sizes, self._resized, self._repeats = array("I"), array("I"), array("I")
        self._hashes = bytearray()
        self._names, self._name_ends = bytearray(), array("Q")
        self._captions, self._caption_ends = bytearray(), array("Q")
        self._notes: dict[int, tuple[str, ...]] = {}
        self._masks: dict[int, str] = {}

    def folder(self, path: str, relative: str) -> int:
        """Number of a folder: `path` on disk, `relative` the start of its files' names in the report."""
        self._folders.append((path, relative))
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
        row = len(self._set)
        ids = self.ids_of(spec, folder, place.bucket)
        self.add_known(ids, size, place.resized, spec.repeats, bytes.fromhex(content_hash), name, caption)
        if notes:
            self._notes[row] = notes
        if mask is not None:
            self._masks[row] = mask

    def add_known(
        self,
        ids: tuple[int, int, int],
        size: tuple[int, int],
        resized: tuple[int, int],
        repeats: int,
        content: bytes,
        name: str,
        caption: str,
    ) -> None:
        """`add` for a picture without notes or mask; `ids` as given by `ids_of`. Made for many calls."""
        self._set.append(ids[0])
        self._folder.append(ids[1])
        self._bucket.append(ids[2])
        self._sizes.extend(size)
        self._resized.extend(resized)
        self._repeats.append(repeats)
        self._hashes += content
        self._names += name.encode("utf-8", "surrogateescape")
        self._name_ends.append(len(self._names))
        self._captions += caption.encode("utf-8", "surrogatepass")
        self._caption_ends.append(len(self._captions))

    def ids_of(self, spec: SetSpec, folder: int, bucket: tuple[int, int]) -> tuple[int, int, int]:
        """Numbers of a set, a folder and a bucket for `add_known`."""
        return self._spec_id(spec), folder, self._bucket_id(bucket)

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
        return len(self._set)

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
        path, relative = self._folders[self._folder[row]]
        stored = self._names[self._name_ends[row - 1] if row else 0 : self._name_ends[row]]
        name = stored.decode("utf-8", "surrogateescape")
        caption = self._captions[self._caption_ends[row - 1] if row else 0 : self._caption_ends[row]]
        return Item(
            file=relative + shown_name(name),
            source=locate(path, name),
            content_hash=self._hashes[16 * row : 16 * row + 16].hex(),
            upright_size=(self._sizes[2 * row], self._sizes[2 * row + 1]),
            resized=(self._resized[2 * row], self._resized[2 * row + 1]),
            bucket=self.buckets[self._bucket[row]],
            spec=self.specs[self._set[row]],
            caption=caption.decode("utf-8", "surrogatepass"),
            repeats=self._repeats[row],
            mask=self._masks.get(row),
            notes=self._notes.get(row, ()),
        )

    def set_repeats(self, row: int, repeats: int) -> None:
        self._repeats[row] = repeats

    def rows_of(self, *, prior: bool) -> list[int]:
        """Rows of prior pictures, or of the others."""
        wanted = [spec.is_prior == prior for spec in self.specs]
        return [row for row, number in enumerate(self._set) if wanted[number]]

    def repeats_of(self, row: int) -> int:
        return self._repeats[row]

    def upscaled(self, limit: float) -> list[int]:
        """Rows of pictures that are enlarged by more than `limit`."""
        if not len(self):
            return []
        sizes = np.frombuffer(self._sizes, np.uint32).reshape(-1, 2)
        resized = np.frombuffer(self._resized, np.uint32).reshape(-1, 2)
        return np.flatnonzero((resized / sizes).max(axis=1) > limit).tolist()

    def copies(self) -> list[list[int]]:
        """Groups of rows with the same content."""
        if len(self) < 2:
            return []
        halves = np.frombuffer(bytes(self._hashes), np.uint64).reshape(-1, 2)
        order = np.lexsort((halves[:, 1], halves[:, 0]))
        same = (halves[order][1:] == halves[order][:-1]).all(axis=1)
        groups: list[list[int]] = []
        for at in np.flatnonzero(same).tolist():
            if groups and groups[-1][-1] == order[at]:
                groups[-1].append(int(order[at + 1]))
            else:
                groups.append([int(order[at]), int(order[at + 1])])
        return sorted(groups)

    def without_unused(self) -> Sequence[Item]:
        """The items that have at least one repeat."""
        if all(self._repeats):
            return self
        return [item for item in self if item.repeats > 0]
