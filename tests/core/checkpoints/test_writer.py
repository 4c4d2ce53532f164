"""Background writing: the step pays for a copy only, failures are told, retried, overtaken."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from trainer_core.checkpoints.snapshot import SnapshotPool
from trainer_core.checkpoints.state import RunState
from trainer_core.checkpoints.store import CheckpointStore
from trainer_core.checkpoints.writer import BackgroundWriter, WriteOutcome
from trainer_core.errors import NonFiniteError
from trainer_core.runs.platform import DurableIO

from .faulty_io import FailingWrites


def state(step: int) -> RunState:
    history = [{"step": step}]
    return RunState(
        {"a": torch.full((64,), float(step))}, {"a.m": torch.full((64,), float(step))}, {"history": history}
    )


def assert_whole(loaded: RunState, step: int) -> None:
    assert loaded.step == step
    assert bool((loaded.adapter["a"] == step).all())
    assert bool((loaded.optimizer["a.m"] == step).all())
    assert loaded.scalars == {"history": [{"step": step}]}


class Gate(DurableIO):
    """Writing waits until the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open_gate = threading.Event()
        self.entered = threading.Event()

    def make_folder(self, path: Path) -> None:
        self.entered.set()
        assert self.open_gate.wait(30)
        super().make_folder(path)


def test_training_goes_on_while_the_disk_works_and_does_not_reach_into_the_snapshot(tmp_path: Path) -> None:
    gate = Gate()
    writer = BackgroundWriter(CheckpointStore(tmp_path, io=gate))
    live = state(4)
    writer.submit(live, 4)
    assert gate.entered.wait(30)
    live.adapter["a"].fill_(99.0)
    live.optimizer["a.m"].fill_(99.0)
    live.scalars["history"].append("later")
    assert writer.poll() == []
    assert writer.busy
    gate.open_gate.set()
    (outcome,) = writer.close()
    assert (outcome.step, outcome.problem) == (4, "")
    assert outcome.saved is not None
    assert outcome.saved.verified
    assert_whole(CheckpointStore(tmp_path).load(), 4)


def test_a_slow_disk_is_overtaken_by_the_newest_and_says_so(tmp_path: Path) -> None:
    gate = Gate()
    writer = BackgroundWriter(CheckpointStore(tmp_path, io=gate))
    for step in (2, 4, 6, 8):
        writer.submit(state(step), step)
    gate.open_gate.set()
    outcomes = {outcome.step: outcome for outcome in writer.close()}
    assert [outcomes[step].saved is not None for step in (2, 4, 6, 8)] == [True, False, False, True]
    assert outcomes[4].overtaken
    assert "step 4 was overtaken before it was written" in outcomes[4].problem
    assert [saved.step for saved in CheckpointStore(tmp_path).list()] == [8, 2]
    for step in (2, 8):
        assert_whole(CheckpointStore(tmp_path).load(step), step)


