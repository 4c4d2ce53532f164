"""The runs under the output folders, as the panel lists them. A run is named by its id; paths never leave here."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..runs.folder import RUNS_FOLDER, RunFolder
from ..runs.registry import RunInfo, describe, list_runs
from .exchange import Refused
from .places import bare_text

RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{4}(-\d{1,4})?")

_Signature = tuple[float, ...]


class RunList:
    """Looks up runs. What is known of a run that no process writes is kept until one of its files changes."""

    def __init__(self, roots: Callable[[], Iterable[Path]]) -> None:
        self._roots = roots
        self._known: dict[Path, tuple[_Signature, RunInfo]] = {}
        self._lock = threading.Lock()

    def all(self) -> list[RunInfo]:
        """Every run with a valid id, newest first."""
        found: dict[str, RunInfo] = {}
        for root in self._roots():
            for info in list_runs(root, self.describe):
                if RUN_ID.fullmatch(info.run_id):
                    found.setdefault(info.run_id, info)
        return sorted(found.values(), key=lambda run: run.run_id, reverse=True)

    def find(self, run_id: str) -> RunFolder:
        """The folder of a run. Refused with 404 for anything that is no id of a run here."""
        if RUN_ID.fullmatch(run_id):
            for root in self._roots():
                for pattern in (RUNS_FOLDER, f"*/{RUNS_FOLDER}"):
                    for parent in Path(root).glob(pattern):
                        if (parent / run_id / "config.json").is_file():
                            return RunFolder(parent / run_id)
        raise Refused(404, "no_such_run", f"There is no run {run_id[:60]!r} here. GET /runs lists the runs.")

    def describe(self, folder: RunFolder) -> RunInfo:
        """`registry.describe`, remembered for runs that are over."""
        signature = _signature(folder)
        with self._lock:
            known = self._known.get(folder.path)
        if known is not None and known[0] == signature:
            return known[1]
        info = describe(folder)
        with self._lock:
            if info.state == "running":
                self._known.pop(folder.path, None)
            else:
                self._known[folder.path] = (signature, info)
        return info


def _signature(folder: RunFolder) -> _Signature:
    # A writer that takes the lock writes its name into the lock file: that changes its time.
    wal = folder.database_path.with_name("run.db-wal")
    return tuple(_changed(path) for path in (folder.config_path, folder.database_path, wal, folder.lock_path))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def facts(info: RunInfo, followed: object | None = None, *, paused: bool = False) -> dict[str, Any]:
    """One line of the run list, safe for JSON. `followed`: the run as this program follows it, if it does."""
    stored = {} if info.problem else info.folder.read_config()
    graph, nodes = _shown_in(stored, followed)
    state = "running" if _is_starting(info, followed) else info.state
    return {
        "run_id": info.run_id,
        "name": str(stored.get("config", {}).get("run", {}).get("output_name", "")),
        "state": state,
        "live": followed is not None,
        "graph_id": graph,
        "node_ids": nodes,
        "paused": paused and state == "running",
        "step": info.step,
        "total_steps": info.total_steps,
        "started": info.started,
        "message": _unplaced(info.message, info),
        "problem": _unplaced(info.problem, info),
    }


def _shown_in(stored: dict[str, Any], followed: object | None) -> tuple[str | None, list[str]]:
    """The graph and the nodes in it that show a run: those that follow it now, else those it was begun from."""
    if followed is not None:
        return getattr(followed, "graph_id", None), [str(node) for node in getattr(followed, "node_ids", ())]
    kept = stored.get("shown_in")
    found: dict[str, Any] = kept if isinstance(kept, dict) else {}
    graph, nodes = found.get("graph_id"), found.get("node_ids")
    return graph if isinstance(graph, str) else None, [str(node) for node in nodes] if isinstance(nodes, list) else []


def _is_starting(info: RunInfo, followed: object | None) -> bool:
    """Whether this program follows the run and its worker has not begun to write, or is being started again."""
    if followed is None or info.state == "running":
        return False
    last = getattr(followed, "last_event", None)
    return not (isinstance(last, dict) and last.get("type") == "RunFinished")


def _unplaced(text: str, info: RunInfo) -> str:
    """`text` without places of this machine."""
    folder = info.folder
    return bare_text(text, (folder.path.parent, folder.path.resolve().parent, folder.output_dir))
