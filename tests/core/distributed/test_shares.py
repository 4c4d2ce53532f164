"""How a step is shared out: complete, in order, even, for any number of processes."""

from __future__ import annotations

import pytest

from trainer_core.distributed.shares import own_batches, share


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("sizes", [[4], [4, 4], [3, 4, 1], [1], [2, 2, 2, 2, 1], [8, 8, 8, 8, 8, 8, 8]])
def test_every_sample_is_computed_once(sizes: list[int], processes: int) -> None:
    places: list[int] = []
    counts: list[int] = []
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    for rank in range(processes):
        pieces = share(sizes, processes, rank)
        own = [starts[piece.batch] + at for piece in pieces for at in range(piece.first, piece.last)]
        assert [piece.place for piece in pieces] == [starts[piece.batch] + piece.first for piece in pieces]
        counts.append(len(own))
        places += own
    assert sorted(places) == list(range(sum(sizes)))
    assert max(counts) - min(counts) <= max(sizes)


def test_one_process_has_everything_and_whole_batches_stay_whole() -> None:
    batches = ["abcd", "efgh", "ij"]
    assert own_batches(batches, share([4, 4, 2], 1, 0)) == batches
    assert own_batches(batches, share([4, 4, 2], 2, 0)) == ["abcd", "i"]
    assert own_batches(batches, share([4, 4, 2], 2, 1)) == ["efgh", "j"]
    assert own_batches(["abc"], share([3], 2, 0)) == ["ab"]
