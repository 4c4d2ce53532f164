"""Some of a sequence's elements, by their places: a million pictures are never copied into a list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar, overload

import numpy as np

T = TypeVar("T")


class Subset(Sequence[T], Generic[T]):
    """The elements of `base` at `places`, in that order; made when they are looked at."""

    def __init__(self, base: Sequence[T], places: np.ndarray | Sequence[int]) -> None:
        self.base = base
        self.places = np.asarray(places, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Subset[T]: ...
    def __getitem__(self, index: int | slice) -> T | Subset[T]:
        if isinstance(index, slice):
            return Subset(self.base, self.places[index])
        return self.base[int(self.places[index])]

    def __iter__(self) -> Iterator[T]:
        return (self.base[place] for place in self.places.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]
