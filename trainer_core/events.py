"""What a run says about itself: event types, their JSON form, and the bus that carries them.

Events are frozen dataclasses with JSON-safe fields only. On the wire (design section 2) an event is
`{v, seq, type, run_id, step, time, data}`, one UTF-8 line, without NaN: a non-finite number becomes null and its name
is listed under `nonfinite`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, cast

WIRE_VERSION = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events. `step` is the absolute step (0 before the first)."""

    step: int = 0


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    total_steps: int
    parts: tuple[str, ...]
    device: str
    precision: str
    pictures: int
    resumed_from: str | None = None
    config_hash: str = ""


@dataclass(frozen=True, kw_only=True)
class PhaseChanged(Event):
    """`phase`: loading, scanning, caching, training, validating, previewing, saving, finishing."""

    phase: str
    done: int = 0
    total: int = 0
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class StepFinished(Event):
    """An applied step. `grad_norm` is the unscaled norm before clipping, `clip_factor` what it was multiplied by;
    memory in GiB; times in seconds. `left_out`: pictures (or tensors) that were left out of it. `phase` is the safe
    scaler's; `rejected_share` that of the last 100 steps; `clamp_rate` the share of adapter outputs that `lora.clamp`
    cut since the step before, None when it is off."""

    applied: int
    epoch: int
    loss: float
    loss_avg: float
    grad_norm: float
    lr: dict[str, float]
    loss_scale: float
    rejected_steps: int
    samples_per_second: float
    seconds: float
    eta_seconds: float
    vram_gib: float
    clipped: bool = False
    clip_factor: float = 1.0
    left_out: tuple[str, ...] = ()
    phase: str = ""
    rejected_share: float = 0.0
    clamp_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class StepRejected(Event):
    """A step whose update was discarded. `culprits` are parameter names; `samples` picture files; `kind` the class of
    the step, `where` the layer and block hit first, `micro_batch` its number (from 1), `timesteps` those of the
    samples."""

    applied: int
    epoch: int
    reason: str
    loss: float
    grad_norm: float
    loss_scale: float
    rejected_steps: int
    in_a_row: int
    culprits: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    kind: str = ""
    where: str = ""
    micro_batch: int | None = None
    timesteps: tuple[int, ...] = ()
    phase: str = ""
    rejected_share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Verdict(Event):
    kind: str
    where: str = ""
    sentence: str = ""
    severity: str = "info"


@dataclass(frozen=True, kw_only=True)
class Intervention(Event):
    """Something the trainer did by itself. `attempt` is set by a rollback: the rows that follow belong to it."""

    action: str
    reason: str = ""
    attempt: int | None = None


@dataclass(frozen=True, kw_only=True)
class ValidationFinished(Event):
    """`bands`: mean loss of each fixed noise band, low noise first."""

    validation_loss: float
    bands: tuple[float, ...]
    pictures: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PreviewReady(Event):
    file: str
    prompt: str
    index: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    name: str
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LoraSaved(Event):
    """`proof`: what was checked after writing, in words; `final`: the run's result."""

    file: str
    bytes: int
    proof: str
    final: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryState(Event):
    """Bytes on the device. `evictable_tensors`: activations of 1 MiB and more of a micro-batch, `evictable_bytes`
    theirs."""

    peak_allocated: int
    current_reserved: int
    evictable_tensors: int = 0
    evictable_bytes: int = 0
    capacity: int = 0
    detail: str = ""


NOTE_TOPICS = frozenset({"settings", "model", "network", "validation"})
"""Topics of `Warned` that tell what was chosen, not that something is wrong."""


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Something the user should know that does not stop the run. `topic` groups repeats."""

    topic: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    checkpoint: str
    attempt: int
    differences: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Event):
    pass


@dataclass(frozen=True, kw_only=True)
class Ack(Event):
    """Answer to command `id`."""

    id: str
    cmd: str
    ok: bool
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    """`status`: finished, stopped or failed. `lora`: path of the file that this attempt wrote. `checkpoint`: name of
    the one to go on from, whoever wrote it."""

    status: str
    message: str
    applied: int
    rejected: int
    lora: str | None = None
    checkpoint: str | None = None
    seconds: float = 0.0


EVENT_TYPES: dict[str, type[Event]] = {cls.__name__: cls for cls in Event.__subclasses__()}


def json_safe(value: Any, name: str, nonfinite: list[str]) -> Any:
    """`value` with tuples as lists and non-finite floats as None; their names are appended to `nonfinite`."""
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(name)
        return None
    if isinstance(value, str):
        # File names may hold bytes that are no text (lone surrogates); neither SQLite nor a UTF-8 pipe takes those.
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        table = cast("dict[object, Any]", value)
        return {str(key): json_safe(item, f"{name}.{key}", nonfinite) for key, item in table.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item, f"{name}.{i}", nonfinite) for i, item in enumerate(cast("list[Any]", value))]
    return value


def to_wire(event: Event, *, seq: int, run_id: str, now: float | None = None) -> dict[str, Any]:
    """The JSON object of `event`; `now` is Unix time in seconds."""
    nonfinite: list[str] = []
    data = {f.name: json_safe(getattr(event, f.name), f.name, nonfinite) for f in fields(event) if f.name != "step"}
    if nonfinite:
        data["nonfinite"] = nonfinite
    return {
        "v": WIRE_VERSION,
        "seq": seq,
        "type": type(event).__name__,
        "run_id": run_id,
        "step": event.step,
        "time": time.time() if now is None else now,
        "data": data,
    }


Subscriber = Callable[[dict[str, Any]], None]


@dataclass
class EventBus:
    """Carries events to subscribers, synchronously. A subscriber that raises is logged once and detached."""

    run_id: str
    seq: int = 0
    _subscribers: list[Subscriber] = field(default_factory=list[Subscriber])

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.append(subscriber)

    def emit(self, event: Event) -> dict[str, Any]:
        """Number the event, hand it to every subscriber, and return its wire form. Never raises."""
        self.seq += 1
        wire = to_wire(event, seq=self.seq, run_id=self.run_id)
        for subscriber in tuple(self._subscribers):
            try:
                subscriber(wire)
            except Exception:
                log.exception("an event subscriber failed on %s and is detached", wire["type"])
                self._subscribers.remove(subscriber)
        return wire
