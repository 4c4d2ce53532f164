"""Saving, loading and pruning checkpoints on a healthy disk, and what damage does."""

from __future__ import annotations

import errno
import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer_core.checkpoints import manifest as names
from trainer_core.checkpoints.state import RunState, non_finite
from trainer_core.checkpoints.store import CheckpointStore
from trainer_core.errors import CheckpointError, NonFiniteError


def state(step: int, size: int = 40) -> RunState:
    """A state whose every number tells its step."""
    generator = torch.Generator().manual_seed(step)
    adapter = {
        "unet.a.lora_up.weight": torch.randn(4, size, generator=generator),
        "unet.a.alpha": torch.tensor(float(step)),
    }
    optimizer = {
        "unet.a.lora_up.weight.exp_avg": torch.randn(4, size, generator=generator),
        "unet.a.lora_up.weight.step": torch.tensor(float(step)),
    }
    return RunState(
        adapter, optimizer, {"step": step, "scale": 65536.0, "history": [{"step": step, "mean": 0.25}], "none": None}
    )


def assert_state(loaded: RunState, step: int) -> None:
    wanted = state(step)
    assert loaded.step == step
    for left, right in ((loaded.adapter, wanted.adapter), (loaded.optimizer, wanted.optimizer)):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in right)
    assert loaded.scalars == wanted.scalars


def saved_steps(store: CheckpointStore) -> list[int]:
    return [saved.step for saved in store.list()]


def test_round_trip_is_bit_equal_and_leaves_exactly_the_layout(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", run_id="r1")
    saved = store.save(state(500), 500)
    assert saved.path == tmp_path / "checkpoints" / "step-00000500"
    assert saved.verified
    assert sorted(path.name for path in saved.path.iterdir()) == [
        "adapter.safetensors", "manifest.json", "optimizer.safetensors", "state.json", "verified",
    ]  # fmt: skip
    assert [path.name for path in store.folder.iterdir()] == ["step-00000500"]
    loaded = CheckpointStore(store.folder).load()
    assert_state(loaded, 500)
    assert (loaded.name, loaded.passed_over) == ("step-00000500", ())
    manifest = json.loads((saved.path / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["run_id"], manifest["generation"], manifest["parent"]) == ("r1", 1, None)


def test_loaded_tensors_can_be_trained_in_place(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), 1)
    loaded = store.load()
    loaded.adapter["unet.a.lora_up.weight"].add_(1.0)
    assert_state(store.load(), 1)


def test_load_by_name_and_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (2, 4):
        store.save(state(step), step)
    assert_state(store.load("step-00000002"), 2)
    assert_state(store.load(2), 2)
    assert_state(store.load("4"), 4)
    with pytest.raises(CheckpointError, match=r"no checkpoint 7 in .*There are: step-00000004, step-00000002\."):
        store.load(7)


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint 'latest' .* There are: none"):
        CheckpointStore(tmp_path).load()


def damage_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_zero(path: Path) -> None:
    path.write_bytes(b"")


def damage_tail(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def damage_blank(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [damage_half, damage_zero, damage_tail, damage_blank, Path.unlink])
@pytest.mark.parametrize("file", [names.ADAPTER, names.OPTIMIZER, names.STATE, names.MANIFEST])
def test_damage_is_passed_over_by_latest_and_an_error_by_name(
    tmp_path: Path, damage: Callable[[Path], None], file: str
) -> None:
    """Case B17: cut to half, to zero, JSON without its last bytes; also zeroed blocks and a missing file (C11)."""
    store = CheckpointStore(tmp_path)
    for step in (2, 4, 6):
        store.save(state(step), step)
    damage(tmp_path / "step-00000006" / file)
    with pytest.raises(CheckpointError, match=f"step-00000006 is damaged: .*{file}"):
        store.load("step-00000006")
    loaded = store.load("latest")
    assert_state(loaded, 4)
    assert len(loaded.passed_over) == 1
    assert loaded.passed_over[0].startswith("step-00000006: ")
    assert file in loaded.passed_over[0]
    aside = tmp_path / ".bad-step-00000006"
    assert file in (aside / "reason.txt").read_text(encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"Set aside as damaged: \.bad-step-00000006"):
        store.load("step-00000006")


def test_never_a_silent_start_from_zero(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(2), 2)
    damage_half(tmp_path / "step-00000002" / names.ADAPTER)
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* is good: step-00000002: adapter\.safetensors has"):
        store.load()


def test_reading_can_leave_everything_in_place(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (2, 4):
        store.save(state(step), step)
    damage_tail(tmp_path / "step-00000004" / names.STATE)
    assert store.load("latest", set_aside=False).step == 2
    assert saved_steps(store) == [4, 2]


@pytest.mark.parametrize("flips", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture, flips: int) -> None:
    """C10: random bit flips over all files of a checkpoint, none accepted."""
    store = CheckpointStore(tmp_path)
    store.save(state(2), 2)
    saved = store.save(state(4), 4)
    draw = random.Random(0)
    caplog.set_level(logging.CRITICAL)
    files = [names.ADAPTER, names.OPTIMIZER, names.STATE, names.MANIFEST]
    originals = {file: (saved.path / file).read_bytes() for file in files}
    accepted = []
    for number in range(flips):
        file = files[number % 4]
        data = bytearray(originals[file])
        position = draw.randrange(len(data))
        data[position] ^= 1 << draw.randrange(8)
        (saved.path / file).write_bytes(data)
        if store.load("latest", set_aside=False).step != 2:
            accepted.append((file, position))
        (saved.path / file).write_bytes(originals[file])
    assert accepted == []
    assert_state(store.load(), 4)


@pytest.mark.parametrize("file", [names.ADAPTER, names.OPTIMIZER])
def test_a_torn_pair_is_refused(tmp_path: Path, file: str) -> None:
    """A file of another save, with manifest and digests made to fit by force, still says whose it is."""
    store = CheckpointStore(tmp_path)
    for step in (2, 4):
        store.save(state(step), step)
    shutil.copy(tmp_path / "step-00000002" / file, tmp_path / "step-00000004" / file)
    old, new = (names.read_manifest(tmp_path / f"step-0000000{step}") for step in (2, 4))
    new.files[file] = old.files[file]
    kind = file.split(".")[0]
    forged = {f"{kind}_digest": names.bound_digest(kind, 4, 2, old.files[file].sha256)}
    body = names.Manifest(**{**vars(new), **forged}).encode()
    (tmp_path / "step-00000004" / names.MANIFEST).write_bytes(body)
    with pytest.raises(
        CheckpointError, match=rf"step-00000004 is damaged: {file} says it is .*'2'.*, not {kind} of step 4"
    ):
        store.load(4)


def test_an_extra_file_is_ignored_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(2), 2)
    (tmp_path / "step-00000002" / "notes.txt").write_text("mine", encoding="utf-8")
    assert_state(store.load(), 2)
    assert "belong to no checkpoint and are ignored: notes.txt" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_adapter_is_not_saved(tmp_path: Path, value: float) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(2), 2)
    bad = state(4)
    bad.adapter["unet.a.lora_up.weight"][1, 2] = value
    with pytest.raises(
        NonFiniteError, match=r"NaN or infinity at step 4 in unet\.a\.lora_up\.weight; it is not saved"
    ) as caught:
        store.save(bad, 4)
    assert caught.value.step == 4
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_large_finite_values_whose_sum_overflows_are_finite() -> None:
    large = torch.full((8,), torch.finfo(torch.float32).max)
    tensors = {
        "large": large,
        "half": torch.full((8,), 6e4, dtype=torch.float16),
        "number": torch.tensor(7),
        "none": torch.zeros(0),
    }
    assert non_finite(tensors) == []
    both = torch.tensor([float("inf"), 1.0, float("-inf")])
    assert non_finite({**tensors, "nan": torch.tensor(float("nan")), "both": both}) == ["nan", "both"]


def test_nan_in_the_json_part_is_a_bug_and_leaves_nothing(tmp_path: Path) -> None:
    bad = state(4)
    bad.scalars["loss"] = float("nan")
    with pytest.raises(ValueError, match="number that JSON cannot"):
        CheckpointStore(tmp_path).save(bad, 4)
    assert list(tmp_path.iterdir()) == []


def test_keep_last_sorts_numbers_and_keeps_the_one_in_use_and_the_protected(tmp_path: Path) -> None:
    """Case B23: 10, 11, 12 stay of twelve; never the one resumed from, nor the best one."""
    store = CheckpointStore(tmp_path)
    for step in range(1, 13):
        store.save(state(step), step)
        if step == 2:
            store.load(2)
        store.prune(3, protect=("step-00000005",))
    assert saved_steps(store) == [12, 11, 10, 5, 2]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_prune_never_deletes_the_only_verified_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), 1)
    for step in (2, 3):
        store.save(state(step), step, verify=False)
    assert store.prune(1) == ["step-00000002"]
    assert saved_steps(store) == [3, 1]


