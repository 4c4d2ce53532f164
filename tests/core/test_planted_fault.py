"""A fault on purpose in an ordinary run: labelled everywhere, put in at its step, and for the toy only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from run_setup import small_config

from trainer_core.config_io import from_dict
from trainer_core.planted_fault import plant
from trainer_core.prepare import create_run


def test_a_drill_is_labelled_and_its_fault_sets_in(pictures: Path, tmp_path: Path) -> None:
    config = small_config(Path("toy"), pictures, tmp_path, run={"drill": "lr-stuck-zero", "max_train_steps": 60})
    stored = create_run(config).read_config()
    (note,) = stored["notes"]
    assert note.startswith("DRILL, a fault on purpose: the learning rate stays at 0, from step 24. FROZEN should be")
    assert note.endswith("The LoRA of this run is of no use.")
    assert stored["config"]["metadata"]["comment"].startswith("DRILL: lr-stuck-zero was put into this run on purpose")
    assert stored["config"]["optimizer"]["te1_lr"] == 0.0, "what the fault needs"

    state, told, rates = SimpleNamespace(step=0), [], []
    group = {"base_lr": 1e-3}

    def train_step() -> bool:
        state.step += 1
        rates.append(group["base_lr"])
        return True

    trainer: Any = SimpleNamespace(
        config=from_dict(stored["config"]),
        state=state,
        bus=SimpleNamespace(emit=told.append),
        parts=SimpleNamespace(optimizer=SimpleNamespace(param_groups=[group])),
        train_step=train_step,
    )
    plant(trainer)
    while state.step < 30:
        trainer.train_step()
    assert rates == [1e-3] * 23 + [0.0] * 7
    assert [event.message for event in told] == [note]


def test_a_run_that_ends_before_says_so(pictures: Path, tmp_path: Path) -> None:
    config = small_config(Path("toy"), pictures, tmp_path, run={"drill": "F10", "max_train_steps": 40})
    (note,) = create_run(replace(config)).read_config()["notes"]
    assert "The run ends before that, at step 40." in note
