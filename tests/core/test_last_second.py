"""The end of a run: what was there stays until something proven takes its place, and what is missing is told."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_setup import Recorder, small_config

from trainer_core import export
from trainer_core.build import create_run, resume_run, run, start_run
from trainer_core.cli import _log_to
from trainer_core.config import TrainConfig
from trainer_core.config_io import with_settings
from trainer_core.errors import AdapterError, ConfigError, ResourceError
from trainer_core.runs.folder import RunFolder
from trainer_core.runs.record import open_readonly


@pytest.fixture(scope="module")
def config_of(micro_model: Path, pictures: Path) -> Callable[..., TrainConfig]:
    def make(output: Path, **sections: dict[str, Any]) -> TrainConfig:
        plain: dict[str, dict[str, Any]] = {
            "optimizer": {"te1_lr": 0.0, "te2_lr": 0.0},
            "run": {"max_train_steps": 2},
        }
        return small_config(micro_model, pictures, output, **{**plain, **sections})

    return make


@pytest.fixture(scope="module")
def finished(config_of: Callable[..., TrainConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with one finished run of two steps; tests copy it."""
    output = tmp_path_factory.mktemp("finished") / "out"
    assert start_run(config_of(output)).status == "finished"
    return output


def the_run(output: Path) -> Path:
    (config,) = (output / "safe_scaler").glob("*/config.json")
    return config.parent


def moved(finished: Path, output: Path) -> Path:
    """The finished run as if it had been made in `output`."""
    shutil.copytree(finished, output)
    folder = RunFolder(the_run(output))
    folder.write_config(
        {**folder.read_config(), "final_lora": str(output / "test.safetensors"), "home": str(folder.path.resolve())}
    )
    return folder.path


def longer(config: TrainConfig) -> TrainConfig:
    return with_settings(config, {"run.max_train_steps": 3})


