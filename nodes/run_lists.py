"""Runs and checkpoints as entries of drop-down lists, and back."""

from __future__ import annotations

from dataclasses import dataclass

from .. import trainer_core as core
from . import host

LATEST = "latest good checkpoint"
SHOWN = 30
"""Runs that lists show; older ones are found by their id all the same."""

_SEPARATOR = " · "


@dataclass(frozen=True)
class Entry:
    """One checkpoint of one run, and its line in a list."""

    run: core.RunInfo
    checkpoint: str
    step: int
    problem: str
    line: str
    created: float = 0.0
    """Unix time"""


def checkpoint_entries(newest: int | None = SHOWN) -> list[Entry]:
    """Every checkpoint of the newest runs, newest run first, newest checkpoint first."""
    return [entry for run in core.list_runs(host.output_folder(), newest=newest) for entry in entries_of(run)]


def entries_of(run: core.RunInfo) -> list[Entry]:
    found: list[Entry] = []
    name = _name(run)
    for saved in core.scan_checkpoints(run.folder.checkpoints):
        state = "damaged" if saved.problem else ("verified" if saved.verified else "complete")
        line = _SEPARATOR.join((run.run_id, saved.name, state, run.state, name))
        found.append(Entry(run, saved.name, saved.step, saved.problem or "", line, saved.created))
    return found


def find_entry(line: str) -> Entry:
    """The checkpoint a list entry names; its state words may have changed since. CheckpointError with what to do."""
    if line == LATEST:
        for entry in _latest():
            if not core.content_problem(entry.run.folder.checkpoints / entry.checkpoint):
                return entry
        raise core.CheckpointError("There is no run with a good checkpoint yet. Train first.")
    run_id, _, rest = line.partition(_SEPARATOR)
    name = rest.split(_SEPARATOR)[0]
    for entry in checkpoint_entries(None):
        if (entry.run.run_id, entry.checkpoint) == (run_id, name):
            return entry
    raise core.CheckpointError(f"The checkpoint {name!r} of run {run_id!r} is gone. Press R to read the list again.")


def latest_good() -> Entry | None:
    """The checkpoint that was written last, of whatever run. Damage that only reading its files shows is left to
    `find_entry`."""
    return next(iter(_latest()), None)


def _latest() -> list[Entry]:
    """Checkpoints that look good, the one written last first."""
    good = [entry for entry in checkpoint_entries() if not entry.problem]
    return sorted(good, key=lambda entry: entry.created, reverse=True)


def run_lines() -> list[str]:
    """Runs as list entries, newest first."""
    runs = core.list_runs(host.output_folder(), newest=SHOWN)
    return [_SEPARATOR.join((run.run_id, run.state, f"step {run.step}", _name(run))) for run in runs]


def _name(run: core.RunInfo) -> str:
    """The name its LoRA was to have: what a person knows a run by."""
    try:
        config = run.folder.read_config()["config"]
    except core.ConfigError:
        return "?"  # the settings cannot be read: choosing it says why
    return str(config.get("run", {}).get("output_name") or "?")


def find_run(line: str) -> core.RunInfo:
    """The run a list entry names. CheckpointError when it is gone."""
    run_id = line.partition(_SEPARATOR)[0]
    for run in core.list_runs(host.output_folder()):
        if run.run_id == run_id:
            return run
    raise core.CheckpointError(f"The run {run_id!r} is gone. Press R to read the list again.")


def run_stamp(line: str) -> str:
    """Something that changes when the run of a list entry has gone on, or is gone."""
    try:
        run = find_run(line)
        with core.open_readonly(run.folder.database_path) as record:
            return f"{run.run_id} {run.state} {record.last_seq()}"
    except core.TrainerError as error:  # executing says it
        return str(error)
