"""Names, digests and the order of checkpoints."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_core.checkpoints import manifest as names
from trainer_core.checkpoints.manifest import ADAPTER, OPTIMIZER, STATE, Damaged, FileEntry, Manifest
from trainer_core.errors import CheckpointError


def build(step: int, generation: int, **changes: object) -> Manifest:
    files = {name: FileEntry(1, f"{number:064x}") for number, name in enumerate((ADAPTER, OPTIMIZER, STATE))}
    manifest = Manifest(
        format_version=1, pack_version="0.1.0", run_id="r", step=step, generation=generation, parent=None, created=1.0,
        files=files, adapter_digest=names.bound_digest("adapter", step, generation, files[ADAPTER].sha256),
        optimizer_digest=names.bound_digest("optimizer", step, generation, files[OPTIMIZER].sha256),
    )  # fmt: skip
    return dataclasses.replace(manifest, **changes)


def put(folder: Path, name: str, manifest: Manifest | None) -> None:
    (folder / name).mkdir()
    for file in (ADAPTER, OPTIMIZER, STATE):
        (folder / name / file).write_bytes(b"x")
    if manifest:
        (folder / name / names.MANIFEST).write_bytes(manifest.encode())


def test_a_manifest_reads_back_equal(tmp_path: Path) -> None:
    put(tmp_path, "step-00000004", build(4, 2))
    assert names.read_manifest(tmp_path / "step-00000004") == build(4, 2)


def test_any_changed_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    put(tmp_path, "step-00000004", build(4, 2))
    path = tmp_path / "step-00000004" / names.MANIFEST
    good = path.read_bytes()
    accepted = []
    for position in range(0, len(good), 3):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        try:
            names.read_manifest(path.parent)
            accepted.append(position)
        except Damaged:
            continue
    assert accepted == []


def test_files_of_two_saves_never_pass_as_one(tmp_path: Path) -> None:
    """The optimizer of generation 1 under a manifest of generation 2, self-digest made right again."""
    old = build(4, 1)
    put(tmp_path, "step-00000006", build(6, 2, optimizer_digest=old.optimizer_digest))
    with pytest.raises(Damaged, match=r"optimizer\.safetensors belongs to another save than step 6, generation 2"):
        names.read_manifest(tmp_path / "step-00000006")


def test_a_newer_format_is_refused_naming_both_versions(tmp_path: Path) -> None:
    put(tmp_path, "step-00000006", build(6, 2, format_version=2, pack_version="9.1"))
    with pytest.raises(CheckpointError, match=r"pack 9\.1 in format 2; this is pack .* formats up to 1\. Update"):
        names.scan(tmp_path)


def test_newest_is_by_generation_and_unreadable_ones_by_step(tmp_path: Path) -> None:
    put(tmp_path, "step-00000002", build(2, 1))
    put(tmp_path, "step-00000010", build(10, 2))
    put(tmp_path, "step-00000004", build(4, 3))  # saved after going back from 10
    put(tmp_path, "step-00000006", None)
    put(tmp_path, "not-a-checkpoint", None)
    assert [saved.step for saved in names.scan(tmp_path)] == [6, 4, 10, 2]
    newest = names.newest_good(tmp_path)
    assert newest is not None
    assert newest.step == 4


def test_a_missing_folder_holds_nothing(tmp_path: Path) -> None:
    assert names.scan(tmp_path / "nowhere") == []
    assert names.newest_good(tmp_path / "nowhere") is None


def test_a_renamed_checkpoint_folder_is_noticed(tmp_path: Path) -> None:
    put(tmp_path, "step-00000008", build(6, 2))
    assert names.scan(tmp_path)[0].problem == "the folder is named for step 8 and holds step 6"


@pytest.mark.parametrize(
    ("name", "step"),
    [("step-00000500", 500), ("step-00000500-2", 500), ("step-123456789", 123456789), ("step-5", None)],
)
def test_step_of_a_name(name: str, step: int | None) -> None:
    assert names.step_of(name) == step


def test_the_supervisor_side_imports_no_torch() -> None:
    modules = "trainer_core.runs.supervisor, trainer_core.worker_main, trainer_core.runs.registry"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(names.__file__).parents[2]
    )
    assert result.stdout.strip() == "False"
