"""One run as the panel shows it, read from its record: what a late joiner or a reloaded page starts from.

Events with a `seq` above the snapshot's are applied on top by the panel: nothing is missed or counted twice.
"""

from __future__ import annotations

import time
from typing import Any

from ..errors import TrainerError
from ..runs.folder import RunFolder
from ..runs.record import RunRecord, open_readonly
from .places import bare_name, hide_places

VERSION = 1
MOST_EVENTS = 400
MOST_UPDATES = 2000
_UNTOLD = ("PhaseChanged", "PreviewReady")
"""Events that the snapshot tells in another place and the log does not repeat."""

_HEALTH_POINTS = 120
_FILE_FIELDS = ("file", "lora")

Row = dict[str, Any]


def snapshot(folder: RunFolder, run: Row, points: int) -> Row:
    """Everything the panel shows of a run. `run`: its `facts`; `points`: buckets of the curves.

    A run without a readable record (it has not begun, or the record is damaged) gives an empty snapshot with `problem`.
    """
    base: Row = {"v": VERSION, "now": time.time(), "run": run, "seq": 0}
    try:
        with open_readonly(folder.database_path) as record:
            seq = record.last_seq()  # read first: what is written meanwhile comes a second time, and is dropped by seq
            return hide_folder({**base, "seq": seq, **_recorded(record, run, points)}, folder)
    except TrainerError as error:
        # A run that was created a moment ago has no record yet.
        problem = str(error) if folder.database_path.exists() else ""
        return {**base, "run": {**run, "problem": run["problem"] or problem}, **_EMPTY}


_EMPTY: Row = {
    "phase": None, "last": None, "curves": None, "validation": [], "previews": [], "checkpoints": [], "events": [],
    "health": {"step": None, "rows": [], "norms": {}}, "memory": None,
}  # fmt: skip


def _recorded(record: RunRecord, run: Row, points: int) -> Row:
    summary = record.summary()
    if summary["lora"]:
        summary["lora"] = bare_name(summary["lora"])
    last = record.last_step()
    memory = record.events("MemoryState")
    # The state knows of the lock (running, interrupted); the summary only of the last word.
    keep = ("step", "total_steps", "started", "message")
    return {
        "run": {**summary, **run, **{key: summary[key] for key in keep if summary[key]}},
        "phase": _phase(record, last),
        "last": last["data"] if last else None,
        "curves": record.curves(points),
        "validation": [_only(row, "step", "mean", "bands", "pictures", "seconds") for row in record.validation()],
        "previews": [preview_facts(row) for row in record.previews()],
        "checkpoints": [_only(row, "step", "name", "bytes", "state", "time") for row in record.checkpoints()],
        "events": [without_paths(event) for event in record.last_events(MOST_EVENTS, *_UNTOLD)],
        "health": health(record),
        "memory": memory[-1]["data"] if memory else None,
    }


def _phase(record: RunRecord, last_step: Row | None) -> Row | None:
    """What the run is at: its last word of it, or training when a step was finished since."""
    said = record.events("PhaseChanged", "RunFinished")
    if not said or said[-1]["type"] == "RunFinished":
        return None  # a run that goes on has not said its phase yet
    if last_step is not None and last_step["seq"] > said[-1]["seq"]:
        return {"phase": "training", "done": 0, "total": 0, "detail": ""}
    return said[-1]["data"]


def updates(folder: RunFolder, run: Row, *, after_seq: int, after_step: int) -> Row:
    """What came after `after_seq`, for panels without a socket: events in wire form, and newer health figures.

    `more` says that the answer was cut and a snapshot is the shorter way.
    """
    try:
        with open_readonly(folder.database_path) as record:
            wires = record.wires(after_seq=after_seq, limit=MOST_UPDATES)
            events = [{"v": 1, "run_id": folder.run_id, **without_paths(wire)} for wire in wires]
            fresh = health(record, after=after_step)
    except TrainerError:
        if folder.database_path.exists() and run["state"] != "running":
            raise
        # Created a moment ago: its worker has not made the record, or not all of it, yet.
        return {"run": run, "events": [], "health": _EMPTY["health"], "more": False}
    answer = {"run": run, "events": events, "health": fresh, "more": len(events) >= MOST_UPDATES}
    return hide_folder(answer, folder)


def health(record: RunRecord, after: int = -1) -> Row:
    """The newest gradient-health figures of each module group, and the norm of each over the steps.

    `{step, rows: [{module, step, data}], norms: {module: [[step, norm], ...]}}`
    """
    rows = record.health(after=after)
    latest = {row["module"]: row for row in rows}
    norms: dict[str, list[list[float]]] = {}
    for row in rows:
        norm = row["data"].get("norm", row["data"].get("grad_norm"))
        if isinstance(norm, int | float):
            norms.setdefault(row["module"], []).append([row["step"], norm])
    thinned = {module: _thin(points) for module, points in norms.items()}
    last = max((row["step"] for row in rows), default=None)
    return {"step": last, "rows": [latest[module] for module in sorted(latest)], "norms": thinned}


def _thin(points: list[list[float]]) -> list[list[float]]:
    """Every n-th point so that at most `_HEALTH_POINTS` remain, the newest among them."""
    every = -(-len(points) // _HEALTH_POINTS)
    return points[::-1][::every][::-1]


def preview_facts(row: Row) -> Row:
    """A preview picture: its id in place of its file."""
    return {"id": f"{row['step']}-{row['index']}", **_only(row, "step", "index", "prompt", "seed", "time")}


def without_paths(event: Row) -> Row:
    """`event` with the files of its data as bare names."""
    data = event["data"]
    changed = {key: bare_name(data[key]) for key in _FILE_FIELDS if isinstance(data.get(key), str)}
    return {**event, "data": {**data, **changed}} if changed else event


def hide_folder(value: Any, folder: RunFolder) -> Any:
    """`value` without places of this machine: messages quote the paths of files."""
    return hide_places(value, (folder.path, folder.path.resolve(), folder.output_dir))


def _only(row: Row, *names: str) -> Row:
    return {name: row[name] for name in names}
