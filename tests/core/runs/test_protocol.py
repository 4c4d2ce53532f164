"""Event lines, command lines, signals."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_core.events import Ack, Event, EventBus, StepFinished, Warned, to_wire
from trainer_core.runs.protocol import (
    COMMANDS,
    MAX_LINE,
    BadCommand,
    Command,
    Commands,
    EventPipe,
    LineSplitter,
    decode_command,
    encode_command,
    encode_event,
    start_reader,
    stop_on_signals,
)


def finished(loss: float) -> StepFinished:
    return StepFinished(
        step=3, applied=3, epoch=0, loss=loss, loss_avg=1.0, grad_norm=float("inf"), lr={"unet": 1e-4}, loss_scale=1.0,
        rejected_steps=0, samples_per_second=1.0, seconds=1.0, eta_seconds=1.0, vram_gib=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("cmd", COMMANDS)
def test_commands_round_trip(cmd: str) -> None:
    line = encode_command("7", cmd)
    assert line.endswith(b"\n")
    assert decode_command(line) == Command("7", cmd)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"stop", "not a JSON object in UTF-8"),
        (b'\xff{"v": 1}', "not a JSON object in UTF-8"),
        (b"[1]", "not a JSON object"),
        (b'{"v": 1, "cmd": "stop"}', "no id"),
        (b'{"v": 2, "id": "1", "cmd": "stop"}', "protocol version 2; this worker speaks version 1"),
        (b'{"v": 1, "id": "1", "cmd": "halt"}', "unknown command 'halt'; known are stop, save"),
        (b'{"v": 1, "id": "1"}', "unknown command ''"),
    ],
)
def test_what_is_no_command(line: bytes, message: str) -> None:
    with pytest.raises(BadCommand, match=message):
        decode_command(line)


def test_event_lines_hold_no_nan_and_name_what_was_none() -> None:
    wire = to_wire(finished(float("nan")), seq=1, run_id="r", now=0.0)
    line = json.loads(encode_event(wire), parse_constant=lambda name: pytest.fail(name))
    assert line["data"]["loss"] is None
    assert line["data"]["nonfinite"] == ["loss", "grad_norm"]


def test_a_nan_that_slipped_through_is_caught_at_the_pipe() -> None:
    wire = {"v": 1, "type": "X", "data": {"deep": [1.0, float("nan")], "nonfinite": ["other"]}}
    line = json.loads(encode_event(wire), parse_constant=lambda name: pytest.fail(name))
    assert line["data"] == {"deep": [1.0, None], "nonfinite": ["other", "deep.1"]}


def test_the_pipe_writes_one_flushed_line_an_event() -> None:
    class Stream(io.BytesIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed = len(self.getvalue())

    stream = Stream()
    bus = EventBus("r")
    bus.subscribe(EventPipe(stream))
    bus.emit(Warned(topic="x", message="zwei\nZeilen ✓"))
    bus.emit(Warned(topic="x", message="b"))
    assert stream.flushed == len(stream.getvalue())
    lines = stream.getvalue().decode("utf-8").splitlines()
    assert [json.loads(line)["data"]["message"] for line in lines] == ["zwei\nZeilen ✓", "b"]


def test_a_reader_that_is_gone_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as stream:
        pipe = EventPipe(stream)
        wire = to_wire(Warned(topic="x", message="a"), seq=1, run_id="r")
        pipe(wire)
        pipe(wire)
        assert pipe.broken
        # What stands in the stream's buffer would be written again at closing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)
    assert caplog.text.count("nobody reads the events any more") == 1


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_are_cut_the_same_however_they_arrive(size: int) -> None:
    data = b"one\n\nthree" + b"x" * 60 + b"\nfour\nhalf"
    splitter = LineSplitter(40)
    lines: list[bytes] = []
    for start in range(0, len(data), size):
        lines += splitter.feed(data[start : start + size])
    short = [line for line in lines if len(line) < 30]
    assert short == [b"one", b"", b"four"]


def test_an_endless_line_costs_no_memory_and_is_handed_on_once() -> None:
    splitter = LineSplitter(100)
    lines = [line for _ in range(50) for line in splitter.feed(b"y" * 60)]
    assert lines == [b"y" * 100]
    assert splitter.feed(b"yy\nstop\n") == [b"stop"]


def collect(commands: Commands) -> list[Event]:
    acks: list[Event] = []
    commands.on_ack = acks.append
    return acks


def test_commands_arrive_in_order_and_are_answered_by_poll() -> None:
    commands = Commands()
    commands.add_line(encode_command("1", "save"))
    commands.add_line(b"nonsense")
    commands.add_line(encode_command("2", "preview"))
    acks = collect(commands)
    assert acks == []
    assert commands.poll() == [Command("1", "save"), Command("2", "preview")]
    assert commands.poll() == []
    assert [(ack.id, ack.ok) for ack in acks if isinstance(ack, Ack)] == [("1", True), ("", False), ("2", True)]
    assert not commands.stop_requested


def test_answers_wait_until_somebody_can_send_them() -> None:
    commands = Commands()
    commands.add(Command("1", "stop"))
    assert commands.poll() == [Command("1", "stop")]
    acks = collect(commands)
    commands.poll()
    assert len(acks) == 1


def test_stop_and_pause_are_seen_at_once() -> None:
    commands = Commands()
    assert not commands.stop_requested
    commands.add(Command("1", "pause"))
    assert commands.paused
    commands.add(Command("2", "resume"))
    assert not commands.paused
    commands.add(Command("3", "stop"))
    assert commands.should_stop()
    commands.stop("signal SIGTERM")
    assert commands.stop_reason == "stop command"


def test_while_a_run_is_prepared_commands_are_answered_and_wait() -> None:
    """They were answered as taken, and thrown away."""
    commands, acks = Commands(), []
    commands.on_ack = acks.append
    commands.add(Command("1", "save"))
    commands.answer()
    commands.answer()
    assert [ack.id for ack in acks] == ["1"]
    assert commands.poll() == [Command("1", "save")]
    assert [ack.id for ack in acks] == ["1"]


@pytest.mark.parametrize("supervised", [True, False])
def test_the_reader_thread_over_a_real_pipe(supervised: bool) -> None:
    read, write = os.pipe()
    commands, ended = Commands(), []
    thread = start_reader(read, commands, supervised=supervised, on_end=lambda: ended.append(True))
    os.write(write, encode_command("1", "sa")[:5])
    os.write(write, encode_command("1", "sa")[5:] + encode_command("2", "save") + b"x" * (MAX_LINE + 10) + b"\n")
    os.write(write, encode_command("3", "preview") + b'{"v": 1, "id": "4", "cmd": "st')
    os.close(write)
    thread.join(10)
    acks = collect(commands)
    assert [command.cmd for command in commands.poll()] == ["save", "preview"]
    assert [ack.ok for ack in acks if isinstance(ack, Ack)] == [False, True, False, True]
    assert commands.stop_requested is supervised
    assert ended == ([True] if supervised else [])
    os.close(read)


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill ends the process there")
def test_signals_mean_stop_and_handlers_are_put_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        commands = Commands()
        with stop_on_signals(commands):
            os.kill(os.getpid(), number)
            deadline = time.monotonic() + 5
            while not commands.stop_requested and time.monotonic() < deadline:
                time.sleep(0.01)
        assert commands.stop_reason == f"signal {number.name}"
    assert {number: signal.getsignal(number) for number in before} == before


class FakeSignals(SimpleNamespace):
    """The signal module of another system: remembers handlers, delivers by `send`."""

    def __init__(self, **numbers: int) -> None:
        super().__init__(**numbers, handlers={})

    def signal(self, number: int, handler: Any) -> Any:
        before = self.handlers.get(number)
        self.handlers[number] = handler
        return before

    def send(self, number: int) -> None:
        self.handlers[number](number, None)


@pytest.mark.parametrize(
    ("sent", "exits"), [([2], []), ([2, 2], [130]), ([15, 15], []), ([15, 2], []), ([2, 15, 2], [130])]
)
def test_only_a_second_interrupt_ends_at_once(
    sent: list[int], exits: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    source, commands, ended = FakeSignals(SIGINT=2, SIGTERM=15), Commands(), []
    with stop_on_signals(commands, system="linux", source=source, exit_now=ended.append):
        for number in sent:
            source.send(number)
    assert ended == exits
    assert commands.stop_requested
    assert "Press Ctrl-C again to end at once" in capfd.readouterr().err


def test_windows_break_means_stop_too() -> None:
    source, commands = FakeSignals(SIGINT=2, SIGTERM=15, SIGBREAK=21), Commands()
    with stop_on_signals(commands, system="win32", source=source, exit_now=lambda _: pytest.fail("must not exit")):
        source.send(21)
    assert commands.stop_reason.startswith("signal ")


def test_outside_the_main_thread_nothing_is_taken_over() -> None:
    source = FakeSignals(SIGINT=2, SIGTERM=15)

    def use() -> None:
        with stop_on_signals(Commands(), source=source):
            pass

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert source.handlers == {}
