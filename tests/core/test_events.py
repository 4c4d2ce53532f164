"""Events on the wire, and the bus."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import typing

import pytest

from trainer_core.events import (
    EVENT_TYPES,
    WIRE_VERSION,
    Event,
    EventBus,
    StepFinished,
    ValidationFinished,
    Warned,
    to_wire,
)

SAMPLES = {
    "int": 3,
    "float": 1.5,
    "str": "text",
    "bool": True,
    "tuple[str, ...]": ("a", "b"),
    "tuple[float, ...]": (1.0, 2.0),
    "dict[str, float]": {"unet": 1e-4},
    "str | None": None,
    "int | None": 2,
    "float | None": 0.5,
    "tuple[int, ...]": (3, 4),
}


def example(kind: type[Event]) -> Event:
    hints = typing.get_type_hints(kind)
    names = {str: "str", int: "int", float: "float", bool: "bool"}
    values = {f.name: SAMPLES[names.get(hints[f.name], str(hints[f.name]))] for f in dataclasses.fields(kind)}
    return kind(**values)


def test_the_types_of_the_design() -> None:
    design = (
        "RunStarted PhaseChanged StepFinished StepRejected Verdict Intervention ValidationFinished PreviewReady "
        "CheckpointSaved LoraSaved MemoryState Warned Resumed Heartbeat Ack RunFinished"
    )
    assert set(EVENT_TYPES) == set(design.split())


@pytest.mark.parametrize("kind", EVENT_TYPES.values(), ids=EVENT_TYPES.keys())
def test_every_event_is_json_and_frozen(kind: type[Event]) -> None:
    event = example(kind)
    wire = to_wire(event, seq=5, run_id="run", now=12.0)
    again = json.loads(json.dumps(wire, allow_nan=False))
    assert again == wire
    assert (wire["v"], wire["seq"], wire["type"], wire["run_id"], wire["step"], wire["time"]) == (
        WIRE_VERSION,
        5,
        kind.__name__,
        "run",
        3,
        12.0,
    )
    assert set(wire["data"]) == {f.name for f in dataclasses.fields(kind)} - {"step"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.step = 4  # type: ignore[misc]


def test_metric_names_are_fixed() -> None:
    names = {f.name for f in dataclasses.fields(StepFinished)}
    fixed = {"loss", "loss_avg", "grad_norm", "lr", "loss_scale", "rejected_steps", "samples_per_second", "vram_gib"}
    assert fixed <= names
    assert "validation_loss" in {f.name for f in dataclasses.fields(ValidationFinished)}


def test_non_finite_numbers_become_null_and_are_named() -> None:
    event = ValidationFinished(validation_loss=math.nan, bands=(1.0, math.inf), pictures=2, seconds=1.0)
    data = to_wire(event, seq=1, run_id="r")["data"]
    assert data["validation_loss"] is None
    assert data["bands"] == [1.0, None]
    assert data["nonfinite"] == ["validation_loss", "bands.1"]
    json.dumps(data, allow_nan=False)


def test_bus_numbers_events_and_keeps_order() -> None:
    bus = EventBus(run_id="r")
    got: list[tuple[str, int]] = []
    bus.subscribe(lambda wire: got.append(("a", wire["seq"])))
    bus.subscribe(lambda wire: got.append(("b", wire["seq"])))
    bus.emit(Warned(topic="t", message="one"))
    wire = bus.emit(Warned(topic="t", message="two"))
    assert got == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert (wire["seq"], wire["run_id"]) == (2, "r")


def test_a_failing_subscriber_is_logged_once_and_detached(caplog: pytest.LogCaptureFixture) -> None:
    bus = EventBus(run_id="r")
    got: list[int] = []
    calls: list[int] = []

    def bad(wire: dict[str, object]) -> None:
        calls.append(1)
        raise RuntimeError("broken display")

    bus.subscribe(bad)
    bus.subscribe(lambda wire: got.append(wire["seq"]))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            bus.emit(Warned(topic="t", message="m"))
    assert got == [1, 2, 3]
    assert len(calls) == 1
    assert caplog.text.count("RuntimeError: broken display") == 1
    assert "subscriber failed on Warned" in caplog.text
