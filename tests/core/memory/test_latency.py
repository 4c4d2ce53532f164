"""The latency guard: steps of made-up times; when it speaks, and of what cause."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_core.config_memory import MemoryConfig
from trainer_core.events import Intervention, MemoryState, Warned
from trainer_core.memory import latency
from trainer_core.memory.guard import MemoryReading
from trainer_core.memory.latency import LatencyGuard, Slow, StepClock, StepTime
from trainer_core.memory.machine import Paging
from trainer_core.memory.run_memory import RunMemory, place_text_encoders

SMALL, LARGE = (((64, 64), 2),), (((128, 128), 2),)
NORMAL = StepTime(0.2, data=0.01)


def told(guard: LatencyGuard, steps: list[tuple[Any, StepTime]], first: int = 0) -> list[tuple[int, Slow]]:
    found = [(first + number, guard.observe(first + number, *step)) for number, step in enumerate(steps)]
    return [(step, slow) for step, slow in found if slow is not None]


def test_twenty_slow_steps_in_a_row_are_told_once() -> None:
    guard = LatencyGuard()
    assert told(guard, [(SMALL, NORMAL)] * 30) == []
    assert told(guard, [(SMALL, StepTime(0.7))] * 19 + [(SMALL, NORMAL)] + [(SMALL, StepTime(0.7))] * 19) == []
    ((step, slow),) = told(guard, [(SMALL, NORMAL)] + [(SMALL, StepTime(0.7))] * 60, first=100)
    assert step == 120
    assert (slow.steps, slow.median) == (20, 0.2)
    assert slow.factor == pytest.approx(3.5)


def test_a_larger_bucket_is_not_a_slow_step() -> None:
    guard = LatencyGuard()
    mixed = [(SMALL, NORMAL), (LARGE, StepTime(1.5))] * 30
    assert told(guard, mixed) == []
    assert told(guard, [(LARGE, StepTime(1.6))] * 40) == []
    assert told(guard, [((((64, 64), 1), ((64, 64), 1)), StepTime(9.0))] * 3) == [], "a shape that is not known yet"


@pytest.mark.parametrize(
    ("slow", "cause"),
    [
        (StepTime(1.2, data=1.0), "data"),
        (StepTime(1.2, data=0.01, writing=True), "checkpoint"),
        (StepTime(1.2, data=0.01, paged=True), "paging"),
        (StepTime(1.2, data=0.01, throttled=True), "throttle"),
        (StepTime(1.2, data=0.01), "compute"),
        (StepTime(1.2, data=0.3), "compute"),
    ],
)
def test_the_cause_is_told(slow: StepTime, cause: str) -> None:
    guard = LatencyGuard()
    ((_, found),) = told(guard, [(SMALL, NORMAL)] * 10 + [(SMALL, slow)] * 20)
    assert found.cause == cause
    assert latency.CAUSES[cause] in found.text
    assert "The last 20 steps took 6.0 times as long" in found.text


def test_the_clock_takes_time_shape_and_loading_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(latency.time, "perf_counter", lambda: now[0])
    clock = StepClock(lambda refs: (64, 96), lambda: True, lambda: False)
    clock.writing = lambda: now[0] > 100.2

    def load(epoch: int, refs: list[int], *, step: int) -> str:
        now[0] += 0.25
        return f"{epoch} {refs} {step}"

    timed = clock.timed(load)
    assert clock.step() is None
    assert timed(3, [7, 8], step=5) == "3 [7, 8] 5"
    now[0] += 1.0
    timed(3, [9], step=5)
    now[0] += 1.0
    shape, took = clock.step() or ((), NORMAL)
    assert shape == (((64, 96), 2), ((64, 96), 1))
    assert (took.seconds, took.data, took.writing, took.paged) == (2.5, 0.5, True, True)
    assert clock.step() is None, "begun anew"


def test_paging_is_seen_in_faults_and_in_a_full_device() -> None:
    faults = iter([0, 10, 500, 510])
    readings = iter([None, None, MemoryReading(10, 10, device_used=99, capacity=100)])
    paging = Paging(lambda: next(readings), lambda: next(faults))
    assert [paging(), paging(), paging()] == [False, True, True]


@pytest.mark.parametrize("split", [True, False])
def test_paging_may_cut_the_micro_batch_and_nothing_else_does(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    model: Any = SimpleNamespace(unet=SimpleNamespace(down_blocks=[], up_blocks=[], mid_block=None, named_modules=list))
    full = MemoryReading(peak_allocated=10, current_reserved=20, device_used=99, capacity=100)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    memory = RunMemory(
        model, optimizer, MemoryConfig(latency_guard=True, latency_split=split, mem_guard_threshold=0.0),
        torch.device("cpu"), events.append, step=lambda: 9, read=lambda: full,
    )  # fmt: skip
    now = [0.0]
    monkeypatch.setattr(latency.time, "perf_counter", lambda: now[0])
    load = memory.watch_latency(lambda refs: (64, 96), lambda epoch, refs: None)
    for number in range(25):
        load(0, [1, 2, 3])
        now[0] += 0.1 if number < 5 else 1.0
        memory.after_step()
    assert [type(event) for event in events] == ([Warned, Intervention, MemoryState] if split else [Warned])
    assert events[0].topic == "latency"
    assert "paging 100%" in events[0].message
    assert memory.ladder.limits == ({(64, 96): 2} if split else {})


@pytest.mark.parametrize(
    ("where", "live", "moved"),
    [("auto", False, True), ("auto", True, False), ("host", True, True), ("device", False, False)],
)
def test_text_encoders_go_to_host_memory(where: str, live: bool, moved: bool) -> None:
    calls: list[str] = []
    encoders = [SimpleNamespace(to=calls.append), SimpleNamespace(to=calls.append)]
    model: Any = SimpleNamespace(text_encoders=encoders)
    place_text_encoders(model, where, live=live)
    assert calls == (["cpu", "cpu"] if moved else [])


def test_captions_are_encoded_where_the_encoders_are_and_given_to_the_unet(micro_model: Path) -> None:
    """The UNet elsewhere (meta): what it needs of a caption comes to its device."""
    from trainer_core.models import encode_captions, load_sdxl

    model = load_sdxl(micro_model, dtype=torch.float32, device=torch.device("cpu"))
    expected = encode_captions(model, ["a red circle"])
    assert expected.context_BTD.device.type == "cpu"
    model.unet.to("meta")  # type: ignore[arg-type]
    embeds = encode_captions(model, ["a red circle"])
    assert (embeds.context_BTD.device.type, embeds.pooled_BD.device.type) == ("meta", "meta")
    assert embeds.context_BTD.shape == expected.context_BTD.shape
