"""One run with a fault in it: what was said, when, about what, and how the run ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..assemble import Assembly, assemble
from ..config import TrainConfig
from ..config_io import from_dict
from ..errors import NonFiniteError, TrainerError
from ..events import EventBus
from ..prepare import create_run
from ..runs.database import RunDatabase
from ..runs.folder import RunFolder
from ..runs.protocol import Commands
from .site import Planted, Site

if TYPE_CHECKING:
    from ..trainer import Trainer
    from .faults import Sections

log = logging.getLogger(__name__)

_NAMED_SHARE = 0.8
"""A culprit counts as named right when this share of what is named was broken and of what was broken is named."""

Wire = dict[str, Any]


@dataclass(frozen=True)
class Alarm:
    """Something that was said: a verdict of at least warning severity, a rejected step, or a picture left out."""

    step: int
    kind: str
    modules: frozenset[str]
    files: frozenset[str]
    sentence: str


@dataclass(frozen=True)
class FirstReading:
    """What a step's first forward and backward showed, before anything was done about it. `norms`: gradient norm of
    each tensor that has a gradient."""

    step: int
    loss: float
    grad_norm: float
    norms: dict[str, float]


@dataclass
class DrillRun:
    """How a run with a fault went. `readings`: of every step until the first rollback, for naive rules; `skips`:
    rejected steps; `interventions`: what was done about it."""

    planted: Planted
    onset: int
    alarms: list[Alarm] = field(default_factory=list[Alarm])
    status: str = "finished"
    message: str = ""
    steps: int = 0
    readings: list[FirstReading] = field(default_factory=list[FirstReading])
    skips: list[int] = field(default_factory=list[int])
    interventions: list[str] = field(default_factory=list[str])
    validation: list[float] = field(default_factory=list[float])

    def first(self) -> Alarm | None:
        """The first alarm, with everything that was said of the same kind up to ten steps later."""
        if not self.alarms:
            return None
        begun = self.alarms[0]
        same = [one for one in self.alarms if one.kind == begun.kind and 0 <= one.step - begun.step <= 10]
        modules = frozenset(name for one in same for name in one.modules)
        files = frozenset(name for one in same for name in one.files)
        return replace(begun, modules=modules, files=files)

    def named_right(self) -> bool | None:
        """Whether the first alarm names what was broken; None when nothing was planted by name."""
        alarm = self.first()
        if alarm is None:
            return None
        if self.planted.modules:
            return _matches(alarm.modules, frozenset(self.planted.modules))
        if self.planted.files:
            return bool(alarm.files) and alarm.files <= frozenset(self.planted.files)
        return None


def run_with(
    config: TrainConfig,
    inject: Callable[[Site], Planted],
    *,
    seed: int,
    onset: int,
    audit: bool = False,
    most_steps: int | None = None,
) -> DrillRun:
    """Train `config` with a fault put in before the first step. With `audit` the check before the first step sees it.

    `most_steps`: the run is stopped after that many steps, those before a rollback included.
    Validation losses of beginning and end are taken where the config measures them.
    """
    config = replace(config, health=replace(config.health, audit="off"))
    folder = create_run(config)
    collected = _Collector()
    stored = folder.read_config()
    bus = EventBus(run_id=folder.run_id)
    with folder.lock(), RunDatabase(folder.database_path) as database:
        bus.subscribe(database)
        bus.subscribe(collected)
        assembly = _assemble(folder, stored, bus, database)
        trainer = assembly.trainer
        result = DrillRun(inject(Site(trainer, seed, onset)), onset)
        _note_readings(trainer, result.readings)
        if most_steps is not None:
            _stop_after(trainer, most_steps)
        try:
            if audit and trainer.health is not None:
                trainer.health.config = replace(trainer.health.config, audit="check")
                trainer.health.audit()
            assembly.session.validate(0)
            result.status = trainer.run()
            assembly.session.validate(trainer.state.step)
        except TrainerError as error:
            result.status = "halted" if isinstance(error, NonFiniteError) else "failed"
            result.message = str(error)
        finally:
            assembly.session.checkpoints.close()
            if trainer.health is not None:
                trainer.health.close()
        result.steps = trainer.state.step
        collected.fill(result)
        trainer.parts.network.detach()
    return result


def _note_readings(trainer: Trainer, readings: list[FirstReading]) -> None:
    """Keep the first reading of every step of the first attempt."""
    accumulation: Any = trainer.accumulation
    original = accumulation.measure

    def measure(work: Any) -> Any:
        found = original(work)
        step = trainer.state.step + 1
        if found is not None and trainer.state.attempt == 0 and (not readings or readings[-1].step < step):
            norms = dict(zip(found.names, found.norms, strict=True))
            readings.append(FirstReading(step, found.loss, found.grad_norm, norms))
        return found

    accumulation.measure = measure


def _stop_after(trainer: Trainer, most: int) -> None:
    """Stop the run after `most` steps, however often it goes back."""
    steps: list[int] = []
    replaced: Any = trainer
    original = trainer.train_step

    def train_step() -> bool:
        steps.append(trainer.state.step)
        return len(steps) <= most and original()

    replaced.train_step = train_step


def _assemble(folder: RunFolder, stored: Wire, bus: EventBus, database: RunDatabase) -> Assembly:
    config = from_dict(stored["config"])
    made = assemble(folder, stored, config, bus=bus, commands=Commands(), database=database)
    assert made is not None, "nobody asks a drill to stop while it is put together"
    return made


def with_sections(config: TrainConfig, sections: Sections) -> TrainConfig:
    """`config` with fields changed by section."""
    for name, values in sections.items():
        config = replace(config, **{name: replace(getattr(config, name), **values)})
    return config


def drill_config(model: Path, pictures: Path, output: Path, *, steps: int, seed: int) -> TrainConfig:
    """A run of the micro toy that a fault is put into: attention layers of rank 4, batch 2."""
    config = TrainConfig()
    return with_sections(
        config,
        {
            "model": {"path": str(model)},
            "dataset": {"path": str(pictures), "batch_size": 2, "workers": 0},
            "lora": {"rank": 4, "preset": "attention"},
            "optimizer": {"learning_rate": 1e-3},
            "checkpoint": {"every_minutes": 0.0},
            "validation": {"enabled": False},
            "run": {
                "output_dir": str(output),
                "output_name": "drill",
                "max_train_steps": steps,
                "seed": seed,
                "device": "cpu",
            },
        },
    )


def drill_pictures(folder: Path, count: int = 12) -> Path:
    """Drawn pictures with captions for a drill."""
    from PIL import Image

    from ..toy.shapes import training_picture

    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        picture = training_picture(7, index, (64, 64))
        Image.fromarray(picture.pixels_HWC).save(folder / f"{index:03d}.png")
        (folder / f"{index:03d}.txt").write_text(picture.caption, encoding="utf-8")
    return folder


class _Collector:
    """Gathers from the events of a run what a drill looks at."""

    def __init__(self) -> None:
        self._wires: list[Wire] = []

    def __call__(self, wire: Wire) -> None:
        if wire["type"] in ("StepFinished", "StepRejected", "Verdict", "Intervention", "ValidationFinished"):
            self._wires.append(wire)

    def fill(self, result: DrillRun) -> None:
        for wire in self._wires:
            kind, step, data = wire["type"], int(wire["step"]), wire["data"]
            if kind == "StepRejected":
                result.skips.append(step)
            if kind == "ValidationFinished":
                result.validation.append(data["validation_loss"])
            if kind == "Intervention":
                result.interventions.append(f"step {step}: {data['action']}")
            alarm = _alarm(kind, step, data)
            if alarm is not None:
                result.alarms.append(alarm)


def _alarm(kind: str, step: int, data: Wire) -> Alarm | None:
    if kind == "Verdict" and data["severity"] not in ("info", "ok"):
        return Alarm(step, data["kind"], _modules(data["where"]), frozenset(), data["sentence"])
    if kind == "StepRejected" and data.get("phase") != "CALIBRATE":
        modules = frozenset(name.partition(".")[0] for name in data["culprits"])
        return Alarm(step, "NON-FINITE", modules, frozenset(data["samples"]), data["reason"])
    if kind == "Intervention" and "was left out of this step" in data["action"]:
        file = data["action"].partition(" was left out")[0]
        return Alarm(step, "NON-FINITE", frozenset(), frozenset([file]), data["action"])
    return None


def _modules(where: str) -> frozenset[str]:
    """Adapters in a verdict's place: `lora_unet_..._to_q (input block 4), lora_...to_k.lora_up.weight`."""
    words = (word.strip().partition(" ")[0].partition(".")[0] for word in where.split(","))
    return frozenset(word for word in words if word.startswith("lora_"))


def _matches(found: frozenset[str], planted: frozenset[str]) -> bool:
    both = len(found & planted)
    return bool(both) and both >= _NAMED_SHARE * len(found) and both >= _NAMED_SHARE * len(planted)


def horizon_ok(run: DrillRun, verdicts: Sequence[str], horizon: int) -> bool:
    """Whether the first alarm is one of `verdicts` and came in time, and not before the fault."""
    alarm = run.first()
    return alarm is not None and alarm.kind in verdicts and 0 <= alarm.step - run.onset <= horizon
