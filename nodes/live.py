"""Runs that ComfyUI follows at this moment: what they say (`subscribe`) and what can be asked of them (`LiveRun.send`).

One registry a ComfyUI process. A node enters its run (`following`) for as long as it waits for the worker; whoever
shows runs (the relay to browsers, the HTTP API) looks at `live_runs()` and subscribes. Threads: a node's thread
publishes, the server's event-loop thread looks and sends; every function here may be called from any thread.
`LiveRun.send` waits for the worker's answer, so call it with `asyncio.to_thread` from an HTTP handler.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import trainer_core as core

Event = dict[str, Any]
"""A worker event as it stands on the wire: `{v, seq, type, run_id, step, time, data}`."""

Message = dict[str, Any]
"""What subscribers and browsers get: `{run_id, graph_id, node_id, monitor_node_id, event}`."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ack:
    """Answer to a command. `ok` with `answered=False`: the command is under way and the worker has not answered yet
    (it looks for commands between micro-batches); its answer comes as an `Ack` event."""

    id: str
    cmd: str
    ok: bool
    message: str = ""
    answered: bool = True


@dataclass
class LiveRun:
    """A run whose worker is followed now.

    `node_ids`: ids of all nodes of the graph that show this run (the Train node first, then its monitor).
    `graph_id`: the graph (workflow) they stand in, where the browser told it: another one has nodes of the same ids.
    `transport` writes a command to the worker and returns the command's id.
    """

    run_id: str
    run_dir: Path
    node_id: str
    transport: Callable[[str], str]
    monitor_node_id: str | None = None
    graph_id: str | None = None
    prompt_id: str | None = None
    last_event: Event | None = None
    _answers: dict[str, Ack] = field(default_factory=dict[str, Ack])
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def node_ids(self) -> tuple[str, ...]:
        return tuple(node for node in (self.node_id, self.monitor_node_id) if node)

    def send(self, cmd: str, args: Mapping[str, Any] | None = None, *, timeout: float = 2.0) -> Ack:
        """Ask the worker to `stop`, `save`, `preview`, `pause` or `resume`; waits `timeout` seconds for its answer.

        The commands take no arguments yet; any that are given are refused. Never raises.
        """
        if cmd not in core.COMMANDS:
            return Ack("", cmd, False, f"There is no command {cmd!r}. Known are {', '.join(core.COMMANDS)}.")
        if args:
            return Ack("", cmd, False, f"The command {cmd} takes no arguments, got {', '.join(sorted(args))}.")
        with self._changed:
            identity = self.transport(cmd)
            self._changed.wait_for(lambda: identity in self._answers, timeout)
            late = Ack(identity, cmd, True, "sent; the worker answers after its present micro-batch", answered=False)
            return self._answers.pop(identity, late)

    def take(self, event: Event) -> None:
        """Note an event of the worker: the newest one, and answers that `send` waits for."""
        with self._changed:
            self.last_event = event
            if event["type"] == "Ack":
                data = event["data"]
                answer = Ack(str(data["id"]), str(data["cmd"]), bool(data["ok"]), str(data.get("message", "")))
                self._answers[answer.id] = answer
                self._changed.notify_all()

    def message(self, event: Event) -> Message:
        return {
            "run_id": self.run_id,
            "graph_id": self.graph_id,
            "node_id": self.node_id,
            "monitor_node_id": self.monitor_node_id,
            "event": event,
        }


_lock = threading.RLock()
_runs: dict[str, LiveRun] = {}
_begun: dict[str, set[str]] = {}  # Train nodes of the newest prompt whose run was followed, by prompt id
_subscribers: list[Callable[[Message], object]] = []


def live_runs() -> dict[str, LiveRun]:
    """The runs that are followed now, by run id (a copy)."""
    with _lock:
        return dict(_runs)


def has_begun(prompt_id: str, node_id: str) -> bool:
    """Whether the run of a Train node was followed in this prompt, be it over or not (of the newest prompt alone)."""
    with _lock:
        return node_id in _begun.get(prompt_id, ())


def output_folders() -> list[Path]:
    """Folders that hold runs as `<folder>/safe_scaler/<run_id>/`: ComfyUI's output folder."""
    from .host import output_folder

    return [output_folder()]


def subscribe(callback: Callable[[Message], object]) -> Callable[[], None]:
    """Call `callback(message)` for every event of every live run, in the thread that follows the run.

    Returns a function that ends the subscription. A callback that raises is logged and goes on being called.
    """
    with _lock:
        _subscribers.append(callback)

    def end() -> None:
        with _lock, contextlib.suppress(ValueError):
            _subscribers.remove(callback)

    return end


def publish(run: LiveRun, event: Event) -> None:
    """Hand one event of `run` to every subscriber."""
    run.take(event)
    with _lock:
        callbacks = tuple(_subscribers)
    message = run.message(event)
    for callback in callbacks:
        try:
            callback(message)
        except Exception:  # a subscriber's failure must not end a training
            log.exception("a subscriber failed on %s of run %s", event["type"], run.run_id)


@contextlib.contextmanager
def following(run: LiveRun) -> Generator[LiveRun, None, None]:
    """`run` is live inside this context."""
    with _lock:
        _runs[run.run_id] = run
        if run.prompt_id is not None:
            begun = _begun.get(run.prompt_id, set())
            _begun.clear()  # ComfyUI runs one prompt at a time
            _begun[run.prompt_id] = begun | {run.node_id}
    try:
        yield run
    finally:
        with _lock:
            _runs.pop(run.run_id, None)
