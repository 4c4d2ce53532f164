"""Which samples of a step each process computes. Pure.

A step is the same whatever the number of processes: batch size and accumulation say what it holds, and it is shared
out. So a run may go on with another number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """Samples `first` to `last` (exclusive) of micro-batch `batch`; `place` is that of the first one in the step."""

    batch: int
    first: int
    last: int
    place: int


def share(sizes: Sequence[int], processes: int, rank: int) -> list[Piece]:
    """The pieces of `rank` of a step with micro-batches of these sizes, in order.

    Whole micro-batches go round as long as there is one for everybody; the rest are cut, and who gets the longer pieces
    changes from one to the next.
    """
    whole = len(sizes) // processes * processes
    pieces: list[Piece] = []
    place = 0
    for batch, size in enumerate(sizes):
        if batch < whole:
            if batch % processes == rank:
                pieces.append(Piece(batch, 0, size, place))
        else:
            turn = (rank - (batch - whole)) % processes
            short, longer = divmod(size, processes)
            first = turn * short + min(turn, longer)
            last = first + short + (turn < longer)
            if last > first:
                pieces.append(Piece(batch, first, last, place + first))
        place += size
    return pieces


def own_batches(batches: Sequence[Sequence[T]], pieces: Sequence[Piece]) -> list[Sequence[T]]:
    """The samples of `pieces`."""
    return [batches[piece.batch][piece.first : piece.last] for piece in pieces]
