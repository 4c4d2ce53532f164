"""Reading `run.db` while or after it is written: what the report, the panel and the registry show."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .database import check_version
from .record_schema import lacks_tables

Row = dict[str, Any]

CURVES = ("loss", "loss_avg", "grad_norm", "loss_scale", "seconds", "vram_gib")
"""Numbers of the `steps` table that are drawn over the steps."""

_SIDES = ("min", "max")


class RunRecord:
    """A read-only view of a run's record. Every method reads afresh, so it follows a running run."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._connection.row_factory = sqlite3.Row

    def steps(self, *, after: int = -1) -> list[Row]:
        """Steps in order, one row each (the newest attempt). `lr` is a dict part -> rate, or None for rejected ones."""
        rows = self._all(
            "SELECT s.* FROM (SELECT step, max(attempt) AS newest FROM steps WHERE step > ? GROUP BY step) AS n"
            " JOIN steps AS s ON s.attempt = n.newest AND s.step = n.step ORDER BY s.step",
            (after,),
        )
        return [{**row, "lr": json.loads(row["lr"]), "rejected": bool(row["rejected"])} for row in rows]

    def curves(self, points: int) -> Row:
        """The steps in at most `points` buckets: `{stride, steps, metrics, lr, rejected}`.

        A bucket holds `stride` steps (a power of two), from its entry in `steps` on. `metrics` maps each name of
        `CURVES` to `{min, max}`, one value a bucket, None where no step had one. `lr` is the last rate of each part,
        `rejected` the numbers of the last 500 rejected steps.
        """
        first, last, attempts = self._connection.execute(
            "SELECT coalesce(min(step), 0), coalesce(max(step), -1), min(attempt) != max(attempt) FROM steps"
        ).fetchone()
        stride = 1
        while (last - first) // stride + 1 > points:
            stride *= 2
        chosen = ", ".join(f"min({name}) AS min_{name}, max({name}) AS max_{name}" for name in CURVES)
        rows = self._all(
            f"SELECT (step - ?) / ? AS bucket, max(step) AS last_step, lr, {chosen} FROM {_newest(bool(attempts))}"
            " GROUP BY bucket ORDER BY bucket",
            (first, stride),
        )
        rates: list[Row] = [json.loads(row["lr"]) or {} for row in rows]
        rejected = self._all("SELECT DISTINCT step FROM steps WHERE rejected ORDER BY step DESC LIMIT 500")
        return {
            "stride": stride,
            "steps": [first + row["bucket"] * stride for row in rows],
            "metrics": {name: {side: [row[f"{side}_{name}"] for row in rows] for side in _SIDES} for name in CURVES},
            "lr": {part: [rate.get(part) for rate in rates] for part in sorted({part for r in rates for part in r})},
            "rejected": sorted(row["step"] for row in rejected),
        }

    def wires(self, *, after_seq: int, limit: int) -> list[Row]:
        """Events after `after_seq` with the steps among them as StepFinished and StepRejected, in the order of seq.

        At most `limit`, the oldest first; fields that only the live event has (culprits, samples) are missing.
        """
        steps = self._all("SELECT * FROM steps WHERE seq > ? ORDER BY seq LIMIT ?", (after_seq, limit))
        events = self.events(after_seq=after_seq, limit=limit)
        told = {event["seq"] for event in events}
        merged = [*events, *(_step_wire(row) for row in steps if row["seq"] not in told)]
        return sorted(merged, key=lambda wire: wire["seq"])[:limit]

    def last_step(self) -> Row | None:
        """The newest applied step as StepFinished, as `wires` gives it; None before the first."""
        row = self._one("SELECT * FROM steps WHERE NOT rejected ORDER BY attempt DESC, step DESC LIMIT 1")
        return _step_wire(row) if row else None

    def last_events(self, count: int, *leave_out: str) -> list[Row]:
        """The newest `count` events but the types in `leave_out`, oldest first, as `events` gives them."""
        marks = ", ".join("?" * len(leave_out))
        rows = self._all(
            f"SELECT * FROM (SELECT * FROM events WHERE type NOT IN ({marks}) ORDER BY seq DESC LIMIT ?) ORDER BY seq",
            (*leave_out, count),
        )
        return [_event(row) for row in rows]

    def last_seq(self) -> int:
        """The newest event number in the record, steps included; 0 in an empty one."""
        row = self._connection.execute(
            "SELECT max((SELECT coalesce(max(seq), 0) FROM events), (SELECT coalesce(max(seq), 0) FROM steps))"
        ).fetchone()
        return int(row[0])

    def events(self, *types: str, after_seq: int = -1, limit: int = -1) -> list[Row]:
        """Events in order as `{seq, time, step, type, data}`; of the given types only, when any are given."""
        chosen = f" AND type IN ({', '.join('?' * len(types))})" if types else ""
        query = f"SELECT * FROM events WHERE seq > ?{chosen} ORDER BY seq LIMIT ?"
        return [_event(row) for row in self._all(query, (after_seq, *types, limit))]

    def validation(self) -> list[Row]:
        """Stable validation losses as `{step, mean, bands, pictures, seconds, time}`, newest attempt of each step."""
        rows = self._all(
            "SELECT * FROM validation AS v WHERE attempt = (SELECT max(attempt) FROM validation WHERE step = v.step)"
            " ORDER BY step"
        )
        return [{**row, "bands": json.loads(row["bands"])} for row in rows]

    def previews(self) -> list[Row]:
        """Preview pictures as `{step, file, prompt, index, seed, time}`."""
        return self._all('SELECT step, file, prompt, idx AS "index", seed, time FROM previews ORDER BY step, idx')

    def checkpoints(self) -> list[Row]:
        """Checkpoints as `{step, name, bytes, state, seconds, time}`."""
        return self._all("SELECT * FROM checkpoints ORDER BY step, time")

    def health(self, *, after: int = -1) -> list[Row]:
        """Gradient-health figures as `{step, module, data}`."""
        rows = self._all("SELECT * FROM health WHERE step > ? ORDER BY step, module", (after,))
        return [{"step": row["step"], "module": row["module"], "data": json.loads(row["json"])} for row in rows]

    def meta(self) -> dict[str, str]:
        return {row["key"]: row["value"] for row in self._all("SELECT key, value FROM meta")}

    def summary(self) -> Row:
        """The run in one row: status (None while it has no last event), steps, applied, rejected, losses, results."""
        started = self._one("SELECT * FROM events WHERE type = 'RunStarted' ORDER BY seq LIMIT 1")
        latest_start = self._one("SELECT * FROM events WHERE type = 'RunStarted' ORDER BY seq DESC LIMIT 1")
        ended = self._one("SELECT * FROM events WHERE type = 'RunFinished' ORDER BY seq DESC LIMIT 1")
        if ended and latest_start and latest_start["seq"] > ended["seq"]:
            ended = None
        last = self._one("SELECT * FROM steps ORDER BY attempt DESC, step DESC LIMIT 1")
        loss = self._one("SELECT loss_avg FROM steps WHERE NOT rejected ORDER BY attempt DESC, step DESC LIMIT 1")
        best = self._one("SELECT step, mean FROM validation WHERE mean IS NOT NULL ORDER BY mean, step LIMIT 1")
        start: Row = json.loads(latest_start["json"]) if latest_start else {}
        end: Row = json.loads(ended["json"]) if ended else {}
        return {
            "status": end.get("status"),
            "message": end.get("message", ""),
            "started": started["time"] if started else None,
            "ended": ended["time"] if ended else None,
            "total_steps": start.get("total_steps"),
            "parts": start.get("parts", []),
            "device": start.get("device"),
            "precision": start.get("precision"),
            "pictures": start.get("pictures"),
            "config_hash": start.get("config_hash"),
            "step": last["step"] if last else 0,
            "applied": last["applied"] if last else 0,
            "rejected": last["rejected_steps"] if last else 0,
            "loss_avg": loss["loss_avg"] if loss else None,
            "best_validation": best["mean"] if best else None,
            "best_validation_step": best["step"] if best else None,
            "warnings": self._count("Warned"),
            "resumes": self._count("Resumed"),
            "lora": end.get("lora"),
            "checkpoint": end.get("checkpoint"),
            "seconds": end.get("seconds"),
        }

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(self, query: str, values: Sequence[Any] = ()) -> list[Row]:
        return [dict(row) for row in self._connection.execute(query, values)]

    def _one(self, query: str) -> Row | None:
        rows = self._all(query)
        return rows[0] if rows else None

    def _count(self, kind: str) -> int:
        return int(self._connection.execute("SELECT count(*) FROM events WHERE type = ?", (kind,)).fetchone()[0])


