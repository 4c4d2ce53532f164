"""Whether a run's record is whole, beyond what SQLite itself looks at."""

from __future__ import annotations

import sqlite3

SCHEMA_VERSION = 1

STEP_TABLES = ("steps", "health", "validation", "previews", "checkpoints")
"""Tables whose rows belong to a step."""


def lacks_tables(connection: sqlite3.Connection) -> bool:
    """Whether a record of our format lacks some of its tables: a sound database, and no record of a run."""
    if connection.execute("PRAGMA user_version").fetchone()[0] != SCHEMA_VERSION:
        return False  # empty, or of another format, which is told by others
    found = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return not {"meta", "events", *STEP_TABLES} <= found
