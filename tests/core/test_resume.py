"""What a checkpoint must hold: leaving out any one item is noticed; and which settings may differ afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_setup import small_config

from trainer_core.assemble import Assembly, assemble
from trainer_core.build import create_run
from trainer_core.checkpoints.snapshot import SnapshotPool
from trainer_core.checkpoints.state import RunState
from trainer_core.config import TrainConfig
from trainer_core.config_io import from_dict, to_dict
from trainer_core.events import EventBus
from trainer_core.resume import RunIdentity, differences, put_back, refusal, setting_differences
from trainer_core.runs.database import RunDatabase
from trainer_core.runs.protocol import Commands

BEFORE, AFTER = 2, 2
"""Steps. The loss scale grows after the last one, so that its state shows in nothing else."""


class Noticed:
    """Stands for the health engine: a keeper whose state is a function of the steps it saw."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = int(state["seen"])


@dataclass
class Outcome:
    """What a run ends with, compared item by item."""

    weights: dict[str, torch.Tensor]
    ema: dict[str, torch.Tensor]
    losses: list[float]
    scaler: dict[str, Any]
    counters: dict[str, Any]
    health: dict[str, Any]
    validation: list[dict[str, Any]]

    def differing(self, other: Outcome) -> set[str]:
        found = {
            name
            for name in ("losses", "scaler", "counters", "health", "validation")
            if getattr(self, name) != getattr(other, name)
        }
        for name in ("weights", "ema"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if any(not torch.equal(value, theirs[key]) for key, value in mine.items()):
                found.add(name)
        return found


class Laboratory:
    """One assembled run that is put back to any state and trained on from there."""

    def __init__(self, assembly: Assembly) -> None:
        self.trainer, self.session = assembly.trainer, assembly.session
        self.keeper = Noticed()
        self.trainer.keepers["health"] = self.keeper
        self.losses: list[float] = []
        self.trainer.bus.subscribe(self._listen)
        self.fresh = self.capture()

    def _listen(self, wire: dict[str, Any]) -> None:
        if wire["type"] == "StepFinished":
            self.losses.append(wire["data"]["loss"])

    def capture(self) -> RunState:
        return SnapshotPool(0).take(self.session.capture(), self.trainer.state.step)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.trainer.train_step()
            self.keeper.seen += 1
            step = self.trainer.state.step
            self.session.validation_history.append({"step": step, "mean": 1.0 / step, "bands": []})

    def go_on(self, state: RunState) -> Outcome:
        """Put back `state`, train, and tell how it ended."""
        put_back(state, self.session, self.trainer)
        self.losses.clear()
        self.train(AFTER)
        ema = self.trainer.parts.live.ema
        assert ema is not None
        counters = self.trainer.state.to_dict()
        return Outcome(
            weights=self.trainer.parts.network.state_dict(),
            ema={name: value.clone() for name, value in ema.averages.items()},
            losses=list(self.losses),
            scaler=deepcopy(self.trainer.parts.precision.state_dict()),
            counters={name: value for name, value in counters.items() if name != "seconds"},
            health=self.keeper.state_dict(),
            validation=deepcopy(self.session.validation_history),
        )


@contextmanager
def assembled(config: TrainConfig) -> Iterator[Assembly]:
    folder = create_run(config)
    with folder.lock(), RunDatabase(folder.database_path) as database:
        stored = folder.read_config()
        resolved = from_dict(stored["config"])
        assembly = assemble(folder, stored, resolved, bus=EventBus("test"), commands=Commands(), database=database)
        assert assembly is not None
        yield assembly


def without(state: RunState, fresh: RunState, item: str) -> RunState:
    """`state` with one item as it is in a run that has not begun."""
    scalars = deepcopy(state.scalars)
    adapter, optimizer = dict(state.adapter), dict(state.optimizer)
    ema = [name for name in optimizer if name.startswith("ema:")]
    if item == "adapter":
        adapter = dict(fresh.adapter)
    elif item == "optimizer":
        optimizer = {name: optimizer[name] for name in ema}
        scalars["optimizer"] = deepcopy(fresh.scalars["optimizer"])
    elif item == "ema":
        optimizer |= {name: fresh.optimizer[name] for name in ema}
    elif item in ("step", "applied", "attempt"):
        scalars["counters"][item] = 1 if item == "attempt" else fresh.scalars["counters"][item]
    else:
        scalars[item] = deepcopy(fresh.scalars[item])
    return RunState(adapter, optimizer, scalars, state.step)


def test_resume_ablation_every_item_left_out_is_noticed(micro_model: Path, pictures: Path, tmp_path: Path) -> None:
    """Section 21's oracle: nothing left out is bit-equal; each item left out shows where it must."""
    config = small_config(
        micro_model,
        pictures,
        tmp_path,
        dataset={"batch_size": 1},
        lora={"dropout": 0.1, "preset": "attention"},
        optimizer={"learning_rate": 1e-3, "ema_decay": 0.9, "te1_lr": 0.0, "te2_lr": 0.0},
        schedule={"type": "linear", "warmup_steps": 4},
        precision={"compute": "fp16", "initial_loss_scale": 64.0, "loss_scale_growth_interval": 4},
        run={"max_train_steps": 20},
    )
    with assembled(config) as assembly:
        laboratory = Laboratory(assembly)
        laboratory.train(BEFORE)
        state = laboratory.capture()
        assert_the_same_inside_an_evaluation(state, laboratory)
        whole = laboratory.go_on(state)
        assert whole.differing(laboratory.go_on(state)) == set()
        expected = {
            "adapter": "weights", "optimizer": "weights", "step": "losses", "applied": "weights",
            "attempt": "losses", "ema": "ema", "ema_updates": "ema", "scaler": "scaler", "health": "health",
            "validation": "validation",
        }  # fmt: skip
        found: dict[str, set[str]] = {}
        for item, shown in expected.items():
            found[item] = whole.differing(laboratory.go_on(without(state, laboratory.fresh, item)))
            assert shown in found[item], f"{item} left out: only {found[item]} differ"
        # These are seen by nothing but themselves, so a test that compares weights alone would miss them.
        assert [found[item] for item in ("ema", "scaler", "health")] == [{"ema"}, {"scaler"}, {"health"}]


def assert_the_same_inside_an_evaluation(state: RunState, laboratory: Laboratory) -> None:
    """A checkpoint asked for while the parameters hold averaged weights has the trained ones, also afterwards."""
    live = laboratory.trainer.parts.live
    with live.evaluation("export"):
        assert live.swapped
        averaged = laboratory.trainer.parts.network.state_dict()
        looked = laboratory.session.capture()
    assert all(torch.equal(looked.adapter[name], value) for name, value in state.adapter.items())
    assert any(not torch.equal(averaged[name], value) for name, value in state.adapter.items())


def _changed(path: str, value: Any) -> Callable[[TrainConfig], TrainConfig]:
    section, name = path.split(".")
    return lambda config: replace(config, **{section: replace(getattr(config, section), **{name: value})})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optimizer.learning_rate", 5e-5),
        ("run.max_train_steps", 99),
        ("checkpoint.every_steps", 7),
        ("checkpoint.every_minutes", 1.0),
        ("checkpoint.lora_every_steps", 7),
        ("preview.every_steps", 7),
        ("dataset.workers", 4),
        ("memory.micro_batch", 1),
    ],
)
def test_settings_that_may_change_are_logged(path: str, value: Any) -> None:
    before = TrainConfig()
    bound, free = setting_differences(to_dict(before), _changed(path, value)(before))
    assert bound == []
    assert len(free) == 1
    assert free[0].startswith(f"{path}: ")


