"""The identity changes with the weights, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer_core.models import SDXLModel, fingerprint, load_sdxl
from trainer_core.models.sources import find_source
from trainer_core.models.tensor_file import Outgoing, read_header, write_tensors


def test_same_weights_same_identity_wherever_they_lie(toy: SDXLModel, toy_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(toy_file.read_bytes())
    assert load_sdxl(copy).fingerprint == load_sdxl(toy_file).fingerprint
    assert load_sdxl("toy").fingerprint == toy.fingerprint
    assert set(toy.fingerprints) == {"unet", "te1", "te2", "vae"}


@pytest.mark.parametrize("place", [0, 100, -1])
def test_one_changed_number_changes_its_part_only(toy_file: Path, tmp_path: Path, place: int) -> None:
    state = load_file(toy_file)
    key = "model.diffusion_model.middle_block.1.proj_in.weight"
    state[key].view(-1)[place] += 1
    save_file(state, tmp_path / "m.safetensors")
    before = {part: fingerprint.part_fingerprint(slots) for part, slots in find_source(toy_file).parts.items()}
    changed = find_source(tmp_path / "m.safetensors")
    after = {part: fingerprint.part_fingerprint(slots) for part, slots in changed.parts.items()}
    assert [part for part in before if before[part] != after[part]] == ["unet"]


@pytest.mark.parametrize(("place", "seen"), [(0, True), (2047, True), (50_000, False), (-2048, True), (-1, True)])
def test_large_files_are_sampled_at_both_ends_of_every_tensor(
    place: int, seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documented limit: first and last 4 KiB (2,048 fp16 numbers) of a tensor are read."""
    from trainer_core.models.sources import Slot

    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 0)
    identities = []
    for change in (0.0, 1.0):
        values = torch.zeros(100_000, dtype=torch.float16)
        values[place] = change
        path = tmp_path / f"{change}.safetensors"
        write_tensors(path, {"a": Outgoing(torch.float16, (100_000,), lambda values=values: values)})
        identities.append(fingerprint.part_fingerprint({"a": Slot(read_header(path), "a")}))
    assert (identities[0] != identities[1]) is seen
