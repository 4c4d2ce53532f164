"""Progress in a terminal and in a log file."""

from __future__ import annotations

import io
from typing import Any

import pytest

from trainer_core.console import ConsoleProgress, clock, make_safe, size
from trainer_core.events import (
    CheckpointSaved,
    Event,
    LoraSaved,
    PhaseChanged,
    RunFinished,
    RunStarted,
    StepFinished,
    StepRejected,
    Warned,
    to_wire,
)


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def console(*, live: bool) -> tuple[ConsoleProgress, io.StringIO, Clock]:
    stream, now = io.StringIO(), Clock()
    return ConsoleProgress(stream, live=live, now=now), stream, now


def send(progress: ConsoleProgress, event: Event) -> None:
    progress(to_wire(event, seq=1, run_id="r", now=0.0))


def finished(step: int, **changes: Any) -> StepFinished:
    values: dict[str, Any] = {
        "applied": step,
        "epoch": 0,
        "loss": 0.5,
        "loss_avg": 0.25,
        "grad_norm": 1.0,
        "lr": {"unet": 1e-4, "te1": 0.0},
        "loss_scale": 1.0,
        "rejected_steps": 0,
        "samples_per_second": 2.0,
        "seconds": 1.25,
        "eta_seconds": 3725.0,
        "vram_gib": 9.81,
    }
    return StepFinished(step=step, **{**values, **changes})


STARTED = RunStarted(total_steps=100, parts=("unet",), device="cpu", precision="fp32", pictures=7)


def test_one_line_is_rewritten_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # the line would be 89 wide
    progress, stream, now = console(live=True)
    send(progress, STARTED)
    for step in range(1, 21):
        now.time += 1
        send(progress, finished(step))
    text = stream.getvalue()
    assert text.count("\n") == 1  # the first line only
    assert text.count("\r") == 20
    last = text.rsplit("\r", 1)[1]
    assert last == "step 20/100 20%  loss 0.5000 (avg 0.2500)  1.25 s/step  ETA 1:02:05  9.8 GiB  l"
    assert len(last) == 79  # a line as wide as the terminal would wrap
    assert "unet on 7 pictures for 100 steps (cpu, fp32)" in text


def test_saved_files_and_warnings_stand_on_their_own_line() -> None:
    progress, stream, _ = console(live=True)
    send(progress, finished(1))
    send(progress, Warned(step=1, topic="t", message="look here"))
    send(progress, LoraSaved(step=1, file="a.safetensors", bytes=1_500_000, proof="read back equal", final=True))
    send(progress, CheckpointSaved(step=1, name="step-00000001", bytes=2000, seconds=0.5))
    shown = [line.rsplit("\r", 1)[-1] for line in stream.getvalue().split("\n")]
    assert shown == [
        "warning: look here",
        "step 1: LoRA a.safetensors (1.5 MB); read back equal",
        "step 1: checkpoint step-00000001 (2.0 kB, 0.50 s)",
        "",
    ]


def test_plain_lines_are_throttled_and_never_lose_the_end() -> None:
    progress, stream, now = console(live=False)
    send(progress, STARTED)
    for step in range(1, 101):
        now.time += 1
        send(progress, finished(step))
    lines = stream.getvalue().splitlines()
    assert "\r" not in stream.getvalue()
    assert 6 <= len(lines) <= 10
    assert lines[1].startswith("step 1/100")
    assert lines[-1].startswith("step 100/100 100%")


def test_rejected_steps_are_never_throttled() -> None:
    progress, stream, _ = console(live=False)
    for step in range(5):
        event = StepRejected(
            step=step,
            applied=0,
            epoch=0,
            reason="NaN loss",
            loss=float("nan"),
            grad_norm=0.0,
            loss_scale=1.0,
            rejected_steps=step + 1,
            in_a_row=step + 1,
        )
        send(progress, event)
    assert stream.getvalue().count("rejected: NaN loss") == 5


def test_phases_show_their_progress() -> None:
    progress, stream, now = console(live=False)
    for done in range(0, 101):
        now.time += 0.01
        send(progress, PhaseChanged(phase="caching", done=done, total=100, detail="latents"))
    lines = stream.getvalue().splitlines()
    assert lines == ["caching 0/100: latents", "caching 100/100: latents"]


def test_a_number_that_is_not_finite_is_said() -> None:
    progress, stream, _ = console(live=False)
    send(progress, finished(1, loss=float("nan")))
    assert "loss not finite (avg 0.2500)" in stream.getvalue()


def test_the_end() -> None:
    progress, stream, _ = console(live=True)
    send(progress, finished(3))
    send(progress, RunFinished(status="stopped", message="Stopped by Ctrl-C.", applied=3, rejected=1, seconds=61.0))
    assert "stopped: Stopped by Ctrl-C. [3 applied steps, 1 rejected, 1:01]\n" in stream.getvalue()


def test_events_nobody_prints_are_ignored() -> None:
    progress, stream, _ = console(live=False)
    progress({"type": "SomethingNew", "step": 1, "data": {}})
    assert stream.getvalue() == ""


def test_terminals_without_unicode_do_not_fail() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    make_safe(stream)
    ConsoleProgress(stream, live=False).line("caf\u00e9 \u732b")
    assert raw.getvalue() == b"caf\\xe9 \\u732b\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "0:05"), (65, "1:05"), (3725, "1:02:05"), (None, "?"), (-1, "?"), (59.7, "1:00")]
)
def test_clock(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (3e12, "3.0 TB")])
def test_size(count: float, text: str) -> None:
    assert size(count) == text
