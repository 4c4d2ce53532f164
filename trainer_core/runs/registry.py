"""Which runs lie under an output folder, and what became of them. The registry is a scan; nothing else is stored."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints.manifest import newest_good
from ..errors import TrainerError
from .folder import RUNS_FOLDER, RunFolder
from .record import open_readonly

STATES = ("running", "finished", "stopped", "failed", "interrupted")
UNHASHED = ("format_version", "pack_version", "config_hash", "run_id")
"""Keys that say who wrote a config, not what it asks for."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInfo:
    """One run. `state` is one of `STATES`; `interrupted` = no process writes it and it has no last event.

    `problem` says what could not be read; such a run is still listed.
    """

    folder: RunFolder
    state: str
    config_hash: str
    step: int = 0
    total_steps: int | None = None
    started: float | None = None
    message: str = ""
    problem: str = ""

    @property
    def run_id(self) -> str:
        return self.folder.run_id


def config_hash(config: Mapping[str, Any], ignore: Iterable[str] = UNHASHED) -> str:
    """Identity of what a config asks for: 32 hex digits over its JSON with sorted keys.

    `ignore`: top-level keys, or `section.field`, that do not count. Tuples and lists are the same.
    """
    plain: dict[str, Any] = json.loads(json.dumps(dict(config), allow_nan=False))
    for key in ignore:
        holder, _, field = key.rpartition(".")
        section: dict[str, Any] = plain.get(holder, {}) if holder else plain
        section.pop(field, None)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def list_runs(
    output_dir: str | Path, look: Callable[[RunFolder], RunInfo] | None = None, *, newest: int | None = None
) -> list[RunInfo]:
    """Runs of `output_dir` and of its direct subfolders, newest first; only the `newest` n when it is given.

    `look` replaces `describe` (one that remembers).
    """
    root = Path(output_dir)
    found = {
        path.resolve(): path for pattern in ("", "*/") for path in root.glob(f"{pattern}{RUNS_FOLDER}/*/config.json")
    }
    folders = sorted((RunFolder(path.parent) for path in found.values()), key=lambda run: run.run_id, reverse=True)
    return [(look or describe)(folder) for folder in folders[:newest]]


def newest_with_hash(output_dir: str | Path, wanted_hash: str) -> RunInfo | None:
    """The newest run of this config, whatever became of it."""
    return next((run for run in list_runs(output_dir) if run.config_hash == wanted_hash), None)


def can_go_on(run: RunInfo) -> bool:
    """Whether the run stopped or was interrupted and has a good checkpoint."""
    return run.state in ("interrupted", "stopped") and newest_good(run.folder.checkpoints) is not None


def describe(folder: RunFolder) -> RunInfo:
    """State of one run. Never raises for a damaged run: `problem` says what is wrong with it."""
    try:
        config = folder.read_config()
        stored_hash = str(config.get("config_hash") or config_hash(config))
        problem = ""
    except TrainerError as error:
        stored_hash, problem = "", str(error)
    summary: dict[str, Any] = {}
    if folder.database_path.exists():
        try:
            with open_readonly(folder.database_path) as record:
                summary = record.summary()
        except TrainerError as error:
            problem = problem or str(error)
    state = "running" if folder.is_locked() else str(summary.get("status") or "interrupted")
    return RunInfo(
        folder=folder,
        state=state if state in STATES else "interrupted",
        config_hash=stored_hash,
        step=int(summary.get("step") or 0),
        total_steps=summary.get("total_steps"),
        started=summary.get("started"),
        message=str(summary.get("message") or ""),
        problem=problem,
    )
