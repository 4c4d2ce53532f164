"""The latency guard: steps that take much longer than usual are noticed, and their cause is told. Off by default.

A step is compared with the median of earlier steps of the same shape (buckets and sizes of its micro-batches). The
batch stays as it is: fewer pictures in a step would be another optimisation and cure nothing. Where the cause is memory
that is paged, the micro-batch may be cut (`memory.latency_split`): the same step, in more pieces.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Shape = tuple[tuple[tuple[int, int], int], ...]
"""Of a step: (width, height) in pixels and number of pictures of each micro-batch, in order."""

FACTOR = 3.0
STEPS = 20
"""A step is slow above FACTOR times the median of its kind; this many in a row are told."""

_LEARN = 5
_REMEMBERED = 101
_AGAIN_AFTER = 200
CAUSES = {
    "data": "loading the pictures' latents: a slow or busy disk",
    "checkpoint": "checkpoints being written meanwhile: a slow disk",
    "paging": "memory that is moved in and out: the device or the machine is too full",
    "throttle": "the GPU slows down its clock: heat or power",
    "compute": "the computation itself: another program uses the device or the processor",
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step and of its loading, and what was seen during it."""

    seconds: float
    data: float = 0.0
    writing: bool = False
    paged: bool = False
    throttled: bool = False


@dataclass(frozen=True)
class Slow:
    """`steps` slow steps in a row, `factor` times their kind's median; `shares`: causes with the share of the excess
    (data) or of the steps (others) they account for, the largest first."""

    steps: int
    factor: float
    median: float
    shares: tuple[tuple[str, float], ...]

    @property
    def cause(self) -> str:
        return self.shares[0][0]

    @property
    def text(self) -> str:
        rest = ", ".join(f"{name} {share:.0%}" for name, share in self.shares)
        return (
            f"The last {self.steps} steps took {self.factor:.1f} times as long as such steps did before "
            f"({self.median:.2f} s). Most of it is {CAUSES[self.cause]} ({rest})."
        )


class LatencyGuard:
    """Judges one step after the other."""

    def __init__(self, factor: float = FACTOR, steps: int = STEPS) -> None:
        self._factor, self._steps = factor, steps
        self._usual: dict[Shape, deque[StepTime]] = {}
        self._row: list[tuple[StepTime, float, float]] = []
        self._told_at: int | None = None

    def observe(self, step: int, shape: Shape, took: StepTime) -> Slow | None:
        """What there is to tell after this step; None mostly."""
        known = self._usual.setdefault(shape, deque(maxlen=_REMEMBERED))
        if len(known) < _LEARN:
            known.append(took)
            return None
        median = statistics.median(one.seconds for one in known)
        if took.seconds <= self._factor * median:
            known.append(took)
            self._row.clear()
            return None
        self._row.append((took, median, statistics.median(one.data for one in known)))
        quiet = self._told_at is None or step - self._told_at >= _AGAIN_AFTER
        if len(self._row) < self._steps or not quiet:
            return None
        self._told_at = step
        found = _judged(self._row[-self._steps :])
        self._row.clear()
        return found


def _judged(row: list[tuple[StepTime, float, float]]) -> Slow:
    excess = sum(took.seconds - median for took, median, _ in row)
    shares = {
        "data": max(0.0, sum(took.data - data for took, _, data in row) / excess),
        "checkpoint": sum(took.writing for took, _, _ in row) / len(row),
        "paging": sum(took.paged for took, _, _ in row) / len(row),
        "throttle": sum(took.throttled for took, _, _ in row) / len(row),
    }
    named = sorted(((name, share) for name, share in shares.items() if share >= 0.1), key=lambda pair: -pair[1])
    if not named or named[0][1] < 0.5:
        named.insert(0, ("compute", 1.0 - (named[0][1] if named else 0.0)))
    factors = [took.seconds / median for took, median, _ in row]
    return Slow(len(row), statistics.median(factors), statistics.median(median for _, median, _ in row), tuple(named))


class StepClock:
    """Takes the time of a run's steps from its loader's calls; the rest is asked of the machine.

    Args:
        area: bucket of samples, in pixels.
        paged, throttled: what the device says of the present moment; False where it says nothing.
    """

    def __init__(
        self, area: Callable[[Any], tuple[int, int]], paged: Callable[[], bool], throttled: Callable[[], bool]
    ) -> None:
        self.writing: Callable[[], bool] = lambda: False
        """Whether a checkpoint is being written now."""
        self._area, self._paged, self._throttled = area, paged, throttled
        self._begun: float | None = None
        self._data = 0.0
        self._shape: list[tuple[tuple[int, int], int]] = []
        self._wrote = False

    def timed(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """`load(epoch, refs, ...)`, whose calls are noted."""

        def timed_load(epoch: int, refs: Any, **others: Any) -> Any:
            begun = time.perf_counter()
            self._begun = self._begun or begun
            self._wrote = self._wrote or self.writing()
            self._shape.append((self._area(refs), len(refs)))
            try:
                return load(epoch, refs, **others)
            finally:
                self._data += time.perf_counter() - begun

        return timed_load

    def step(self) -> tuple[Shape, StepTime] | None:
        """The step that ends now, and begin anew; None when nothing was loaded."""
        begun, shape, data, wrote = self._begun, tuple(self._shape), self._data, self._wrote
        self._begun, self._shape, self._data, self._wrote = None, [], 0.0, False
        if begun is None:
            return None
        seconds = time.perf_counter() - begun
        return shape, StepTime(seconds, data, wrote or self.writing(), self._paged(), self._throttled())
