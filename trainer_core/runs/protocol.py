"""How a worker talks: events as JSON lines on a pipe, commands as JSON lines on standard input, signals as stops.

An event is `{v, seq, type, run_id, step, time, data}` (`trainer_core.events`), a command `{v, id, cmd}`; both UTF-8,
one object a line, without NaN. Every command line is answered by an `Ack`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from ..events import WIRE_VERSION, Ack, Event, json_safe
from .platform import stop_signals

COMMANDS = ("stop", "save", "preview", "pause", "resume")

MAX_LINE = 64 * 1024
"""A longer command line is answered as malformed and passed over."""

HARD_EXIT = 130

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Command:
    """A valid command. `id` is the sender's; the Ack carries it."""

    id: str
    cmd: str


class BadCommand(ValueError):
    """A line that is no command. `id` is the sender's when it could be read, else empty."""

    def __init__(self, message: str, id: str = "", cmd: str = "") -> None:  # noqa: A002 - the field's name on the wire
        super().__init__(message)
        self.id = id
        self.cmd = cmd


def encode_command(id: str, cmd: str) -> bytes:  # noqa: A002
    """The line of a command."""
    return json.dumps({"v": WIRE_VERSION, "id": id, "cmd": cmd}).encode("utf-8") + b"\n"


def decode_command(line: bytes) -> Command:
    """Read one command line. BadCommand says what is wrong with it and what is allowed."""
    try:
        loaded = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadCommand(f"not a JSON object in UTF-8 ({error}); expected {{v, id, cmd}}") from error
    if not isinstance(loaded, dict):
        raise BadCommand("not a JSON object; expected {v, id, cmd}")
    message = cast("dict[str, Any]", loaded)
    identity, cmd, version = str(message.get("id", "")), str(message.get("cmd", "")), message.get("v")
    if version != WIRE_VERSION:
        raise BadCommand(f"protocol version {version!r}; this worker speaks version {WIRE_VERSION}", identity, cmd)
    if not identity:
        raise BadCommand("the command has no id", identity, cmd)
    if cmd not in COMMANDS:
        raise BadCommand(f"unknown command {cmd!r}; known are {', '.join(COMMANDS)}", identity, cmd)
    return Command(identity, cmd)


