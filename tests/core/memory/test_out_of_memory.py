"""An allocation may fail at any operation of a step: the result is the undisturbed run's."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from trainer_core.errors import ResourceError
from trainer_core.memory.ladder import MemoryLadder
from trainer_core.memory.shortage import is_out_of_memory

from .failing import MESSAGE, FailAt
from .small_step import SmallStep

STEPS = 2


@pytest.fixture(autouse=True)
def quick_collection() -> Iterator[None]:
    """Thousands of failures each collect garbage: objects of the imports are left out of it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def run(steps: SmallStep, fails: Callable[[int], bool] = lambda number: False, count: int = STEPS) -> int:
    """Train; returns the number of operations."""
    with FailAt(fails) as mode:
        for number in range(count):
            steps.step(number)
    return mode.operations


def assert_equal_traces(found: SmallStep, wanted: SmallStep) -> None:
    for left, right in zip(found.result(), wanted.result(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("scaled", "optimizer", "stride"), [(False, "adamw", 1), (True, "adamw", 9), (False, "lion", 11)]
)
def test_an_allocation_failure_at_every_operation(scaled: bool, optimizer: str, stride: int) -> None:
    """Exhaustive: forward, backward, measuring, clipping, optimizer, average; a failure at each operation in turn."""
    undisturbed = SmallStep(scaled=scaled, optimizer=optimizer)
    operations = run(undisturbed)
    assert operations > 100
    for at in range(0, operations, stride):
        disturbed = SmallStep(scaled=scaled, optimizer=optimizer)
        run(disturbed, lambda number, at=at: number == at)
        assert_equal_traces(disturbed, undisturbed)
        assert len(disturbed.told) == 1, "it is said, once"
        assert MESSAGE in disturbed.told[0], "with the allocator's word"


def test_failures_one_after_the_other_go_down_the_ladder() -> None:
    """3 samples -> 2 -> 1 -> (no recompute here) host memory: same trace; each rung is said once."""
    undisturbed = SmallStep()
    run(undisturbed)
    disturbed = SmallStep()
    failures = [5, 30, 60]
    run(disturbed, lambda number: number in failures)
    assert_equal_traces(disturbed, undisturbed)
    assert len(disturbed.told) == 3
    assert "cut to 2" in disturbed.told[0]
    largest = [max(len(refs) for refs in disturbed.seen[start:]) for start in (0, 3, len(disturbed.seen) - 4)]
    assert largest == sorted(largest, reverse=True)
    assert largest[-1] < 3, "a size that failed does not come back"


def test_nothing_left_to_try_ends_with_advice_and_a_clean_state() -> None:
    disturbed = SmallStep()
    run(disturbed, count=1)
    before = [value.clone() for value in disturbed.result()]
    with pytest.raises(ResourceError, match=r"Out of memory with 1 picture of 64 x 64.*were not enough.*and resume"):
        run(disturbed, lambda number: True)
    for left, right in zip(disturbed.result(), before, strict=True):
        assert torch.equal(left, right)
    assert disturbed.down.grad is None


def test_an_update_that_never_fits_leaves_the_state_before_it() -> None:
    undisturbed = SmallStep()
    run(undisturbed, count=1)
    kept = [value.clone() for value in undisturbed.result()]
    original = undisturbed.optimizer.step

    def step(*args: Any) -> Any:
        undisturbed.down.data.add_(1.0)  # half an update
        raise torch.OutOfMemoryError(MESSAGE)

    undisturbed.optimizer.step = step  # type: ignore[method-assign]
    with pytest.raises(ResourceError, match="ran out of memory 3 times"):
        undisturbed.step(1)
    undisturbed.optimizer.step = original  # type: ignore[method-assign]
    for left, right in zip(undisturbed.result()[:-1], kept[:-1], strict=True):
        assert torch.equal(left, right)


def test_with_room_to_spare_no_copy_is_made_and_a_failure_is_not_hidden() -> None:
    roomy = SmallStep(room=1 << 40)

    def step(*args: Any) -> Any:
        raise torch.OutOfMemoryError(MESSAGE)

    roomy.optimizer.step = step  # type: ignore[method-assign]
    with pytest.raises(ResourceError, match="may be half made, so it is not kept"):
        roomy.step(0)


def test_other_errors_pass_through() -> None:
    steps = SmallStep()
    with pytest.raises(RuntimeError, match="a bug"), FailAt(_bug):
        steps.step(0)
    assert steps.told == []


def _bug(number: int) -> bool:
    if number == 7:
        raise RuntimeError("a bug")
    return False


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if ..."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_pieces_are_even_in_order_and_complete() -> None:
    ladder = MemoryLadder(micro_batch=3)
    assert [list(piece) for piece in ladder.pieces(range(8), (64, 64))] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    ladder.limits[64, 64] = 1
    assert [list(piece) for piece in ladder.pieces(range(3), (64, 64))] == [[0], [1], [2]]
    assert [list(piece) for piece in ladder.pieces(range(3), (32, 32))] == [[0, 1, 2]]
    assert MemoryLadder().pieces([], (64, 64)) == [[]]


def test_what_was_learnt_is_resumed() -> None:
    ladder = MemoryLadder()
    ladder.climb(4, (64, 96), "no")
    ladder.climb(1, (64, 64), "no")
    other = MemoryLadder()
    other.load_state_dict(ladder.state_dict())
    assert other.limits == {(64, 96): 2}
    assert other.offloading
