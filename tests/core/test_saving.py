"""When a run saves, what it says about it, and that a failing disk does not stop the training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_setup import Recorder

from trainer_core.build import create_run, resume_run, run, start_run
from trainer_core.checkpoints.snapshot import SnapshotPool
from trainer_core.checkpoints.state import RunState
from trainer_core.checkpoints.store import CheckpointStore
from trainer_core.config import CheckpointConfig, TrainConfig
from trainer_core.errors import ResourceError
from trainer_core.events import EventBus
from trainer_core.networks.file_check import body_hash
from trainer_core.runs.folder import RunFolder
from trainer_core.runs.registry import newest_with_hash
from trainer_core.saving import RunCheckpoints

from .checkpoints.faulty_io import FailingWrites


class Keeping:
    """A run's checkpoints over a state that holds its step, with a clock that is moved by hand."""

    def __init__(self, folder: Path, io: Any = None, **config: Any) -> None:
        self.step = 0
        self.now = 0.0
        self.best: int | None = None
        self.recorder = Recorder()
        bus = EventBus("test")
        bus.subscribe(self.recorder)
        self.store = CheckpointStore(folder, io=io)
        self.checkpoints = RunCheckpoints(
            self.store,
            self._state,
            CheckpointConfig(**config),
            bus,
            best_step=lambda: self.best,
            clock=lambda: self.now,
        )

    def _state(self) -> RunState:
        value = torch.full((4,), float(self.step))
        return RunState({"a": value}, {"m": value}, {"step": self.step})

    def save(self, step: int) -> None:
        """One save in the background, finished."""
        self.step = step
        self.checkpoints.submit(step)
        self.checkpoints.close()

    def warnings(self) -> list[str]:
        return [data["message"] for data in self.recorder.of("Warned")]

    def steps(self) -> list[int]:
        return [saved.step for saved in self.store.list()]


def test_cadence_by_steps_and_by_minutes(tmp_path: Path) -> None:
    kept = Keeping(tmp_path, every_steps=50, every_minutes=5.0)
    assert [step for step in (1, 49, 50, 75, 100) if kept.checkpoints.due(step)] == [50, 100]
    kept.now = 299.0
    assert not kept.checkpoints.due(51)
    kept.now = 300.0
    assert kept.checkpoints.due(51)
    kept.save(51)
    assert not kept.checkpoints.due(52)
    kept.now = 600.0
    assert kept.checkpoints.due(52)
    assert not Keeping(tmp_path, every_steps=0, every_minutes=0.0).checkpoints.due(100)


def test_a_save_is_told_when_it_lies_on_the_disk(tmp_path: Path) -> None:
    kept = Keeping(tmp_path)
    kept.step = 7
    kept.checkpoints.submit(7)
    kept.step = 8
    kept.checkpoints.close()
    (told,) = kept.recorder.of("CheckpointSaved")
    assert (told["step"], told["name"]) == (7, "step-00000007")
    assert kept.store.load().scalars == {"step": 7}
    assert [data["phase"] for data in kept.recorder.of("PhaseChanged")] == ["saving"]


def test_the_first_saves_memory_is_made_ready_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RunState] = []
    prepare = SnapshotPool.prepare

    def noted(self: SnapshotPool, like: RunState) -> None:
        made.append(like)
        prepare(self, like)

    monkeypatch.setattr(SnapshotPool, "prepare", noted)
    kept = Keeping(tmp_path)
    kept.checkpoints.prepare()
    kept.checkpoints.prepare()
    kept.save(5)
    kept.checkpoints.prepare()
    kept.save(6)  # another writer
    assert len(made) == 1
    assert len(kept.checkpoints._pool._free) == 1
    assert kept.steps() == [6, 5]
    Keeping(tmp_path, every_steps=0, every_minutes=0.0).checkpoints.prepare()
    assert len(made) == 1


def test_the_last_save_waits_and_is_not_made_twice(tmp_path: Path) -> None:
    kept = Keeping(tmp_path)
    kept.checkpoints.submit(0)
    kept.step = 3
    kept.checkpoints.submit(3)
    assert kept.checkpoints.save_now(3) == "step-00000003"
    assert kept.checkpoints.save_now(3) == "step-00000003"
    assert [data["step"] for data in kept.recorder.of("CheckpointSaved")].count(3) == 1
    again = Keeping(tmp_path)
    again.checkpoints.went_on_from("step-00000003", 3)
    assert again.checkpoints.save_now(3) == "step-00000003"
    assert kept.steps().count(3) == 1


class Judged(Keeping):
    """Its checkpoints say whether they are good to go back to."""

    good = True

    def _state(self) -> RunState:
        state = super()._state()
        state.scalars["good"] = {"good": self.good}
        return state


def test_the_newest_good_one_is_kept_over_a_resume(tmp_path: Path) -> None:
    kept = Judged(tmp_path, keep_last=1)
    kept.save(1)
    kept.good = False
    kept.save(2)
    again = Judged(tmp_path, keep_last=1)
    again.good = False
    again.store.load()
    again.checkpoints.went_on_from("step-00000002", 2)
    for step in (3, 4, 5):
        again.save(step)
    assert again.checkpoints.good_name == "step-00000001"
    assert 1 in again.steps()


def test_a_full_disk_leaves_the_milestones(tmp_path: Path) -> None:
    """Room for another try is made with those that are not kept for good."""
    io = FailingWrites(1 << 22)
    kept = Keeping(tmp_path, io=io, keep_last=1, milestone_every=2)
    for step in (2, 4, 5):
        kept.save(step)
    io.room = 100
    kept.save(6)
    assert len(kept.warnings()) == 2
    assert kept.steps() == [5, 4, 2]


