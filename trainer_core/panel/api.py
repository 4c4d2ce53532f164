"""`/safe_scaler/api/v1`: the requests of the panel, answered. `docs/http_api.md` describes them.

Runs, previews and checkpoints are named by ids; no path comes in and none goes out. Blocking: call `handle` outside an
event loop's thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import TrainerError
from ..runs.protocol import COMMANDS
from ..runs.record import open_readonly
from ..runs.registry import RunInfo
from . import control, share, snapshot, storage
from .data_sets import DataSets, ScannedSet
from .exchange import Refused, Reply, Request, check, refusal
from .places import bare_text
from .run_list import RunList, facts

PREFIX = "/safe_scaler/api/v1"
HEARTBEAT_S = 5.0
MIN_INTERVAL_MS, MAX_INTERVAL_MS = 100, 10_000
DEFAULT_INTERVAL_MS = 250
_POINTS = 600

_NO_STORE = {"Cache-Control": "no-store"}
_PICTURE = {"Cache-Control": "private, max-age=86400", "X-Content-Type-Options": "nosniff"}
_THUMBNAIL = {"Cache-Control": "private, max-age=60", "X-Content-Type-Options": "nosniff"}
_REPORT = {
    # A report from elsewhere may hold anything: it is shown without scripts and without access to this page.
    "Content-Security-Policy": "sandbox; default-src 'none'; img-src data:; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

Handler = Callable[..., Reply]


class PanelApi:
    """Answers requests about the runs below some output folders.

    Args:
        roots: the folders that hold `safe_scaler/<run_id>`, asked at every request.
        live: the runs this program follows, by run id; only they take every command.
        on_interval: told when the refresh interval is changed (milliseconds).
        scanned: data sets that this program has scanned, by id.
        waiting: runs that are asked for and have not begun, in their order.
    """

    def __init__(
        self,
        roots: Callable[[], Iterable[Path]],
        live: Callable[[], Mapping[str, control.Followed]] = dict,
        on_interval: Callable[[int], object] = lambda _: None,
        scanned: Callable[[], Mapping[str, ScannedSet]] = dict,
        waiting: Callable[[], list[dict[str, Any]]] = list,
    ) -> None:
        self.runs = RunList(roots)
        self.data_sets = DataSets(self.runs, scanned, live)
        self._waiting = waiting
        self.interval_ms = DEFAULT_INTERVAL_MS
        self._live = live
        self._on_interval = on_interval
        self._paused: frozenset[str] = frozenset()
        self._routes: list[tuple[str, re.Pattern[str], Handler]] = [
            (method, re.compile(pattern), handler)
            for method, pattern, handler in (
                ("GET", "/config", self._config),
                ("PATCH", "/config/refresh_rate", self._refresh_rate),
                ("GET", "/runs", self._list),
                ("GET", "/runs/([^/]+)", self._run),
                ("DELETE", "/runs/([^/]+)", self._delete),
                ("GET", "/runs/([^/]+)/snapshot", self._snapshot),
                ("GET", "/runs/([^/]+)/updates", self._updates),
                ("GET", "/runs/([^/]+)/previews", self._previews),
                ("GET", "/runs/([^/]+)/previews/([^/]+)", self._preview),
                ("POST", "/runs/([^/]+)/commands", self._command),
                ("GET", "/runs/([^/]+)/disk", self._disk),
                ("GET", "/runs/([^/]+)/report", self._report),
                ("GET", "/runs/([^/]+)/share", self._share),
                ("GET", "/data_sets", self._data_sets),
                ("GET", "/data_sets/([^/]+)", self._data_set),
                ("GET", "/data_sets/([^/]+)/captions", self._captions),
                ("PATCH", "/data_sets/([^/]+)/captions/([^/]+)", self._change_caption),
                ("GET", "/data_sets/([^/]+)/pictures/([^/]+)", self._picture),
            )
        ]

    def handle(self, request: Request) -> Reply:
        """Answer one request. Refusals and errors a user can act on become a JSON `error`; bugs are raised."""
        try:
            check(request)
            return self._dispatch(request)
        except Refused as error:
            return refusal(error)
        except TrainerError as error:
            return refusal(Refused(422, "problem", bare_text(str(error))))

    def _dispatch(self, request: Request) -> Reply:
        allowed: list[str] = []
        for method, pattern, handler in self._routes:
            found = pattern.fullmatch(request.path)
            if found is None:
                continue
            if method == request.method:
                return handler(request, *found.groups())
            allowed.append(method)
        if allowed:
            raise Refused(405, "method", f"{request.method} is not possible here, only {', '.join(allowed)}.")
        raise Refused(404, "no_such_route", "There is nothing at this address. docs/http_api.md lists the addresses.")

    def _facts(self, info: RunInfo) -> dict[str, Any]:
        told = facts(info, self._live().get(info.run_id), paused=info.run_id in self._paused)
        return {**told, "data_set": self.data_sets.of_run(info)}

    def _config(self, _: Request) -> Reply:
        return _json(
            {
                "version": __version__,
                "interval_ms": self.interval_ms,
                "interval_range_ms": [MIN_INTERVAL_MS, MAX_INTERVAL_MS],
                "heartbeat_s": HEARTBEAT_S,
                "commands": list(COMMANDS),
            }
        )

    def _refresh_rate(self, request: Request) -> Reply:
        body = request.json()
        value = body.get("interval_ms")
        whole = value if isinstance(value, int) and not isinstance(value, bool) else 0
        if set(body) != {"interval_ms"} or not MIN_INTERVAL_MS <= whole <= MAX_INTERVAL_MS:
            why = f"The body must be {{interval_ms}} with a whole number from {MIN_INTERVAL_MS} to {MAX_INTERVAL_MS}."
            raise Refused(400, "bad_interval", why)
        self.interval_ms = whole
        self._on_interval(whole)
        return _json({"interval_ms": whole})

    def _list(self, _: Request) -> Reply:
        return _json({"runs": [self._facts(info) for info in self.runs.all()], "waiting": self._waiting()})

    def _run(self, _: Request, run_id: str) -> Reply:
        return _json(self._facts(self.runs.describe(self.runs.find(run_id))))

    def _snapshot(self, request: Request, run_id: str) -> Reply:
        folder = self.runs.find(run_id)
        points = request.number("points", _POINTS, 10, 5000)
        return _json(snapshot.snapshot(folder, self._facts(self.runs.describe(folder)), points))

    def _updates(self, request: Request, run_id: str) -> Reply:
        folder = self.runs.find(run_id)
        run = self._facts(self.runs.describe(folder))
        after_seq = request.number("after_seq", -1, -1, 10**12)
        after_step = request.number("after_step", -1, -1, 10**12)
        return _json(snapshot.updates(folder, run, after_seq=after_seq, after_step=after_step))

    def _previews(self, _: Request, run_id: str) -> Reply:
        folder = self.runs.find(run_id)
        with open_readonly(folder.database_path) as record:
            return _json({"previews": [snapshot.preview_facts(row) for row in record.previews()]})

    def _preview(self, _: Request, run_id: str, preview_id: str) -> Reply:
        path, kind = storage.preview_file(self.runs.find(run_id), preview_id)
        return Reply(file=path, content_type=kind, headers=_PICTURE)

    def _command(self, request: Request, run_id: str) -> Reply:
        folder = self.runs.find(run_id)
        body = request.json()
        cmd = body.get("cmd")
        if set(body) != {"cmd"} or not isinstance(cmd, str):
            raise Refused(400, "bad_command", f"The body must be {{cmd}}, one of {', '.join(COMMANDS)}.")
        answer = control.command(folder, self._live().get(run_id), cmd)
        if answer["ok"] and cmd in ("pause", "resume", "stop"):
            # No event tells a panel that comes later that the run waits.
            self._paused = self._paused | {run_id} if cmd == "pause" else self._paused - {run_id}
        return _json(answer)

    def _disk(self, _: Request, run_id: str) -> Reply:
        return _json(storage.disk_use(self.runs.find(run_id)))

    def _report(self, _: Request, run_id: str) -> Reply:
        path = self.runs.find(run_id).report_path
        if not path.is_file():
            raise Refused(404, "no_report", "The run has no report yet; it is written when the run ends.")
        return Reply(file=path, content_type="text/html; charset=utf-8", headers=_REPORT)

    def _share(self, request: Request, run_id: str) -> Reply:
        return _json(share.share_sheet(self.runs.find(run_id), request.query.get("metadata", "full")))

    def _data_sets(self, _: Request) -> Reply:
        return _json({"data_sets": self.data_sets.all()})

    def _data_set(self, _: Request, identity: str) -> Reply:
        return _json(self.data_sets.one(identity))

    def _captions(self, request: Request, identity: str) -> Reply:
        return _json(self.data_sets.captions(identity, request))

    def _change_caption(self, request: Request, identity: str, key: str) -> Reply:
        return _json(self.data_sets.change(identity, key, request.json()))

    def _picture(self, _: Request, identity: str, key: str) -> Reply:
        return Reply(content=self.data_sets.picture(identity, key), content_type="image/jpeg", headers=_THUMBNAIL)

    def _delete(self, request: Request, run_id: str) -> Reply:
        folder = self.runs.find(run_id)
        if request.json().get("confirm") != run_id:
            raise Refused(400, "not_confirmed", "To delete a run, repeat its id in the body: {confirm}.")
        if run_id in self._live():
            raise Refused(409, "running", f"The run {run_id} is running. Stop it first.")
        return _json({"deleted": run_id, "bytes": storage.delete_run(folder)})


def _json(data: Any) -> Reply:
    return Reply(data=data, headers=_NO_STORE)