def encode_event(wire: dict[str, Any]) -> bytes:
    """The line of an event. A non-finite number becomes null and its place is listed under `nonfinite`."""
    try:
        text = json.dumps(wire, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except ValueError:
        names: list[str] = []
        data = json_safe(wire["data"], "data", names)
        data["nonfinite"] = [*data.get("nonfinite", []), *(name.removeprefix("data.") for name in names)]
        text = json.dumps({**wire, "data": data}, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass") + b"\n"


class EventPipe:
    """Event-bus subscriber that writes JSON lines to a binary stream and flushes each.

    A reader that is gone is no error of the run: it is logged once and later events are dropped (they stand in run.db).
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.broken = False

    def __call__(self, wire: dict[str, Any]) -> None:
        line = encode_event(wire)
        with self._lock:
            if self.broken:
                return
            try:
                self._stream.write(line)
                self._stream.flush()
            except (OSError, ValueError) as error:
                self.broken = True
                log.warning("nobody reads the events any more (%s)", error)


class Commands:
    """Commands that have come in. Filled by a reader thread or a signal, looked at by the training thread.

    `poll()` is called between micro-batches; `stop_requested` and `paused` change the moment the command arrives and
    may be looked at from anywhere. Acks are emitted by `poll()`, in the training thread, through `on_ack`.
    """

    def __init__(self) -> None:
        self._waiting: deque[Command] = deque()
        self._acks: deque[Ack] = deque()
        self._lock = threading.Lock()
        self.stop_requested = False
        self.stop_reason = ""
        self.paused = False
        self.on_ack: Callable[[Event], object] | None = None

    def should_stop(self) -> bool:
        return self.stop_requested

    def poll(self) -> list[Command]:
        """Commands since the last call, oldest first; answers everything that came in through `on_ack`.

        An Ack with ok=True means "taken": what the command brings about is told by its own event.
        """
        self.answer()
        with self._lock:
            commands = list(self._waiting)
            self._waiting.clear()
        return commands

    def answer(self) -> None:
        """Answer what came in and leave the commands waiting: while a run is prepared nothing can be saved yet."""
        if self.on_ack is None:
            return
        with self._lock:
            acks = list(self._acks)
            self._acks.clear()
        for ack in acks:
            self.on_ack(ack)

    def add(self, command: Command) -> None:
        """Take a valid command. Called from any thread."""
        with self._lock:
            self._waiting.append(command)
            self._acks.append(Ack(id=command.id, cmd=command.cmd, ok=True, message="taken"))
            if command.cmd == "stop":
                self._stop("stop command")
            elif command.cmd in ("pause", "resume"):
                self.paused = command.cmd == "pause"

    def add_line(self, line: bytes) -> None:
        """Take one line from the wire: a command, or something to be answered as malformed."""
        try:
            self.add(decode_command(line))
        except BadCommand as error:
            log.warning("bad command: %s", error)
            with self._lock:
                self._acks.append(Ack(id=error.id, cmd=error.cmd, ok=False, message=str(error)))

    def stop(self, reason: str) -> None:
        """Ask the run to stop at the next look (safe in a signal handler: takes no lock)."""
        self._stop(reason)

    def _stop(self, reason: str) -> None:
        if not self.stop_requested:
            self.stop_reason = reason
            self.stop_requested = True


class LineSplitter:
    """Cuts a byte stream into lines. Of a line longer than `limit` only its beginning is handed on, once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending = b""
        self._passing_over = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes, without their line ends."""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        if lines and self._passing_over:
            lines, self._passing_over = lines[1:], False
        if self._passing_over:
            self._pending = b""
        elif len(self._pending) > self._limit:
            lines.append(self._pending[: self._limit])
            self._pending, self._passing_over = b"", True
        return lines


def read_commands(
    fd: int, commands: Commands, *, stop_at_end: bool, on_end: Callable[[], object] | None = None
) -> None:
    """Read command lines from descriptor `fd` until its end. End means "stop" only with `stop_at_end`.

    Reads the descriptor itself: a thread that blocks inside `sys.stdin` would hold its lock at interpreter shutdown.
    """
    lines = LineSplitter(MAX_LINE)
    while True:
        try:
            chunk = os.read(fd, MAX_LINE)
        except OSError as error:
            log.warning("commands cannot be read: %s", error)
            break
        if not chunk:
            break
        for line in lines.feed(chunk):
            if line.strip():
                commands.add_line(line)
    if stop_at_end:
        commands.stop("the program that started this run is gone")
        if on_end:
            on_end()


def start_reader(
    fd: int, commands: Commands, *, supervised: bool, on_end: Callable[[], object] | None = None
) -> threading.Thread:
    """Run `read_commands` in a daemon thread; `supervised`: the end of the stream means stop."""
    thread = threading.Thread(
        target=read_commands, args=(fd, commands), kwargs={"stop_at_end": supervised, "on_end": on_end},
        name="commands", daemon=True,
    )  # fmt: skip
    thread.start()
    return thread


@contextlib.contextmanager
def stop_on_signals(
    commands: Commands, *, system: str = sys.platform, source: Any = signal, exit_now: Callable[[int], Any] = os._exit
) -> Generator[None, None, None]:
    """Map SIGINT, SIGTERM (and SIGBREAK on Windows) to `stop`; a second SIGINT ends the process at once, code 130.

    Outside the main thread signals cannot be taken over, and nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = 0

    def handle(number: int, _frame: object) -> None:
        nonlocal interrupts
        interactive = number != getattr(source, "SIGTERM", None)
        interrupts += int(interactive)
        if interrupts >= 2 and interactive:
            _say("\nEnded at once: the work since the last checkpoint is lost.\n")
            exit_now(HARD_EXIT)
            return
        _say("\nStopping: a checkpoint and the LoRA are written. Press Ctrl-C again to end at once without them.\n")
        commands.stop(f"signal {signal.Signals(number).name}")

    before = {number: source.signal(number, handle) for number in stop_signals(system, source)}
    try:
        yield
    finally:
        for number, handler in before.items():
            source.signal(number, handler)


def _say(text: str) -> None:
    """Write to standard error from a signal handler, where buffered streams must not be entered."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode("utf-8"))
