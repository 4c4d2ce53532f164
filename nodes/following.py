"""Follows a worker from a node: progress bar, events to browsers, pictures in the node, Cancel as `stop`."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

from .. import trainer_core as core
from . import host, live
from .graph_pictures import shown_files
from .live import Event, LiveRun
from .relay import Relay

_BAR_EVERY_S = 0.1
_LOG_EVERY_S = 30.0
_MOST_PICTURES = 24

log = logging.getLogger(__name__)

relay = Relay(host.send_event, folders=lambda: (host.output_folder(), host.input_folder()))
"""The one sender of events to browsers; `relay.set_interval` changes its rate."""

live.subscribe(relay)


class _Display:
    """What the running node shows: its bar, its pictures (with `node_id`), and a line in the log now and then."""

    def __init__(self, run_dir: Path, node_id: str | None = None) -> None:
        self._run_dir = run_dir
        self._node_id = node_id
        self._bar = host.progress_bar()
        self._total = 0
        self._bar_at = self._log_at = 0.0
        self._pictures: list[Path] = []

    def __call__(self, event: Event) -> None:
        data = event["data"]
        match event["type"]:
            case "RunStarted":
                self._total = int(data["total_steps"])
            case "PhaseChanged":
                if data["total"]:
                    self._show(int(data["done"]), int(data["total"]))
                else:  # it counts nothing: the bar of the phase before says nothing about it
                    self._show(int(event["step"]) if self._total else 0, self._total)
            case "StepFinished" | "StepRejected":
                self._show(int(event["step"]), self._total)
                self._say(event)
            case "PreviewReady":
                self._pictures.append(self._run_dir / data["file"])
                if self._node_id is not None:
                    host.show_pictures(self._node_id, shown_files(self._pictures[-_MOST_PICTURES:]))
            case "Warned" if data["topic"] not in core.NOTE_TOPICS:
                log.warning("%s: %s", self._run_dir.name, data["message"])
            case _:
                pass

    def _show(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._bar_at >= _BAR_EVERY_S or done >= total:
            self._bar_at = now
            self._bar(done, total)

    def _say(self, event: Event) -> None:
        now = time.monotonic()
        if now - self._log_at < _LOG_EVERY_S:
            return
        self._log_at = now
        data: dict[str, Any] = event["data"]
        minutes = (data.get("eta_seconds") or 0.0) / 60
        loss = data.get("loss_avg", data.get("loss"))
        shown = "not finite" if loss is None else f"{loss:.4f}"
        log.info("Safe-Scaler step %d of %d, loss %s, %.1f min left", event["step"], self._total, shown, minutes)


def work(run_dir: Path) -> core.RunOutcome:
    """Let the worker do a job that is no training (pictures, coverage), with a progress bar. Cancel becomes `stop`."""
    return core.Supervisor(run_dir, _Display(run_dir), should_stop=host.interrupted).run()


def follow(
    run_dir: Path, node_id: str, monitor_node_id: str | None = None, graph_id: str | None = None
) -> core.RunOutcome:
    """Run the worker of `run_dir` to its end, starting it again when it dies. Cancel in ComfyUI becomes `stop`.

    Returns also for a cancelled run: the caller raises ComfyUI's exception once it has put the results away.
    """
    display = _Display(run_dir, node_id)

    def on_event(event: Event) -> None:
        live.publish(run, event)
        display(event)

    stop_asked = threading.Event()

    def transport(cmd: str) -> str:
        if cmd == "stop":
            stop_asked.set()  # holds also while no worker is there to hear it, between two starts
        return supervisor.send(cmd)

    def should_stop() -> bool:
        relay.tick()
        return stop_asked.is_set() or host.interrupted()

    supervisor = core.Supervisor(run_dir, on_event, should_stop=should_stop)
    run = LiveRun(
        run_id=run_dir.name,
        run_dir=run_dir,
        node_id=node_id,
        transport=transport,
        monitor_node_id=monitor_node_id,
        graph_id=graph_id,
        prompt_id=host.current_prompt(),
    )
    with live.following(run):
        return supervisor.run()