def test_the_result_that_cannot_be_written_fails_the_run(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not finished, exit code 0 and no file. The earlier file stays, and going on writes the new one."""
    run_dir = moved(finished, tmp_path / "out")
    lora = tmp_path / "out" / "test.safetensors"
    before = lora.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export, "export_lora", full)
        result = resume_run(run_dir, longer)
    assert result.status == "failed"
    assert result.exit_code == 1
    assert "test.safetensors could not be written: [Errno 28] No space left" in result.message
    assert "The checkpoint step-00000003 holds the result: make room there" in result.message
    assert lora.read_bytes() == before, "the file of step 2 is still there"
    recorder = Recorder()
    again = run(run_dir, sink=recorder)
    assert (again.status, again.step) == ("finished", 3)
    assert again.message.startswith("Nothing was left to train: all 3 steps were done.")
    assert not recorder.of("StepFinished"), "nothing is trained again"
    assert again.lora == lora
    assert lora.read_bytes() != before
    assert [path.name for path in lora.parent.iterdir() if ".new" in path.name] == []
    assert "Proven 'test.safetensors'" in recorder.of("LoraSaved")[0]["proof"]


def test_a_file_that_fails_its_proof_takes_nothing_away(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = moved(finished, tmp_path / "out")
    lora = tmp_path / "out" / "test.safetensors"
    before = lora.read_bytes()

    def wrong(*_: Any, **__: Any) -> None:
        raise AdapterError("the file does not hold what was trained")

    monkeypatch.setattr("trainer_core.networks.export.prove_lora_file", wrong)
    assert resume_run(run_dir, longer).status == "failed"
    assert lora.read_bytes() == before


def test_a_stop_that_can_save_nothing_is_a_failure(
    config_of: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer_core.checkpoints.store import CheckpointStore
    from trainer_core.runs.protocol import Commands

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CheckpointStore, "save", full)
    commands = Commands()
    result = start_run(config_of(tmp_path), commands=commands, sink=Recorder(commands, stop_after=1))
    assert (result.status, result.exit_code) == ("failed", 1)
    assert "The checkpoint of step 1 could not be written" in result.message
    assert "there is no older one" in result.message


def test_a_copy_of_a_run_leaves_the_file_of_its_original(finished: Path, tmp_path: Path) -> None:
    """Copied beside the original, and copied with everything around it while the original is still there."""
    original = moved(finished, tmp_path / "out")
    lora = tmp_path / "out" / "test.safetensors"
    before = lora.read_bytes()
    beside = tmp_path / "out" / "safe_scaler" / "copy"
    shutil.copytree(original, beside)
    result = resume_run(beside, longer)
    assert result.status == "finished"
    assert lora.read_bytes() == before
    assert result.lora == tmp_path / "out" / "test-2.safetensors"
    shutil.copytree(tmp_path / "out", tmp_path / "elsewhere")
    result = resume_run(tmp_path / "elsewhere" / "safe_scaler" / original.name, longer)
    assert lora.read_bytes() == before
    assert result.lora is not None
    assert result.lora.parent == tmp_path / "elsewhere"


def test_a_run_whose_old_place_is_gone_writes_where_it_is(finished: Path, tmp_path: Path) -> None:
    """Moved to another machine: the old folder is neither there nor made."""
    moved(finished, tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    (tmp_path / "new" / "test.safetensors").unlink()
    result = resume_run(the_run(tmp_path / "new"), longer)
    assert result.lora == tmp_path / "new" / "test.safetensors"
    assert not (tmp_path / "old").exists()
    again = run(result.run_dir)
    assert again.lora == result.lora, "the place is decided once"


def test_a_name_with_a_foreign_copy_beside_it_is_taken(
    config_of: Callable[..., TrainConfig], tmp_path: Path, finished: Path
) -> None:
    """The second format's file or folder has a name of its own, which is never overwritten either."""
    (tmp_path / "test.peft").mkdir()
    (tmp_path / "test.peft" / "precious.txt").write_text("x", encoding="utf-8")
    (tmp_path / "test-2.safetensors").symlink_to(tmp_path / "nowhere")
    result = start_run(config_of(tmp_path, checkpoint={"save_format": "peft"}))
    assert result.status == "finished"
    assert result.lora == tmp_path / "test-3.safetensors"
    assert (tmp_path / "test-3.peft").is_dir()
    assert (tmp_path / "test.peft" / "precious.txt").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config": None}, "'config' should be a table"),
        ({"config": [1]}, "'config' should be a table"),
        ({"final_lora": None}, "'final_lora' should be a path"),
        ({"final_lora": 5}, "'final_lora' should be a path"),
        ({"final_lora": "/tmp/\0x"}, "'final_lora' should be a path"),
        ({"lora.rank": "many"}, "lora.rank = 'many'"),
    ],
)
def test_a_damaged_config(
    config_of: Callable[..., TrainConfig], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    """Between the start of a run and its worker, or before a resume: the rules hold for the stored file too."""
    folder = create_run(config_of(tmp_path))
    stored = json.loads(folder.config_path.read_text(encoding="utf-8"))
    for name, value in change.items():
        section, _, field = name.partition(".")
        (stored["config"][section] if field else stored)[field or section] = value
    folder.config_path.write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        run(folder.path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dataset.batch_size": 0}, "dataset.batch_size = 0"),
        ({"run.max_train_steps": None}, "neither run.max_train_steps nor run.max_train_epochs"),
        ({"lora.rank": -1, "optimizer.learning_rate": -1.0}, "2 problems"),
        ({"run.seed": None}, "run.seed"),
    ],
)
def test_a_config_edited_by_hand(
    config_of: Callable[..., TrainConfig], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    """Between the start of a run and its worker, or before a resume: the rules hold for the stored file too."""
    folder = create_run(config_of(tmp_path))
    stored = json.loads(folder.config_path.read_text(encoding="utf-8"))
    for name, value in change.items():
        section, _, field = name.partition(".")
        stored["config"][section][field] = value
    folder.config_path.write_text(json.dumps(stored), encoding="utf-8")
    recorder = Recorder()
    result = run(folder.path, sink=recorder)
    assert result.status == "failed"
    assert said in result.message
    assert [data["message"] for data in recorder.of("RunFinished")] == [result.message]


def damage(checkpoint: Path, file: str) -> None:
    """One flipped bit in the middle: the size stays."""
    path = checkpoint / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_run_whose_checkpoints_are_all_damaged_never_begins_anew(finished: Path, tmp_path: Path) -> None:
    """The first try sets them aside; the second, by hand or by a supervisor, meets a folder without checkpoints."""
    run_dir = moved(finished, tmp_path / "out")
    with open_readonly(run_dir / "run.db") as record:
        steps = record.steps()
    damage(run_dir / "checkpoints" / "step-00000002", "adapter.safetensors")
    for _ in range(2):
        result = run(run_dir)
        assert (result.status, result.step) == ("failed", 0)
        assert "this one is not started again from step 0 unasked" in result.message
    with open_readonly(run_dir / "run.db") as record:
        assert record.steps() == steps, "the record of what was trained is still there"


def test_changed_settings_and_a_damaged_state(finished: Path, tmp_path: Path) -> None:
    run_dir = moved(finished, tmp_path / "out")
    damage(run_dir / "checkpoints" / "step-00000002", "state.json")
    result = resume_run(run_dir, longer)
    assert result.status == "failed"
    assert "state.json does not match its SHA-256" in result.message


def test_settings_of_a_run_that_is_trained_now_stay(finished: Path, tmp_path: Path) -> None:
    folder = RunFolder(moved(finished, tmp_path / "out"))
    before = folder.config_path.read_bytes()
    with folder.lock(), pytest.raises(ResourceError, match="is being written by another process"):
        resume_run(folder.path, longer)
    assert folder.config_path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "gone or empty"), (b"", "gone or empty"), (b"hello" * 999, "set aside as run.db.damaged")],
)
def test_a_record_that_is_lost_is_told(finished: Path, tmp_path: Path, content: bytes | None, said: str) -> None:
    """The run goes on from its checkpoint; that its curves begin there is no secret."""
    run_dir = moved(finished, tmp_path / "out")
    (run_dir / "run.db").unlink()
    if content is not None:
        (run_dir / "run.db").write_bytes(content)
    recorder = Recorder()
    assert resume_run(run_dir, longer, sink=recorder).status == "finished"
    (message,) = [data["message"] for data in recorder.of("Warned") if data["topic"] == "record"]
    assert said in message
    assert "nothing from before step-00000002" in message
    again = Recorder()
    run(run_dir, sink=again)
    assert not [data for data in again.of("Warned") if data["topic"] == "record"], "told once"