def _event(row: Row) -> Row:
    return {**{key: row[key] for key in ("seq", "time", "step", "type")}, "data": json.loads(row["json"])}


def _step_wire(row: Row) -> Row:
    kind = "StepRejected" if row["rejected"] else "StepFinished"
    data = {key: value for key, value in row.items() if key not in ("seq", "step", "time", "attempt", "rejected")}
    return {
        "seq": row["seq"], "time": row["time"], "step": row["step"], "type": kind,
        "data": {**data, "lr": json.loads(row["lr"]), "clipped": bool(row["clipped"])},
    }  # fmt: skip


def _newest(several_attempts: bool) -> str:
    """Steps, the newest attempt of each. A table when there is one attempt, as in nearly every run."""
    if not several_attempts:
        return "steps"
    return (
        "(SELECT s.* FROM (SELECT step, max(attempt) AS newest FROM steps GROUP BY step) AS n"
        " JOIN steps AS s ON s.attempt = n.newest AND s.step = n.step)"
    )


def open_readonly(path: str | Path) -> RunRecord:
    """Open a record for reading. CheckpointError when it is missing, damaged, or of a newer format.

    A record in a folder without write permission is opened as unchanging when SQLite cannot make its side files.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"There is no run record at {path}. Give the folder of a run.")
    uri, problem = path.resolve().as_uri(), ""
    for options in ("mode=ro", "mode=ro&immutable=1"):
        connection = sqlite3.connect(f"{uri}?{options}", uri=True, timeout=10.0, check_same_thread=False)
        try:
            problem = "it is empty"
            if check_version(connection, path):
                if not lacks_tables(connection):
                    return RunRecord(connection)
                problem = "it is damaged (tables are missing)"
        except sqlite3.OperationalError as error:
            problem = str(error)
        except sqlite3.DatabaseError as error:
            problem = f"it is damaged ({error})"
        except CheckpointError:
            connection.close()
            raise
        connection.close()
    raise CheckpointError(f"The run record {path} cannot be read: {problem}.")
