"""Composition root: from a config to a running trainer. The only reader of the whole config."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .assemble import Assembly, assemble
from .checkpoints.manifest import Damaged, SavedCheckpoint, newest_good, read_manifest, read_scalars
from .config import TrainConfig, trained_parts
from .config_io import from_dict
from .config_rules import problems
from .errors import ConfigError, HardwareError, Problem, ResourceError, TrainerError, WeightsDifferError
from .events import EventBus, PhaseChanged, RunFinished, Warned
from .health.engine import RING_NAME
from .prepare import change_run as change_run
from .prepare import create_run as create_run
from .runs.database import RunDatabase
from .runs.folder import RunFolder, free_name, release_name
from .runs.platform import fill_holes
from .runs.protocol import Commands

if TYPE_CHECKING:
    from .distributed.processes import Processes
    from .events import Subscriber

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. `status`: finished, stopped or failed."""

    status: str
    message: str
    run_dir: Path
    lora: Path | None
    checkpoint: str | None
    step: int
    applied: int
    rejected: int
    report: Path | None

    @property
    def exit_code(self) -> int:
        return 1 if self.status == "failed" else 0


def start_run(
    config: TrainConfig,
    notes: list[str] | None = None,
    *,
    commands: Commands | None = None,
    sink: Subscriber | None = None,
) -> TrainResult:
    """Create a run and train it in this process."""
    folder = create_run(config, notes)
    return run(folder.path, commands=commands, sink=sink)


def run(
    run_dir: str | Path,
    *,
    commands: Commands | None = None,
    sink: Subscriber | None = None,
    processes: Processes | None = None,
) -> TrainResult:
    """Train the run in `run_dir` to its end, from its newest good checkpoint when it has one. `processes`: the others
    that compute a share of its steps (this is process 0).

    A failure the user can act on is told as the last event and in the result; it is not raised.
    """
    import torch

    folder = RunFolder(Path(run_dir))
    stored = folder.read_run()
    bus = EventBus(run_id=folder.run_id)
    # A host such as ComfyUI calls under inference mode, whose tensors can never be trained.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        folder.lock(),
        RunDatabase(folder.database_path) as database,
    ):
        stored = _with_final_name(folder, stored)
        bus.seq = database.last_seq()
        bus.subscribe(database)
        if sink is not None:
            bus.subscribe(sink)
        control = commands or Commands()
        control.on_ack = bus.emit
        database.on_problem = partial(_record_trouble, bus)
        for note in stored.get("notes", []):
            bus.emit(Warned(topic="settings", message=note))
        if lost := _lost_record(folder, database):
            bus.emit(Warned(topic="record", message=lost))
        return _Runner(folder, stored, bus, control, database, processes).run()


def _check_stored(config: TrainConfig) -> None:
    """The rules hold for the stored config too, which may have been edited by hand."""
    found = problems(config)
    if config.run.seed is None:
        why = "a run without a seed cannot be trained twice alike; the one that was drawn is gone"
        found.append(Problem("run.seed", None, why, "Write the seed of the run's checkpoints, or any number."))
    if found:
        raise ConfigError(found)


def _lost_record(folder: RunFolder, database: RunDatabase) -> str:
    """What to say where the run has checkpoints and its record knows nothing of the steps before them."""
    newest = newest_good(folder.checkpoints)
    # A checkpoint that was copied into a new run brings no record along.
    if not database.is_new or newest is None or read_manifest(newest.path).run_id != folder.run_id:
        return ""
    aside = database.damaged_record
    how = "was gone or empty" if aside is None else f"was damaged and is set aside as {aside.name}"
    return f"The record of this run (run.db) {how}: the new one holds nothing from before {newest.name}."


def _record_trouble(bus: EventBus, message: str) -> None:
    bus.emit(Warned(topic="record", message=message))