def finish_running(writer: BackgroundWriter) -> list[WriteOutcome]:
    """Wait for the write in flight without starting another try."""
    deadline = time.monotonic() + 30
    while not (outcomes := writer.poll()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return outcomes


def test_a_failed_write_is_told_and_tried_again_when_due(tmp_path: Path) -> None:
    """C8: training continues, alert, the older ones kept, retry with prune."""
    now = [0.0]
    io = FailingWrites(1 << 20)
    writer = BackgroundWriter(CheckpointStore(tmp_path, io=io), keep_last=2, retry_after=30.0, clock=lambda: now[0])
    for step in (1, 2):
        writer.submit(state(step), step)
        finish_running(writer)
    io.room = 100
    writer.submit(state(3), 3)
    (failed,) = finish_running(writer)
    assert (failed.step, failed.saved, failed.given_up) == (3, None, False)
    assert "step 3 does not fit" in failed.problem
    assert [saved.step for saved in CheckpointStore(tmp_path).list()] == [2, 1]
    assert writer.busy
    io.room = 1 << 20
    now[0] = 29.0
    assert writer.poll() == []
    now[0] = 31.0
    (again,) = finish_running(writer)
    assert again.saved is not None
    assert not writer.busy
    assert_whole(CheckpointStore(tmp_path).load(), 3)
    writer.close()


def test_a_newer_snapshot_takes_the_place_of_a_failed_one(tmp_path: Path) -> None:
    io = FailingWrites(0)
    writer = BackgroundWriter(CheckpointStore(tmp_path, io=io), clock=lambda: 0.0)
    writer.submit(state(1), 1)
    assert not finish_running(writer)[0].given_up
    io.room = 1 << 20
    writer.submit(state(2), 2)
    outcomes = {outcome.step: outcome for outcome in writer.close()}
    assert outcomes[1].overtaken
    assert outcomes[2].saved is not None


def test_the_end_of_a_run_tries_once_more_and_then_says_it_gave_up(tmp_path: Path) -> None:
    writer = BackgroundWriter(CheckpointStore(tmp_path, io=FailingWrites(0)))
    writer.submit(state(1), 1)
    outcomes = writer.close()
    assert [outcome.given_up for outcome in outcomes] == [False, True]
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_adapter_is_refused_in_the_step(tmp_path: Path) -> None:
    writer = BackgroundWriter(CheckpointStore(tmp_path))
    bad = state(1)
    bad.adapter["a"][3] = float("nan")
    with pytest.raises(NonFiniteError, match="step 1 in a"):
        writer.submit(bad, 1)
    assert not writer.busy


def test_a_bug_in_the_writer_thread_is_not_swallowed(tmp_path: Path) -> None:
    class Bug(DurableIO):
        def free_bytes(self, path: Path) -> int:
            raise KeyError("a bug")

    writer = BackgroundWriter(CheckpointStore(tmp_path, io=Bug()))
    writer.submit(state(1), 1)
    with pytest.raises(KeyError):
        writer.wait()


def test_every_fifth_is_read_back_and_old_ones_are_pruned_but_the_protected(tmp_path: Path) -> None:
    writer = BackgroundWriter(CheckpointStore(tmp_path), keep_last=2, milestone_every=4, protect=lambda: (5,))
    verified = []
    for step in range(1, 10):
        writer.submit(state(step), step)
        (outcome,) = writer.wait()
        assert outcome.saved is not None
        verified.append(outcome.saved.verified)
    assert verified == [True, False, False, False, False, True, False, False, False]
    # 9 and 8 are the newest, 6 the newest verified, 5 protected, 4 and 8 milestones
    assert [saved.step for saved in CheckpointStore(tmp_path).list()] == [9, 8, 6, 5, 4]
    writer.close()


def test_snapshot_memory_is_used_again(tmp_path: Path) -> None:
    pool = SnapshotPool()
    first = pool.take(state(1), 1)
    places = [tensor.data_ptr() for tensor in first.adapter.values()]
    pool.give_back(first)
    second = pool.take(state(2), 2)
    assert [tensor.data_ptr() for tensor in second.adapter.values()] == places
    assert_whole(second, 2)
    third = pool.take(state(3), 3)
    assert third.adapter["a"].data_ptr() not in places
    changed = state(4)
    changed.adapter["a"] = torch.ones(3, dtype=torch.float64)
    pool.give_back(third)
    assert pool.take(changed, 4).adapter["a"].tolist() == [1.0, 1.0, 1.0]


def test_memory_made_ready_beside_the_training_is_the_first_snapshots(tmp_path: Path) -> None:
    live = RunState(
        {"a": torch.arange(6.0).reshape(2, 3).t(), "number": torch.tensor(3), "none": torch.zeros(0, 2)},
        {"half": torch.full((3,), 0.5, dtype=torch.bfloat16), "flag": torch.tensor([True, False])},
    )
    pool = SnapshotPool()
    writer = BackgroundWriter(CheckpointStore(tmp_path), pool=pool)
    writer.prepare(live)
    writer.submit(live, 1)
    live.adapter["a"].fill_(9.0)
    (outcome,) = writer.close()
    assert outcome.saved is not None
    loaded = CheckpointStore(tmp_path).load()
    assert loaded.adapter["a"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert {name: value.tolist() for name, value in loaded.optimizer.items()} == {
        "half": [0.5, 0.5, 0.5],
        "flag": [True, False],
    }
    assert (loaded.adapter["number"].item(), tuple(loaded.adapter["none"].shape)) == (3, (0, 2))
    places = [tensor.data_ptr() for tensor in pool.take(live, 2).optimizer.values()]
    pool.prepare(live)
    (room,) = pool._free
    pool.prepare(live)
    assert [tensor.data_ptr() for tensor in room.optimizer.values()] != places
    again = pool.take(live, 3)
    assert [tensor.data_ptr() for tensor in again.optimizer.values()] == [
        tensor.data_ptr() for tensor in room.optimizer.values()
    ]
    assert pool._free == []


def test_memory_that_cannot_be_had_is_told_by_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: SnapshotPool, like: RunState) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(SnapshotPool, "prepare", refuse)
    writer = BackgroundWriter(CheckpointStore(tmp_path))
    writer.prepare(state(1))
    with pytest.raises(MemoryError, match="no room"):
        writer.submit(state(1), 1)
    assert writer.close() == []


@pytest.mark.gpu
def test_a_snapshot_of_gpu_tensors_is_whole_and_pinned() -> None:
    live = RunState(
        {"a": torch.full((1 << 20,), 4.0, device="cuda")}, {"a.m": torch.full((1 << 20,), 4.0, device="cuda")}
    )
    snapshot = SnapshotPool().take(live, 4)
    live.adapter["a"].fill_(9.0)
    assert bool((snapshot.adapter["a"] == 4.0).all())
    assert snapshot.adapter["a"].is_pinned()
