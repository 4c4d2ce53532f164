"""Starts a run's worker, follows it, and starts it again from the newest good checkpoint when it dies without a last
word.

The supervisor never trains and imports no torch. A worker whose supervisor dies sees the end of its standard input,
stops, and leaves no orphan.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints import manifest
from ..errors import TrainerError
from ..events import Warned, to_wire
from .database import RunDatabase
from .folder import RunFolder
from .platform import child_options, end_child
from .protocol import encode_command

WORKER = Path(__file__).resolve().parent.parent / "worker_main.py"

_TICK_S = 0.2
_EXIT_GRACE_S = 30.0
"""A worker that has said its last word may take this long to end."""

_DRAIN_S = 2.0
"""What a dead worker had sent arrives within this time, even when a grandchild keeps the pipe open."""

Wire = dict[str, Any]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOutcome:
    """How a supervised run ended. `status`: finished, stopped or failed; `lora` and `checkpoint` as in RunFinished."""

    status: str
    message: str
    restarts: int = 0
    step: int = 0
    lora: str | None = None
    checkpoint: str | None = None
    exit_code: int | None = None


class Supervisor:
    """One run's supervisor. `run()` blocks until the run is over; `send()` may be called from other threads.

    `stop_timeout`: seconds a worker may take to stop (it saves first) before it is ended by force.
    """

    def __init__(
        self,
        run_dir: str | Path,
        on_event: Callable[[Wire], object],
        *,
        python: str = sys.executable,
        should_stop: Callable[[], bool] = lambda: False,
        max_restarts_without_progress: int = 3,
        stop_timeout: float = 600.0,
        worker: Path = WORKER,
        worker_options: Sequence[str] = (),
    ) -> None:
        self.folder = RunFolder(run_dir)
        self._on_event = on_event
        self._command = [python, str(worker), str(self.folder.path), "--supervised", *worker_options]
        self._should_stop = should_stop
        self._max_restarts = max_restarts_without_progress
        self._stop_timeout = stop_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._sending = threading.Lock()
        self._commands_sent = 0
        self._stop_sent: float | None = None
        self._last: Wire | None = None
        self._step = 0
        self._seq = 0

    def send(self, cmd: str) -> str:
        """Send a command (stop, save, preview, pause, resume); returns its id, which the Ack will carry."""
        with self._sending:
            self._commands_sent += 1
            identity = f"s{self._commands_sent}"
            stream = self._process.stdin if self._process else None
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):  # the worker is gone: its end is seen elsewhere
                    stream.write(encode_command(identity, cmd))
                    stream.flush()
            return identity

    def run(self) -> RunOutcome:
        """Follow the run to its end, with restarts. Exceptions of `on_event` pass through, the worker ended first.

        ConfigError when the folder is no run.
        """
        self.folder.read_config()
        restarts = without_progress = 0
        best = self._newest_step()
        while True:
            exit_code = self._follow_one_worker()
            if self._last is not None:
                return self._outcome(restarts, exit_code)
            how = _describe_exit(exit_code)
            if self._stop_sent is not None or self._should_stop():
                message = f"The worker {how} while stopping; the work since the last checkpoint is lost."
                self._warn(message, max(self._newest_step(), 0))
                return RunOutcome("stopped", message, restarts, self._step, exit_code=exit_code)
            newest = self._newest_step()
            without_progress = 0 if newest > best else without_progress + 1
            best = max(best, newest)
            where = f"the checkpoint of step {newest}" if newest >= 0 else "the beginning (there is no checkpoint yet)"
            if without_progress > self._max_restarts:
                message = (
                    f"The worker {how} at step {self._step}, for the {without_progress}th time without getting further "
                    f"than {where}. It is not started again; {self.folder.log_path} says what it was doing."
                )
                self._warn(message, max(newest, 0))
                return RunOutcome("failed", message, restarts, self._step, exit_code=exit_code)
            restarts += 1
            self._warn(
                f"The worker {how} at step {self._step}. It is started again from {where} (restart {restarts}).",
                max(newest, 0),
            )

    def _newest_step(self) -> int:
        """Step of the checkpoint that a worker goes on from, -1 when there is none."""
        try:
            newest = manifest.newest_whole(self.folder.checkpoints)
        except TrainerError as error:
            log.warning("%s", error)
            return -1
        return newest.step if newest else -1

    def _follow_one_worker(self) -> int:
        self._last = None
        options = child_options()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
        with self.folder.log_path.open("ab") as errors:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                creationflags=options.creationflags,
                start_new_session=options.start_new_session,
            )
        assert process.stdout is not None, "the worker was started with a pipe"
        with self._sending:
            self._process = process
        lines: queue.Queue[bytes | None] = queue.Queue()
        reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), name="worker events", daemon=True)
        reader.start()
        try:
            self._follow(process, lines)
            return self._wait_end(process)
        finally:
            if process.poll() is None:
                end_child(process)
            with self._sending:
                self._process = None
                with contextlib.suppress(OSError):
                    if process.stdin:
                        process.stdin.close()
            reader.join(timeout=5.0)
            process.stdout.close()

    def _follow(self, process: subprocess.Popen[bytes], lines: queue.Queue[bytes | None]) -> None:
        dead_since: float | None = None
        while True:
            if self._stop_sent is None and self._should_stop():
                self._stop_sent = time.monotonic()
                self.send("stop")
            if self._stop_sent is not None and time.monotonic() - self._stop_sent > self._stop_timeout:
                self._warn(
                    f"The worker has not stopped for {self._stop_timeout:.0f} s and is ended by force.", 0, record=False
                )
                end_child(process)
                return
            try:
                line = lines.get(timeout=_TICK_S)
            except queue.Empty:
                # The pipe may stay open in a grandchild after the worker itself is gone.
                if process.poll() is not None:
                    dead_since = dead_since or time.monotonic()
                    if time.monotonic() - dead_since > _DRAIN_S:
                        return
                continue
            if line is None:
                return
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            wire = json.loads(line)
            kind, self._step, self._seq = str(wire["type"]), int(wire["step"]), int(wire["seq"])
        except (ValueError, KeyError, TypeError) as error:
            log.warning("the worker sent a line that is no event (%s): %r", error, line[:200])
            return
        if kind == "RunFinished":
            self._last = wire
        self._on_event(wire)

    def _wait_end(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(_EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            log.warning("the worker closed its events and does not end: ended by force")
            return end_child(process)

    def _outcome(self, restarts: int, exit_code: int) -> RunOutcome:
        assert self._last is not None, "called after a last event"
        data = self._last["data"]
        return RunOutcome(
            str(data["status"]),
            str(data["message"]),
            restarts,
            self._step,
            data.get("lora"),
            data.get("checkpoint"),
            exit_code,
        )

    def _warn(self, message: str, step: int, *, record: bool = True) -> None:
        """Say it to the follower, in run.log and, while no worker writes it, in the run's record."""
        wire = to_wire(
            Warned(step=step, topic="restart", message=message), seq=self._seq + 1, run_id=self.folder.run_id
        )
        try:
            with self.folder.log_path.open("a", encoding="utf-8") as stream:
                stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} WARNING supervisor: {message}\n")
            if record and self.folder.database_path.exists():
                with self.folder.lock(), RunDatabase(self.folder.database_path) as database:
                    wire["seq"] = max(self._seq, database.last_seq()) + 1
                    database(wire)
        except (OSError, TrainerError) as error:
            log.warning("the restart could not be recorded: %s", error)
        self._seq = int(wire["seq"])
        self._on_event(wire)


def supervise(
    run_dir: str | Path,
    on_event: Callable[[Wire], object],
    *,
    python: str = sys.executable,
    should_stop: Callable[[], bool] = lambda: False,
    max_restarts_without_progress: int = 3,
    stop_timeout: float = 600.0,
    worker: Path = WORKER,
) -> RunOutcome:
    """Run the worker of `run_dir` to its end, restarting it when it dies without RunFinished (see `Supervisor`)."""
    return Supervisor(
        run_dir, on_event, python=python, should_stop=should_stop, stop_timeout=stop_timeout, worker=worker,
        max_restarts_without_progress=max_restarts_without_progress,
    ).run()  # fmt: skip


def _read_lines(stream: Any, lines: queue.Queue[bytes | None]) -> None:
    """Hand over complete lines, then None. A torn last line (the worker was killed while writing) is dropped."""
    try:
        for line in stream:
            if line.endswith(b"\n"):
                lines.put(line)
    except (OSError, ValueError) as error:
        log.warning("the worker's events cannot be read: %s", error)
    lines.put(None)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} and without a last word"
    import signal

    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (often: out of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
