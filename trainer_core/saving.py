"""When a run writes checkpoints, and what it says about them. The writing itself is `checkpoints.writer`'s.

A checkpoint in the middle of a run costs the training a copy of the state; its file is another thread's business and
is told (`CheckpointSaved`, or `Warned` and a later try) once it lies on the disk. The last one of a run is written
before anything else happens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .checkpoints.manifest import STATE
from .checkpoints.snapshot import SnapshotPool
from .checkpoints.writer import BackgroundWriter, WriteOutcome
from .config import CheckpointConfig
from .errors import CheckpointError, ResourceError
from .events import CheckpointSaved, EventBus, PhaseChanged, Warned
from .health.goodness import is_good, says_good

if TYPE_CHECKING:
    from .checkpoints.store import CheckpointStore, RunState

log = logging.getLogger(__name__)

RETRY_S = 30.0


class RunCheckpoints:
    """The checkpoints of one run.

    Args:
        capture: the whole run state after the last decided step; tensors may be the live ones.
        best_step: step of the lowest validation loss so far; its checkpoint is never pruned.
        clock: seconds, for the cadence by minutes.
    """

    def __init__(
        self,
        store: CheckpointStore,
        capture: Callable[[], RunState],
        config: CheckpointConfig,
        bus: EventBus,
        *,
        best_step: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._capture = capture
        self._config = config
        self._bus = bus
        self._best_step = best_step
        self._clock = clock
        self._last_time = clock()
        self._last_step = -1
        self._names: dict[int, str] = {}
        """Names by step of the two newest written ones."""
        self._writer: BackgroundWriter | None = None
        self._pool = SnapshotPool()
        self._prepared = False
        self._good: dict[int, bool] = {}
        self.good_name: str | None = None
        """Name of the newest written checkpoint that is good to go back to; it is never pruned."""

    def went_on_from(self, name: str, step: int) -> None:
        """The run was taken up from checkpoint `name` of `step`; that step needs no second one."""
        self._last_step = step
        self._names = {step: name}
        good = (saved for saved in self.store.list() if not saved.problem and is_good(saved.path / STATE))
        self.good_name = next((saved.name for saved in good), None)

    def rolled_back(self) -> None:
        """The run went back: its state is no longer that of any step written so far."""
        self._last_step = -1
        self._names = {}
        self._last_time = self._clock()

    def due(self, step: int) -> bool:
        """Whether `step` is to be saved, by steps or by minutes since the last one."""
        every, minutes = self._config.every_steps, self._config.every_minutes
        by_steps = every > 0 and step % every == 0
        return by_steps or (minutes > 0 and self._clock() - self._last_time >= minutes * 60)

    def prepare(self) -> None:
        """Have the memory of the first save taken beside the training. To be called after every step that left a whole
        optimizer state; only the first call does something."""
        if self._prepared or not (self._config.every_steps > 0 or self._config.every_minutes > 0):
            return
        self._prepared = True
        if self._writer is None:
            self._writer = self._new_writer()
            self._writer.prepare(self._capture())

    def submit(self, step: int, *, verify: bool | None = None) -> None:
        """Copy the state of `step` and have it written in the background. Outcomes are told by `poll`.

        Raises NonFiniteError when the adapter is damaged.
        """
        if step == self._last_step:
            return
        self._bus.emit(PhaseChanged(step=step, phase="saving", detail="checkpoint"))
        if self._writer is None:
            self._writer = self._new_writer()
        self._prepared = True
        self._writer.submit(self._captured(step), step, verify=verify)
        self._last_step, self._last_time = step, self._clock()
        self.poll()

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written beside the training."""
        return self._writer is not None and self._writer.busy

    def poll(self) -> None:
        """Tell what became of the checkpoints in the background, and start what is due. To be called every step."""
        if self._writer is not None:
            self._tell(self._writer.poll())

    def save_now(self, step: int) -> str | None:
        """Finish what is being written, then write `step` while the caller waits. Returns its name.

        A failed write is told and leaves the older ones; the name is then None. Raises NonFiniteError when the adapter
        is damaged.
        """
        self.close()
        if step in self._names:
            return self._names[step]
        self._bus.emit(PhaseChanged(step=step, phase="saving", detail="checkpoint"))
        started = time.monotonic()
        try:
            saved = self.store.save(self._captured(step), step)
        except (OSError, ResourceError, CheckpointError) as error:  # CheckpointError: it read back wrong
            self._warn(step, f"The checkpoint of step {step} could not be written: {error}")
            return None
        finally:
            self._last_time = self._clock()
        self._last_step = step
        self._saved(step, saved.name, saved.bytes, time.monotonic() - started)
        self.store.prune(self._config.keep_last, self._protected(), milestone_every=self._config.milestone_every)
        return saved.name

    def close(self) -> None:
        """Wait for the background and tell the outcome. Nothing is written after this until the next `submit`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            self._tell(writer.close())

    def _new_writer(self) -> BackgroundWriter:
        return BackgroundWriter(
            self.store,
            keep_last=self._config.keep_last,
            milestone_every=self._config.milestone_every,
            retry_after=RETRY_S,
            protect=self._protected,
            pool=self._pool,
        )

    def _captured(self, step: int) -> RunState:
        state = self._capture()
        self._good[step] = says_good(state.scalars)
        return state

    def _protected(self) -> tuple[int | str, ...]:
        best = self._best_step()
        names: tuple[int | str, ...] = () if self.good_name is None else (self.good_name,)
        return names if best is None else (best, *names)

    def _tell(self, outcomes: list[WriteOutcome]) -> None:
        for outcome in outcomes:
            if outcome.saved is not None:
                self._saved(outcome.step, outcome.saved.name, outcome.saved.bytes, outcome.seconds)
                continue
            if outcome.overtaken:
                text = outcome.problem
            elif outcome.given_up:
                text = f"The checkpoint of step {outcome.step} could not be written: {outcome.problem}"
            else:
                text = (
                    f"The checkpoint of step {outcome.step} could not be written: {outcome.problem} The training goes "
                    f"on; it is tried again in {RETRY_S:.0f} s."
                )
            self._warn(outcome.step, text)

    def _saved(self, step: int, name: str, size: int, seconds: float) -> None:
        if self._good.pop(step, False):
            self.good_name = name
        newest = max(self._names, default=step)
        self._names = {at: known for at, known in self._names.items() if at == newest} | {step: name}
        self._bus.emit(CheckpointSaved(step=step, name=name, bytes=size, seconds=seconds))

    def _warn(self, step: int, message: str) -> None:
        log.warning("%s", message)
        self._bus.emit(Warned(step=step, topic="checkpoint", message=message))