def test_verify_marks_good_ones_and_names_bad_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert not store.save(state(1), 1, verify=False).verified
    assert store.verify("step-00000001") == ""
    assert store.list()[0].verified
    damage_blank(tmp_path / "step-00000001" / names.OPTIMIZER)
    assert store.verify("step-00000001") == "optimizer.safetensors does not match its SHA-256"


def test_a_step_saved_again_stands_beside_and_is_the_newest(tmp_path: Path) -> None:
    """C14: after going back, order follows the generation and not step or clock; nothing is overwritten."""
    store = CheckpointStore(tmp_path)
    for step in (2, 4, 6):
        store.save(state(step), step)
    again = CheckpointStore(tmp_path)
    again.load(2)
    saved = again.save(state(4), 4)
    assert saved.name == "step-00000004-2"
    assert names.read_manifest(saved.path).parent == "step-00000002"
    assert again.load().name == "step-00000004-2"
    assert again.load(4).name == "step-00000004-2"
    assert again.load("step-00000004").name == "step-00000004"
    for number in (6, 4):
        (tmp_path / f"step-0000000{number}").touch()
    assert saved_steps(again) == [4, 6, 4, 2]


def test_leftovers_are_swept_by_the_first_save(tmp_path: Path) -> None:
    for name in (".tmp-4-abc", ".trash-step-00000002-abc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter.safetensors").write_bytes(b"x")
    store = CheckpointStore(tmp_path)
    assert store.list() == []
    store.save(state(6), 6)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]


def test_what_the_disk_does_not_give_is_passed_over_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector or a network drive that is away: the checkpoint may be whole, so it is not set aside."""
    store = CheckpointStore(tmp_path)
    for step in (2, 4):
        store.save(state(step), step)
    original = Path.open

    def unreadable(self: Path, *words: object, **more: object) -> object:
        if self.name == "adapter.safetensors" and self.parent.name == "step-00000004":
            raise OSError(errno.EIO, "Input/output error", str(self))
        return original(self, *words, **more)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", unreadable)
        loaded = CheckpointStore(tmp_path).load("latest")
        assert loaded.step == 2
        assert loaded.passed_over == ("step-00000004: adapter.safetensors cannot be read (Input/output error)",)
        with pytest.raises(CheckpointError, match="cannot be read"):
            CheckpointStore(tmp_path).load(4)
    assert CheckpointStore(tmp_path).load("latest").step == 4
