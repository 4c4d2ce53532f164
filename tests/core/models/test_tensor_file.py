"""Writing: readable by the safetensors library, complete or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from trainer_core.errors import ModelFileError
from trainer_core.models.tensor_file import Outgoing, read_header, write_tensors

TENSORS = {
    "half": torch.arange(6, dtype=torch.float16).reshape(2, 3),
    "brain": torch.arange(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(0.5),
    "empty": torch.zeros(0, 4),
    "turned": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
    "long": torch.arange(3),
}


def outgoing(tensors: dict[str, torch.Tensor]) -> dict[str, Outgoing]:
    return {
        name: Outgoing(value.dtype, tuple(value.shape), lambda value=value: value) for name, value in tensors.items()
    }


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "x.safetensors"
    write_tensors(path, outgoing(TENSORS), {"b": "2", "a": "ü"})
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"a": "ü", "b": "2"}
        for name, value in TENSORS.items():
            assert torch.equal(file.get_tensor(name), value)
            assert file.get_tensor(name).dtype == value.dtype


def test_plain_reads_give_the_same(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, outgoing(TENSORS))
    file = read_header(path)
    with file.open_raw() as handle:
        for name, value in TENSORS.items():
            assert torch.equal(file.read(name, handle), value)
        assert torch.equal(file.read("turned", handle, (1, 3)), TENSORS["turned"][1:3])


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, outgoing({"a": torch.ones(2)}))
    before = path.read_bytes()

    def fail() -> torch.Tensor:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_tensors(
            path, {"a": Outgoing(torch.float32, (2,), lambda: torch.zeros(2)), "b": Outgoing(torch.float32, (2,), fail)}
        )
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]


def test_same_content_gives_same_bytes(tmp_path: Path) -> None:
    for name, metadata in (("a", {"x": "1", "y": "2"}), ("b", {"y": "2", "x": "1"})):
        write_tensors(tmp_path / name, outgoing(TENSORS), metadata)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are POSIX")
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match="device or pipe"):
        read_header(tmp_path / "model.safetensors")
