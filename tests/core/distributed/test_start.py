"""How processes find each other in a store that may hold what restarted ones left."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from torch import distributed

from trainer_core.distributed.processes import agree_on_prefix

PATIENCE = timedelta(seconds=20)


def meet(store: distributed.Store, late: dict[int, float]) -> list[str]:
    found: dict[int, str] = {}

    def start(rank: int) -> None:
        time.sleep(late.get(rank, 0.0))
        found[rank] = agree_on_prefix(store, rank, 3, PATIENCE)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(3)]


def test_every_start_has_a_prefix_of_its_own_also_where_others_left_their_keys() -> None:
    store = distributed.HashStore()
    starts = [meet(store, late) for late in ({}, {0: 0.2}, {1: 0.2, 2: 0.1})]
    assert all(len(set(prefixes)) == 1 for prefixes in starts), "all agree"
    assert len({prefixes[0] for prefixes in starts}) == 3
    store.set("hello/2", "somebody who died before an answer")
    (again,) = set(meet(store, {2: 0.2}))
    assert again not in {prefixes[0] for prefixes in starts}


def test_one_that_does_not_come_is_named() -> None:
    with pytest.raises(RuntimeError, match="process 1 did not start within 0 s"):
        agree_on_prefix(distributed.HashStore(), 0, 2, timedelta(seconds=0.05))
