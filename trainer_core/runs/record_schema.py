"""The tables of a run's record, and whether a record is whole and still there."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from .platform import is_network_path

SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE steps (
    attempt INTEGER NOT NULL, step INTEGER NOT NULL, seq INTEGER NOT NULL, applied INTEGER NOT NULL,
    epoch INTEGER, loss REAL, loss_avg REAL, grad_norm REAL, lr TEXT, loss_scale REAL,
    rejected INTEGER NOT NULL, rejected_steps INTEGER, reason TEXT, seconds REAL, samples_per_second REAL,
    vram_gib REAL, eta_seconds REAL, clipped INTEGER, time REAL NOT NULL, PRIMARY KEY (attempt, step)) WITHOUT ROWID;
CREATE TABLE events (seq INTEGER PRIMARY KEY, time REAL NOT NULL, step INTEGER NOT NULL, type TEXT NOT NULL,
    json TEXT NOT NULL);
CREATE TABLE health (attempt INTEGER NOT NULL, step INTEGER NOT NULL, module TEXT NOT NULL, json TEXT NOT NULL,
    PRIMARY KEY (attempt, step, module)) WITHOUT ROWID;
CREATE TABLE validation (attempt INTEGER NOT NULL, step INTEGER NOT NULL, mean REAL, bands TEXT NOT NULL,
    pictures INTEGER, seconds REAL, time REAL NOT NULL, PRIMARY KEY (attempt, step)) WITHOUT ROWID;
CREATE TABLE previews (step INTEGER NOT NULL, file TEXT NOT NULL, prompt TEXT, idx INTEGER, seed INTEGER,
    time REAL NOT NULL, PRIMARY KEY (step, file)) WITHOUT ROWID;
CREATE TABLE checkpoints (step INTEGER NOT NULL, name TEXT PRIMARY KEY, bytes INTEGER, state TEXT NOT NULL,
    seconds REAL, time REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX events_by_type ON events (type, step);
"""

STEP_TABLES = ("steps", "health", "validation", "previews", "checkpoints")
"""Tables whose rows belong to a step."""


def lacks_tables(connection: sqlite3.Connection) -> bool:
    """Whether a record of our format lacks some of its tables: a sound database, and no record of a run."""
    if connection.execute("PRAGMA user_version").fetchone()[0] != SCHEMA_VERSION:
        return False  # empty, or of another format, which is told by others
    found = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return not {"meta", "events", *STEP_TABLES} <= found


_LOOK_EVERY_S = 2.0


class OpenedRecord:
    """Whether the record that was opened still lies under its name. SQLite does not notice that it was deleted: what is
    written then goes into a file without a name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity = None if is_network_path(path) else _identity(path)  # not every network drive keeps it
        self._looked = time.monotonic()

    def problem(self, *, at_once: bool) -> str:
        """What has become of it, in words; empty while it is there. Looks now and then, or `at_once`."""
        now = time.monotonic()
        if not at_once and now - self._looked < _LOOK_EVERY_S:
            return ""
        self._looked = now
        found = _identity(self._path)
        if found is not None and self._identity in (None, found):
            return ""
        folder = self._path.parent
        what = f"run record {self._path}" if (folder / "config.json").exists() else f"run folder {folder}"
        return (
            f"The {what} was deleted, moved or replaced while the run was going on: the record is not there any more, "
            "so this run cannot be shown, and there is no report."
        )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