@pytest.mark.skipif(sys.platform == "win32", reason="a file that is open is not deleted there")
@pytest.mark.parametrize(
    ("take_away", "said"),
    [
        (lambda run_dir: (run_dir / "run.db").unlink(), "The run record"),
        (lambda run_dir: shutil.copy(run_dir / "config.json", run_dir / "x").replace(run_dir / "run.db"), "run record"),
        (shutil.rmtree, "The run folder"),
        (lambda run_dir: run_dir.rename(run_dir.parent / "elsewhere"), "The run folder"),
    ],
)
def test_a_record_that_is_taken_away_during_the_run_is_told(
    finished: Path, tmp_path: Path, take_away: Callable[[Path], Any], said: str
) -> None:
    """The operating system lets a deleted file be written on; the run would end as if all were well."""
    run_dir = moved(finished, tmp_path / "out")
    recorder = Recorder()

    def both(wire: dict[str, Any]) -> None:
        recorder(wire)
        if wire["type"] == "RunStarted":
            take_away(run_dir)

    result = resume_run(run_dir, longer, sink=both)
    assert (result.status, result.report) == ("finished", None)
    assert result.lora is not None
    assert result.lora.exists()
    (warned,) = [data["message"] for data in recorder.of("Warned") if data["topic"] == "record"]
    assert said in warned
    assert "deleted, moved or replaced while the run was going on" in warned
    (ended,) = recorder.of("RunFinished")
    assert ended["message"] == result.message
    assert result.message.startswith("Trained unet for 3 steps (3 applied). ")
    assert warned.removesuffix(" Training goes on.") in result.message


def test_no_room_for_the_flight_recorder(
    config_of: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is mapped memory: told before the first step, where a full disk in the middle would kill the process."""

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("trainer_core.build.fill_holes", full)
        result = start_run(config_of(tmp_path))
    assert (result.status, result.step) == ("failed", 0)
    assert "health.ring" in result.message
    assert "No space left on device. Free some space, or set health.ring_steps" in result.message
    assert run(result.run_dir).status == "finished"
    ring = result.run_dir / "health.ring"
    if sys.platform != "win32":
        assert ring.stat().st_blocks * 512 >= ring.stat().st_size, "every page has its place on the disk"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_that_appears_under_the_name_of_the_result(
    config_of: Callable[..., TrainConfig], tmp_path: Path, kind: str
) -> None:
    """Someone saves something of that name while the run trains: it stays, and the run says where its file is."""
    lora = tmp_path / "test.safetensors"

    def intrude(wire: dict[str, Any]) -> None:
        if wire["type"] == "StepFinished" and wire["step"] == 1:
            lora.mkdir() if kind == "folder" else lora.write_text("mine", encoding="utf-8")

    recorder = Recorder()

    def both(wire: dict[str, Any]) -> None:
        intrude(wire)
        recorder(wire)

    result = start_run(config_of(tmp_path), sink=both)
    assert result.status == "finished"
    assert result.lora == tmp_path / "test-2.safetensors"
    assert lora.is_dir() if kind == "folder" else lora.read_text(encoding="utf-8") == "mine"
    assert any("stays; the LoRA is test-2.safetensors" in data["message"] for data in recorder.of("Warned"))
    assert run(result.run_dir).lora == result.lora, "its own file is written again"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_log_on_a_full_disk_ends_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither while it is written nor when it is closed, and without a traceback for each line."""
    (tmp_path / "run.log").symlink_to("/dev/full")
    with _log_to(tmp_path):
        for _ in range(3):
            logging.getLogger("trainer_core.test").warning("a line")
    assert "Traceback" not in capfd.readouterr().err


def test_a_step_larger_than_an_epoch_is_told(config_of: Callable[..., TrainConfig], tmp_path: Path) -> None:
    """It ends with the epoch, so the effective batch is not what was asked for."""
    recorder = Recorder()
    config = config_of(tmp_path, gradient={"accumulation": 64}, run={"max_train_steps": 1})
    assert start_run(config, sink=recorder).status == "finished"
    told = [data["message"] for data in recorder.of("Warned") if data["topic"] == "data"]
    assert sum("gradient.accumulation = 64, but an epoch has only 4 micro-batches" in text for text in told) == 1
