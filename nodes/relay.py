"""Sends worker events to browsers: `PromptServer.instance.send_sync("safe_scaler.event", message)`.

A message is `{run_id, graph_id, node_id, monitor_node_id, event}`. Steps come faster than a browser wants them: those
(`StepFinished`) of one interval travel in one message, the newest as `event` and the ones before it, oldest first, as
`earlier` (a key that is there only when it holds something). All other events go at once, after the steps before them,
so the order is the worker's. What is not finite arrives as null and is named under `nonfinite`
(`trainer_core.events`); a message that still is no strict JSON is dropped and logged here, because it would end
ComfyUI's server loop.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .. import trainer_core as core
from .live import Event, Message

CHANNEL = "safe_scaler.event"

MIN_INTERVAL_MS, MAX_INTERVAL_MS = 100, 10_000

_MOST_WAITING = 1000
"""Steps that wait for one message at most; a message stays below a megabyte."""

log = logging.getLogger(__name__)

Send = Callable[[str, dict[str, Any]], object]


class Relay:
    """Subscriber of `live` that forwards events. `send(channel, message)` is the host's thread-safe sender.

    `folders`: the host's own; what lies below them keeps its path inside them in messages.
    """

    def __init__(
        self,
        send: Send,
        interval_ms: int = 250,
        clock: Callable[[], float] = time.monotonic,
        folders: Callable[[], Iterable[Path]] = tuple,
    ) -> None:
        self._send = send
        self._folders = folders
        self._clock = clock
        self._lock = threading.RLock()
        self._waiting: dict[str, list[Message]] = {}
        self._sent_at: dict[str, float] = {}
        self.interval_ms = interval_ms

    def set_interval(self, interval_ms: int) -> None:
        """Milliseconds between two messages with steps of one run; ValueError outside 100 to 10000."""
        if not MIN_INTERVAL_MS <= interval_ms <= MAX_INTERVAL_MS:
            raise ValueError(f"interval_ms must be {MIN_INTERVAL_MS} to {MAX_INTERVAL_MS}, got {interval_ms}")
        self.interval_ms = interval_ms

    def __call__(self, message: Message) -> None:
        with self._lock:
            run_id = message["run_id"]
            waiting = self._waiting.setdefault(run_id, [])
            if message["event"]["type"] == "StepFinished":
                waiting.append(message)
                if len(waiting) >= _MOST_WAITING or self._is_due(run_id):
                    self._flush(run_id)
                return
            self._flush(run_id)
            self._post(message)
            if message["event"]["type"] == "RunFinished":
                self._waiting.pop(run_id, None)
                self._sent_at.pop(run_id, None)

    def tick(self) -> None:
        """Send steps that have waited long enough. Called a few times a second while a run is followed."""
        with self._lock:
            for run_id in list(self._waiting):
                if self._is_due(run_id):
                    self._flush(run_id)

    def _is_due(self, run_id: str) -> bool:
        return (self._clock() - self._sent_at.get(run_id, float("-inf"))) * 1000 >= self.interval_ms

    def _flush(self, run_id: str) -> None:
        waiting = self._waiting.get(run_id)
        if not waiting:
            return
        *before, newest = waiting
        self._waiting[run_id] = []
        self._sent_at[run_id] = self._clock()
        self._post({**newest, "earlier": [m["event"] for m in before]} if before else newest)

    def _post(self, message: Message) -> None:
        folders = tuple(self._folders())
        message = {**message, "event": without_paths(message["event"], folders)}
        if "earlier" in message:
            message["earlier"] = [without_paths(event, folders) for event in message["earlier"]]
        try:
            json.dumps(message, allow_nan=False)
        except (TypeError, ValueError):
            log.exception("an event of run %s is no JSON and is not shown", message.get("run_id"))
            return
        self._send(CHANNEL, message)


def without_paths(event: Event, folders: Iterable[Path] = ()) -> Event:
    """`event` without places of this machine: files by their bare names, and none in messages either."""
    return {**event, "data": core.hide_places(event["data"], folders)}
