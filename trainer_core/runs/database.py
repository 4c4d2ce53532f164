"""`run.db`: the record of a run, written by one process while any number read it.

`RunDatabase` is an event-bus subscriber. In WAL mode every event is committed at once (about 30 microseconds, nothing
is lost by SIGKILL); where WAL does not hold (network file systems) the DELETE journal is used and commits are gathered
for half a second. A full disk or a broken disk never ends the run: events wait in memory and are written when the
database takes them again.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ResourceError
from .platform import is_network_path
from .record_schema import SCHEMA, SCHEMA_VERSION, STEP_TABLES, OpenedRecord, lacks_tables

_ATTEMPT_TABLES = ("steps", "health", "validation")
_UNRECORDED = frozenset({"StepFinished", "Heartbeat", "Ack"})
"""Not kept in `events`: steps have their own table, the others say nothing about the run afterwards."""

_BUGS = (sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.IntegrityError)
"""Errors that waiting does not mend: they are raised, the rest is a full or failing disk."""

_GATHER_S = 0.5
_RETRY_S = 2.0
_BACKLOG = 100_000

Wire = dict[str, Any]
Statement = tuple[str, tuple[Any, ...]]

log = logging.getLogger(__name__)


class RunDatabase:
    """The one writer of a run's record. `attempt` is stamped on rows and raised by a rollback.

    Raises ResourceError when the file cannot be opened or made, CheckpointError when it has a newer format.
    `on_problem` is told once, in words, when records cannot be written, and once when they can be again.
    """

    def __init__(
        self, path: str | Path, *, wal: bool | None = None, on_problem: Callable[[str], None] | None = None
    ) -> None:
        self.path = Path(path)
        self.attempt = 0
        self.on_problem = on_problem
        self._lock = threading.RLock()
        self._backlog: deque[Wire] = deque(maxlen=_BACKLOG)
        self._gathered: list[Wire] = []
        """Written and not committed yet; what fails next takes them back with it."""
        self._lost = 0
        self._failing_since: float | None = None
        self._last_try = 0.0
        self._phase = ""
        self._closed = threading.Event()
        self._dirty = False
        set_aside = _set_aside_damaged(self.path)
        try:
            self._connection = _connect(self.path)
            self.journal = _choose_journal(self._connection, self.path, wal)
            self.is_new = _ensure_schema(self._connection, self.path)
        except sqlite3.Error as error:
            raise ResourceError(
                f"The run record {self.path} cannot be opened: {error}. Check rights and free space of its folder."
            ) from error
        if set_aside:
            self._put_meta("damaged_record", set_aside.name)
            log.warning("the run record was damaged and is set aside as %s; a new one is started", set_aside.name)
        self.damaged_record, self._file = set_aside, OpenedRecord(self.path)
        self.lost = ""  # says so when the file was taken away while it is written
        self._thread: threading.Thread | None = None
        if self.journal != "wal":
            self._thread = threading.Thread(target=self._gather, name="run.db commits", daemon=True)
            self._thread.start()

    def __call__(self, wire: Wire) -> None:
        """Record one event (its wire form). Never raises for a full or failing disk."""
        with self._lock:
            if self._closed.is_set():
                return
            if self._failing_since is not None:
                self._keep(wire)
                if time.monotonic() - self._last_try >= _RETRY_S:
                    self._drain()
                return
            try:
                self._write([wire])
                if self._dirty:
                    self._gathered.append(wire)
            except _BUGS:
                self._connection.rollback()
                self._write(self._gathered)
                raise
            except sqlite3.Error as error:
                self._fail(wire, error)
            self._look()

    def resume_at(self, step: int, attempt: int | None = None, seq: int = 0) -> int:
        """Delete all rows after `step` in one transaction; returns how many. Event numbers go on rising.

        What happened before the restored checkpoint was taken (events up to `seq`, steps of attempts before `attempt`)
        stays, whatever step it was at: a rollback went from there to an earlier step. So do notices of restarts
        (`Warned`, topic `restart`): they happened whatever step was restored.
        """
        with self._lock:
            self.flush()
            self._put_meta("last_seq", str(self.last_seq()))
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                deleted = self._connection.execute(
                    "DELETE FROM events WHERE step > ? AND seq > ?"
                    " AND NOT (type = 'Warned' AND json_extract(json, '$.topic') = 'restart')",
                    (step, seq),
                ).rowcount
                for table in STEP_TABLES:
                    since = " AND attempt >= ?" if table in _ATTEMPT_TABLES else ""
                    values = (step, attempt or 0) if since else (step,)
                    deleted += self._connection.execute(f"DELETE FROM {table} WHERE step > ?{since}", values).rowcount
            if attempt is not None:
                self.attempt = attempt
            return deleted

    def last_seq(self) -> int:
        """Highest event number ever used in this record; 0 for a new one. The next process's bus starts from it."""
        with self._lock:
            row = self._connection.execute(
                "SELECT max((SELECT coalesce(max(seq), 0) FROM events), (SELECT coalesce(max(seq), 0) FROM steps),"
                " (SELECT coalesce(max(CAST(value AS INTEGER)), 0) FROM meta WHERE key = 'last_seq'))"
            ).fetchone()
            return int(row[0])

    def add_health(self, step: int, rows: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Record gradient-health figures: one (module name, values) pair a row. A failing disk drops them."""
        with self._lock:
            if self._failing_since is not None:
                return
            values = [(self.attempt, step, module, json.dumps(data)) for module, data in rows]
            try:
                self._connection.executemany("INSERT OR REPLACE INTO health VALUES (?, ?, ?, ?)", values)
                self._commit(now=False)
            except sqlite3.Error as error:
                self._fail(None, error)

    def flush(self) -> None:
        """Commit what is gathered, and try to write what waits in memory."""
        with self._lock:
            self._look(at_once=True)
            if self._failing_since is not None:
                self._drain()
                return
            try:
                self._commit(now=True)
            except sqlite3.Error as error:
                self._fail(None, error)

    def close(self) -> None:
        """Write what is left and close. Says so in the log when events could not be written."""
        with self._lock:
            if self._closed.is_set():
                return
            self.flush()
            self._closed.set()
            if self._backlog:
                log.error("%d events could not be written to %s", len(self._backlog), self.path)
            try:
                self._connection.close()
            except sqlite3.Error:
                log.exception("closing %s failed", self.path)

    def __enter__(self) -> RunDatabase:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, wires: Iterable[Wire]) -> None:
        settle = False
        for wire in wires:
            if wire["type"] in ("Resumed", "Intervention") and wire["data"].get("attempt") is not None:
                self.attempt = int(wire["data"]["attempt"])
            for statement, values in self._rows(wire):
                self._connection.execute(statement, values)
            settle = settle or wire["type"] not in _UNRECORDED
        self._commit(now=settle)

    def _rows(self, wire: Wire) -> list[Statement]:
        kind, data, step, when = str(wire["type"]), wire["data"], int(wire["step"]), float(wire["time"])
        rows: list[Statement] = []
        if kind in ("StepFinished", "StepRejected"):
            rows.append(_step_row(wire, self.attempt))
            self._phase = "training"  # a second preview or save after it is a phase of its own
            if data.get("clamp_rate") is not None:
                clamp = (self.attempt, step, "clamp", json.dumps({"rate": data["clamp_rate"]}))
                rows.append(("INSERT OR REPLACE INTO health VALUES (?, ?, ?, ?)", clamp))
        elif kind == "ValidationFinished":
            values = (
                self.attempt,
                step,
                data["validation_loss"],
                json.dumps(data["bands"]),
                data["pictures"],
                data["seconds"],
                when,
            )
            rows.append(("INSERT OR REPLACE INTO validation VALUES (?, ?, ?, ?, ?, ?, ?)", values))
        elif kind == "PreviewReady":
            preview = (step, data["file"], data["prompt"], data["index"], data["seed"], when)
            rows.append(("INSERT OR REPLACE INTO previews VALUES (?, ?, ?, ?, ?, ?)", preview))
        elif kind == "CheckpointSaved":
            saved = (step, data["name"], data["bytes"], "good", data["seconds"], when)
            rows.append(("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?)", saved))
        if kind in _UNRECORDED or (kind == "PhaseChanged" and not self._phase_matters(data)):
            return rows
        # A second process that did not go on from `last_seq` must not overwrite the first one's events.
        number = (
            "coalesce((SELECT ? WHERE NOT EXISTS (SELECT 1 FROM events WHERE seq = ?)),"
            " (SELECT max(seq) + 1 FROM events))"
        )
        event = (wire["seq"], wire["seq"], when, step, kind, json.dumps(data, ensure_ascii=False))
        rows.append((f"INSERT INTO events VALUES ({number}, ?, ?, ?, ?)", event))
        return rows

    def _phase_matters(self, data: dict[str, Any]) -> bool:
        """Progress inside a phase is for the screen; the record keeps its beginning and its end."""
        changed = data["phase"] != self._phase
        self._phase = str(data["phase"])
        return changed or (data["total"] > 0 and data["done"] >= data["total"])

    def _put_meta(self, key: str, value: str) -> None:
        with self._connection:
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def _commit(self, now: bool) -> None:
        if self.journal == "wal" or now:
            self._connection.commit()
            self._dirty = False
            self._gathered.clear()
        else:
            self._dirty = True

    def _gather(self) -> None:
        while not self._closed.wait(_GATHER_S):
            with self._lock:
                if self._dirty and not self._closed.is_set():
                    self.flush()

    def _fail(self, wire: Wire | None, error: sqlite3.Error) -> None:
        """Take back the torn transaction and keep events in memory from here on."""
        try:
            self._connection.rollback()
        except sqlite3.Error:
            log.exception("rolling %s back failed", self.path)
        self._dirty = False
        for waiting in (*self._gathered, *(() if wire is None else (wire,))):
            self._keep(waiting)
        self._gathered.clear()
        self._last_try = time.monotonic()
        if self._failing_since is None:
            self._failing_since = self._last_try
            self._tell(
                f"The run record {self.path} cannot be written ({error}). Training goes on; the record waits in memory."
            )

    def _look(self, *, at_once: bool = False) -> None:
        if not self.lost and (problem := self._file.problem(at_once=at_once)):
            self.lost = problem
            self._tell(f"{problem} Training goes on.")

    def _keep(self, wire: Wire) -> None:
        self._lost += len(self._backlog) == _BACKLOG
        self._backlog.append(wire)

    def _drain(self) -> None:
        self._last_try = time.monotonic()
        waiting = list(self._backlog)
        try:
            self._write(waiting)
            self._commit(now=True)
        except sqlite3.Error as error:
            self._fail(None, error)
            return
        self._backlog.clear()
        self._failing_since = None
        self._tell(
            f"The run record {self.path} can be written again; {len(waiting)} events were kept, {self._lost} lost."
        )

    def _tell(self, message: str) -> None:
        log.warning(message)
        if self.on_problem:
            self.on_problem(message)


def _step_row(wire: Wire, attempt: int) -> Statement:
    data, rejected = wire["data"], wire["type"] == "StepRejected"
    values = (
        attempt, wire["step"], wire["seq"], data["applied"], data["epoch"], data["loss"], data.get("loss_avg"),
        data["grad_norm"], json.dumps(data.get("lr")), data["loss_scale"], int(rejected), data["rejected_steps"],
        data.get("reason"), data.get("seconds"), data.get("samples_per_second"), data.get("vram_gib"),
        data.get("eta_seconds"), data.get("clipped"), wire["time"],
    )  # fmt: skip
    return f"INSERT OR REPLACE INTO steps VALUES ({', '.join('?' * len(values))})", values


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=10.0, check_same_thread=False)
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _choose_journal(connection: sqlite3.Connection, path: Path, wal: bool | None) -> str:
    """WAL, or DELETE where WAL's shared memory does not hold (network file systems) or SQLite declines it."""
    wanted = "WAL" if (not is_network_path(path) if wal is None else wal) else "DELETE"
    mode = str(connection.execute(f"PRAGMA journal_mode = {wanted}").fetchone()[0]).lower()
    if mode not in ("wal", "delete"):
        mode = str(connection.execute("PRAGMA journal_mode = DELETE").fetchone()[0]).lower()
    return mode


def _ensure_schema(connection: sqlite3.Connection, path: Path) -> bool:
    """Make the tables of a new record; whether it is one."""
    from .. import __version__

    version = check_version(connection, path)
    if version == SCHEMA_VERSION:
        return False
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA.split(";\n"):
            if statement.strip():
                connection.execute(statement)
        connection.execute("INSERT INTO meta VALUES ('pack_version', ?)", (__version__,))
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    return True


def check_version(connection: sqlite3.Connection, path: Path) -> int:
    """The record's format (0 = empty). CheckpointError, naming both versions, when it is newer than ours."""
    from .. import __version__

    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA_VERSION:
        raise CheckpointError(
            f"The run record {path} has format {version}; this is pack {__version__}, which reads formats up to "
            f"{SCHEMA_VERSION}. Update Safe-Scaler."
        )
    return version


def _set_aside_damaged(path: Path) -> Path | None:
    """Rename a record that SQLite finds damaged (power loss on a disk that lies), so that the run can go on."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    try:
        connection = _connect(path)
        try:
            if connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok" and not lacks_tables(connection):
                return None
        finally:
            connection.close()
    except sqlite3.OperationalError:
        return None  # locked or unreadable: the opening that follows says so
    except sqlite3.DatabaseError:
        pass
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.rename(path, target)
    for suffix in ("-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return target