def test_a_full_disk_is_told_with_bytes_and_tried_again(tmp_path: Path) -> None:
    """C8 and kind save: the training goes on, the older one stays, the message has needed and free bytes."""
    io = FailingWrites(1 << 22)
    kept = Keeping(tmp_path, io=io)
    kept.save(2)
    io.room = 100
    kept.step = 4
    kept.checkpoints.submit(4)
    while not kept.warnings():
        kept.checkpoints.poll()
    assert "step 4" in kept.warnings()[0]
    assert "bytes needed" in kept.warnings()[0]
    assert "bytes free" in kept.warnings()[0]
    assert "tried again in 30 s" in kept.warnings()[0]
    assert kept.steps() == [2]
    io.room = 1 << 22
    kept.checkpoints.close()  # the end of a run tries once more at once
    assert kept.steps() == [4, 2]
    assert kept.recorder.of("CheckpointSaved")[-1]["step"] == 4


def test_best_milestones_and_the_one_in_use_are_kept(tmp_path: Path) -> None:
    kept = Keeping(tmp_path, keep_last=1, milestone_every=4)
    kept.best = 3
    for step in range(1, 8):
        kept.save(step)
    # 7 newest and (each save here has a writer of its own) verified, 4 a milestone, 3 the best
    assert kept.steps() == [7, 4, 3]
    again = Keeping(tmp_path, keep_last=1)
    again.store.load(3)
    again.save(8)
    again.save(9)
    assert again.steps() == [9, 3]


def test_a_run_whose_disk_fails_goes_on_and_ends_the_same(
    config_for: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = start_run(config_for("whole", checkpoint={"every_steps": 1}))
    original = CheckpointStore.save

    def failing(self: CheckpointStore, state: RunState, step: int, **options: Any) -> Any:
        if step == 2:
            raise ResourceError(f"The checkpoint of step {step} does not fit: 10 bytes needed, 1 bytes free.")
        return original(self, state, step, **options)

    monkeypatch.setattr(CheckpointStore, "save", failing)
    recorder = Recorder()
    result = start_run(config_for("failing", checkpoint={"every_steps": 1}), sink=recorder)
    assert result.status == "finished"
    assert body_hash(result.lora) == body_hash(whole.lora)
    assert any("step 2" in data["message"] for data in recorder.of("Warned") if data["topic"] == "checkpoint")
    assert 2 not in [data["step"] for data in recorder.of("CheckpointSaved")]
    assert [data["step"] for data in recorder.of("CheckpointSaved")][-1] == 4


def test_the_best_checkpoint_is_kept_by_a_run(config_for: Callable[..., TrainConfig]) -> None:
    config = config_for(
        checkpoint={"every_steps": 1, "keep_last": 1},
        validation={"enabled": True, "split": 0.3, "every_steps": 2, "bands": 2},
        run={"max_train_steps": 6},
    )
    recorder = Recorder()
    result = start_run(config, sink=recorder)
    images = (".png", ".jpg", ".webp")
    held_out = recorder.of("ValidationFinished")[0]["pictures"]
    there = sum(file.suffix in images for file in Path(config.dataset.path).rglob("*"))
    assert recorder.of("RunStarted")[0]["pictures"] == there - held_out
    measured = {data["step"]: data["validation_loss"] for data in recorder.of("ValidationFinished") if data["step"]}
    best = min(measured, key=lambda step: measured[step])
    saved = CheckpointStore(result.run_dir / "checkpoints").list()
    assert {best, 6} <= {entry.step for entry in saved}


def test_what_was_due_after_the_restored_step_is_made_up_for(config_for: Callable[..., TrainConfig]) -> None:
    """Killed between the checkpoint of a step and its validation: the history has no hole afterwards."""
    sections: dict[str, dict[str, Any]] = {
        "checkpoint": {"every_steps": 2, "lora_every_steps": 2},
        "validation": {"enabled": True, "split": 0.3, "every_steps": 2, "bands": 2},
    }
    whole = start_run(config_for("whole", **sections))
    folder = create_run(config_for("killed", **sections))

    class Killed(BaseException):
        pass

    def kill(wire: dict[str, Any]) -> None:
        if wire["type"] == "PhaseChanged" and wire["data"]["phase"] == "validating" and wire["step"] == 2:
            raise Killed

    with pytest.raises(Killed):
        run(folder.path, sink=kill)
    result = run(folder.path)
    (first, second) = (
        CheckpointStore(path / "checkpoints").load().scalars["validation"] for path in (whole.run_dir, result.run_dir)
    )
    assert [entry["step"] for entry in first] == [0, 2]  # the last checkpoint is written before the last validation
    assert first == second
    assert sorted(path.name for path in (result.run_dir / "lora").glob("*.safetensors")) == [
        "test-step00000002.safetensors",
        "test-step00000004.safetensors",
    ]


def test_the_same_request_again_finds_its_run(config_for: Callable[..., TrainConfig]) -> None:
    """Also where the seed was left open: it is drawn once, and is no part of what was asked for."""
    config = config_for(run={"seed": None})
    first = create_run(config)
    other = create_run(replace(config, lora=replace(config.lora, rank=8)))
    stored = [RunFolder(folder.path).read_config() for folder in (first, other)]
    assert stored[0]["config"]["run"]["seed"] is not None
    again = create_run(config)
    hashes = [*(entry["config_hash"] for entry in stored), again.read_config()["config_hash"]]
    assert hashes[0] == hashes[2] != hashes[1]
    found = newest_with_hash(Path(config.run.output_dir), hashes[1])
    assert found is not None
    assert found.run_id == other.run_id
    assert resume_run(other.path).status == "finished"
