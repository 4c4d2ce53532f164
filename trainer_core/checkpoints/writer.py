"""Checkpoints written beside the training: the snapshot is taken in the step, the disk is another thread's business.

All outcomes are handed out by `poll`, in the training thread, which tells them to the bus.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ..errors import CheckpointError, ResourceError
from .manifest import SavedCheckpoint
from .snapshot import SnapshotPool
from .state import RunState, refuse_non_finite
from .store import CheckpointStore


@dataclass(frozen=True)
class WriteOutcome:
    """What became of a submitted checkpoint.

    `saved` is None when it was not written; `problem` then says why, and `given_up` whether that was the last try.
    A checkpoint that a newer one overtook before its writing began is given up with `overtaken`.
    """

    step: int
    seconds: float = 0.0
    saved: SavedCheckpoint | None = None
    problem: str = ""
    given_up: bool = False
    overtaken: bool = False


@dataclass
class _Job:
    snapshot: RunState
    step: int
    protect: tuple[str | int, ...]
    verify: bool
    submitted: float
    tries: int = 0
    not_before: float = 0.0


class BackgroundWriter:
    """Writes snapshots one after the other in one thread; at most one more waits.

    A failed write leaves the older checkpoints and the training going; it is tried again after `retry_after` seconds,
    with one checkpoint less kept each time (down to one), until it succeeds or a newer snapshot takes its place.

    Args:
        verify_every: every this many saves the checkpoint is read back and marked verified (first one included).
        protect: names or steps that pruning must leave, asked for at every prune (best, milestones).
        pool: memory of snapshots, to be used again by the next writer.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        keep_last: int = 3,
        milestone_every: int = 0,
        verify_every: int = 5,
        retry_after: float = 30.0,
        protect: Callable[[], Collection[str | int]] = tuple,
        clock: Callable[[], float] = time.monotonic,
        pool: SnapshotPool | None = None,
    ) -> None:
        self._store = store
        self._keep_last = keep_last
        self._milestone_every = milestone_every
        self._verify_every = verify_every
        self._retry_after = retry_after
        self._protect = protect
        self._clock = clock
        self._pool = pool or SnapshotPool()
        self._preparing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint writer")
        self._running: tuple[_Job, Future[SavedCheckpoint]] | None = None
        self._waiting: _Job | None = None
        self._outcomes: list[WriteOutcome] = []
        self._submitted = 0

    @property
    def busy(self) -> bool:
        """Whether something is being written or waits for it."""
        return self._running is not None or self._waiting is not None

    def prepare(self, like: RunState) -> None:
        """Take the memory of the first snapshot in the writer's thread, so that no step has to wait for fresh pages."""
        self._preparing = self._thread.submit(self._pool.prepare, like)

    def submit(self, state: RunState, step: int, *, verify: bool | None = None) -> None:
        """Take a snapshot and have it written. Returns after the copy; raises NonFiniteError for a damaged adapter."""
        refuse_non_finite(state.adapter, step)
        if self._preparing is not None:
            self._preparing.result()  # memory that cannot be had is told here, as it would be without `prepare`
            self._preparing = None
        if verify is None:
            verify = self._submitted % self._verify_every == 0
        self._submitted += 1
        job = _Job(self._pool.take(state, step), step, tuple(self._protect()), verify, self._clock())
        self._advance()
        if self._waiting is not None:
            self._drop(self._waiting)
        self._waiting = job
        self._advance()

    def poll(self) -> list[WriteOutcome]:
        """Outcomes since the last call; also starts what is due. Errors that are no disk's fault are raised here."""
        self._advance()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> list[WriteOutcome]:
        """Finish everything submitted, each failed one tried once more at once, and return the outcomes."""
        while self.busy:
            if self._running is None and self._waiting is not None:
                self._waiting.not_before = 0.0
                self._start(self._waiting)
            if self._running is not None:
                job, future = self._running
                future.exception()  # waits; `_collect` looks at it
                self._collect(last_try=job.tries >= 2)
        return self.poll()

    def close(self) -> list[WriteOutcome]:
        """`wait`, then end the thread."""
        outcomes = self.wait()
        self._thread.shutdown()
        return outcomes

    def _advance(self) -> None:
        if self._running is not None and self._running[1].done():
            self._collect(last_try=False)
        if self._running is None and self._waiting is not None and self._clock() >= self._waiting.not_before:
            self._start(self._waiting)

    def _start(self, job: _Job) -> None:
        self._waiting = None
        job.tries += 1
        self._running = job, self._thread.submit(self._write, job)

    def _write(self, job: _Job) -> SavedCheckpoint:
        """In the writer's thread."""
        if job.tries > 1:  # the disk may be full: make room before trying again
            fewer = max(1, self._keep_last - job.tries + 1)
            self._store.prune(fewer, job.protect, milestone_every=self._milestone_every)
        saved = self._store.save(job.snapshot, job.step, verify=job.verify)
        self._store.prune(self._keep_last, job.protect, milestone_every=self._milestone_every)
        return saved

    def _collect(self, *, last_try: bool) -> None:
        assert self._running is not None, "nothing runs"
        job, future = self._running
        self._running = None
        seconds = self._clock() - job.submitted
        try:
            saved = future.result()
        except (ResourceError, CheckpointError) as error:
            overtaken = self._waiting is not None
            given_up = last_try or overtaken
            self._outcomes.append(WriteOutcome(job.step, seconds, None, str(error), given_up, overtaken))
            if given_up:
                self._pool.give_back(job.snapshot)
            else:
                job.not_before = self._clock() + self._retry_after
                self._waiting = job
        else:
            self._pool.give_back(job.snapshot)
            self._outcomes.append(WriteOutcome(job.step, seconds, saved))

    def _drop(self, job: _Job) -> None:
        problem = f"The disk was slower than the saves: step {job.step} was overtaken before it was written."
        self._outcomes.append(WriteOutcome(job.step, self._clock() - job.submitted, None, problem, True, True))
        self._pool.give_back(job.snapshot)