def _with_final_name(folder: RunFolder, stored: dict[str, Any]) -> dict[str, Any]:
    """A run that has no checkpoint yet may have given its name back when it failed: it takes a free one again.

    So does a copy of a run: the file under the old name is the original's. It lies as it did, seen from the output
    folder; the place of the original may not even exist here.
    """
    here = folder.path.resolve()
    home = Path(stored.get("home", here))
    if newest_good(folder.checkpoints) is not None and home == here:
        return stored
    final = Path(stored["final_lora"])
    parent = final.parent
    if home != here and parent.is_relative_to(home.parent.parent):
        parent = here.parent.parent / parent.relative_to(home.parent.parent)
    config = from_dict(stored["config"])
    name = stored.get("lora_stem") or config.run.output_name
    free = free_name(parent, name, final.suffix, owner=folder.path, form=config.checkpoint.save_format)
    if free != final or home != here:
        stored = {**stored, "final_lora": str(free.resolve()), "home": str(here)}
        folder.write_config(stored)
    return stored


class _Runner:
    """One attempt at a run in this process: assemble, train, finish, report."""

    def __init__(
        self,
        folder: RunFolder,
        stored: dict[str, Any],
        bus: EventBus,
        commands: Commands,
        database: RunDatabase,
        processes: Processes | None,
    ) -> None:
        self.processes = processes
        self.folder = folder
        self.stored = stored
        self.config = from_dict(stored["config"])
        self.bus = bus
        self.commands = commands
        self.database = database
        self.started = time.monotonic()
        self.assembly: Assembly | None = None

    def run(self) -> TrainResult:
        try:
            status, message, checkpoint, lora = self._train()
        except TrainerError as error:
            log.error("%s", error)
            status, message, lora = "failed", str(error), None
            checkpoint = self._rescue(error)
        except Exception as error:
            # The worker's boundary: a bug must still leave a record that says so before its traceback goes up.
            log.exception("the run failed")
            self._end(
                "failed", f"{type(error).__name__}: {error} (this is a bug; the traceback is in run.log)", None, None
            )
            raise
        return self._end(status, message, checkpoint, lora)

    def _train(self) -> tuple[str, str, str | None, Path | None]:
        config = self.config
        _check_stored(config)
        self.assembly = assemble(
            self.folder,
            self.stored,
            config,
            bus=self.bus,
            commands=self.commands,
            database=self.database,
            processes=self.processes,
        )
        if self.assembly is None:
            return "stopped", self._not_begun(), None, None
        session, trainer = self.assembly.session, self.assembly.trainer
        _take_room(self.folder.path / RING_NAME)
        if note := trainer.parts.plan.accumulation_note(config.gradient.accumulation):
            self.bus.emit(Warned(step=trainer.state.step, topic="data", message=note))
        if config.run.drill:
            from .planted_fault import plant

            plant(trainer)
        began = trainer.state.step
        session.before_training(began)
        status = trainer.run()
        self.bus.emit(PhaseChanged(step=trainer.state.step, phase="finishing"))
        checkpoint, lora = session.finish(trainer.state.step, status)
        return status, self._sentence(status, began), checkpoint, lora

    def _rescue(self, error: TrainerError) -> str | None:
        """A checkpoint of a failed run, so that nothing is lost; the store refuses a damaged state. What a failing
        device or processes that went apart computed is not kept, nor an update that may be half made: an earlier
        checkpoint is named."""
        doubtful = isinstance(error, HardwareError | WeightsDifferError)
        if self.assembly is None or self.assembly.trainer.state.step == 0 or doubtful:
            return None
        memory = self.assembly.trainer.parts.memory
        if memory is not None and not memory.updates.whole:
            return None
        try:
            return self.assembly.session.checkpoints.save_now(self.assembly.trainer.state.step)
        except TrainerError as error:
            log.warning("no checkpoint of the failed state: %s", error)
            return None

    def _sentence(self, status: str, began: int) -> str:
        assert self.assembly is not None
        state, total = self.assembly.trainer.state, self.assembly.trainer.total_steps
        rejected = f", {state.rejected} rejected" if state.rejected else ""
        parts = ", ".join(trained_parts(self.config))
        if status == "finished" and began >= total:
            return f"Nothing was left to train: all {total} steps were done. Set more steps to train longer."
        if status == "finished":
            return f"Trained {parts} for {state.step} steps ({state.applied} applied{rejected})."
        return f"Stopped after step {state.step} of {total} ({state.applied} applied{rejected})."

    def _not_begun(self) -> str:
        kept = self._kept()
        if kept is None:
            return "Stopped before the first step; nothing was trained yet."
        return f"Stopped before the training went on; {kept.name} is as it was."

    def _kept(self) -> SavedCheckpoint | None:
        """The checkpoint that a resume would begin with, whoever wrote it; None without one."""
        return newest_good(self.folder.checkpoints)

    def _counters(self, kept: SavedCheckpoint | None) -> tuple[int, int, int]:
        """Steps, applied and rejected ones: of this attempt, or of the state that it did not get to load."""
        if self.assembly is not None:
            state = self.assembly.trainer.state
            return state.step, state.applied, state.rejected
        if kept is None:
            return 0, 0, 0
        try:
            counters = read_scalars(kept.path)["counters"]
            return kept.step, int(counters["applied"]), int(counters["rejected"])
        except Damaged as error:
            log.warning("the counters of %s cannot be read: %s", kept.name, error)
            return kept.step, 0, 0

    def _end(self, status: str, message: str, checkpoint: str | None, lora: Path | None) -> TrainResult:
        if self.assembly is not None:
            self.assembly.session.checkpoints.close()  # nothing may be written once the run is given back
            if self.assembly.trainer.health is not None:
                self.assembly.trainer.health.close()
        kept = self._kept()
        if checkpoint is None and kept is not None:
            checkpoint = kept.name
        if status == "finished" or kept is None:
            release_name(Path(self.stored["final_lora"]))  # the file stands, or the run left nothing to go on from
        self.database.flush()
        if self.database.lost:
            message = f"{message} {self.database.lost}"
        step, applied, rejected = self._counters(kept)
        shown = None if lora is None else str(lora)
        self.bus.emit(
            RunFinished(
                step=step,
                status=status,
                message=message,
                applied=applied,
                rejected=rejected,
                lora=shown,
                checkpoint=checkpoint,
                seconds=time.monotonic() - self.started,
            )
        )
        self.database.flush()
        return TrainResult(
            status=status,
            message=message,
            run_dir=self.folder.path,
            lora=lora,
            checkpoint=checkpoint,
            step=step,
            applied=applied,
            rejected=rejected,
            report=_write_report(self.folder),
        )


def _take_room(ring: Path) -> None:
    """The flight recorder is mapped memory: a page without a place on the disk would end the process (SIGBUS) when the
    disk is full later on."""
    try:
        if ring.exists():
            fill_holes(ring)
    except OSError as error:
        size = ring.stat().st_size / 2**20
        raise ResourceError(
            f"The flight recorder {ring} ({size:.1f} MiB) cannot be written: {error.strerror or error}. Free some "
            "space, or set health.ring_steps to fewer steps or 0."
        ) from error


def _write_report(folder: RunFolder) -> Path | None:
    """The report is made from the record; a problem in making it must not turn a good run into a failed one."""
    from .diagnostics.report import write_report

    try:
        return write_report(folder.path)
    except Exception:
        log.exception("the report could not be written")
        return None


def resume_run(
    run_dir: str | Path,
    changes: Callable[[TrainConfig], TrainConfig] | None = None,
    *,
    commands: Commands | None = None,
    sink: Subscriber | None = None,
) -> TrainResult:
    """Go on with a stopped or interrupted run, with changed settings where `changes` makes them (`change_run`)."""
    if changes is not None:
        change_run(run_dir, changes)
    return run(run_dir, commands=commands, sink=sink)