MAY_CHANGE = {
    "model": {"path", "vae"},
    "dataset": {"path", "prior_path", "workers", "cache_dir", "cache_text", "verify"},
    "optimizer": {
        "learning_rate", "unet_lr", "te1_lr", "te2_lr", "loraplus_ratio", "loraplus_unet_ratio", "loraplus_te_ratio",
        "ema_validation", "ema_preview", "ema_export",
    },
    "precision": {
        "compute", "loss_scale_growth_interval", "min_loss_scale", "max_loss_scale", "max_rejected_steps",
        "gradient_checkpointing",
    },
    "gradient": {"max_norm", "clip"},
    "validation": {"every_steps", "bands"},
    "health": {"prometheus_port", "tensorboard", "export_json"},
    "run": {"output_dir", "output_name", "max_train_steps", "max_train_epochs", "device", "process_timeout"},
}  # fmt: skip
WHOLE_SECTIONS = {"hardware", "schedule", "memory", "safety", "checkpoint", "preview", "metadata"}


def test_every_setting_that_must_not_change_is_named() -> None:
    """All of them changed at once: each stands in the refusal by name, and nothing else does. A new setting belongs to
    the ones that must not change until it is put into a list here and in resume_rules.py."""
    now = TrainConfig()
    before = {
        section: {name: _another(name, value) for name, value in fields.items()}
        for section, fields in to_dict(now).items()
        if isinstance(fields, dict)
    }
    bound, free = setting_differences(before, now)
    expected = {
        f"{section}.{name}"
        for section, fields in before.items()
        for name in fields
        if section not in WHOLE_SECTIONS and name not in MAY_CHANGE.get(section, set())
    }
    assert {line.split(":")[0] for line in bound} == expected | {"trained parts"}
    assert len(free) + len(bound) == sum(len(fields) for fields in before.values()) + 1
    text = str(refusal("step-00000500", bound))
    assert all(f"  - {name}: " in text for name in expected)


def _another(name: str, value: Any) -> Any:
    """Another value; of the same type where trained parts are told from it."""
    if name.endswith("rank"):
        return 3
    return 0.5 if name.endswith(("_lr", "learning_rate")) else f"another {value}"


def test_another_number_of_processes_is_logged_and_another_model_or_data_set_refused() -> None:
    config = TrainConfig()
    scalars = {"config": to_dict(config), "model_fingerprint": "a", "data_digest": "b", "processes": 3}
    bound, free = differences(scalars, RunIdentity(config, "a", "b", 2))
    assert (bound, free) == ([], ["processes: 3 in the checkpoint, 2 now (exact draws, rounding differs)"])
    bound, _ = differences(scalars, RunIdentity(config, "x", "y", 3))
    assert [line.split(":")[0] for line in bound] == ["the base model", "the data set"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("lora.rank", 8),
        ("lora.alpha", 2.0),
        ("lora.dropout", 0.5),
        ("optimizer.type", "lion"),
        ("optimizer.ema_decay", 0.9),
        ("optimizer.weight_decay", 0.5),
        ("dataset.batch_size", 3),
        ("dataset.resolution", (512, 512)),
        ("gradient.accumulation", 3),
        ("objective.min_snr_gamma", 5.0),
        ("run.seed", 5),
        ("validation.split", 0.5),
    ],
)
def test_settings_that_must_not_change_are_named(path: str, value: Any) -> None:
    before = TrainConfig()
    bound, free = setting_differences(to_dict(before), _changed(path, value)(before))
    assert free == []
    assert len(bound) == 1
    assert bound[0].startswith(f"{path}: ")
    assert "in the checkpoint" in bound[0]
