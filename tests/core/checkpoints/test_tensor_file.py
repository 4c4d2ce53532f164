"""Our one-pass safetensors reader and writer against the library."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trainer_core.checkpoints import tensor_file
from trainer_core.checkpoints.manifest import Damaged, FileEntry


def example() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(3, 5, generator=generator),
        "b/half": torch.randn(7, generator=generator).half(),
        "ä": torch.randn(2, 2, generator=generator).bfloat16(),
        "double": torch.randn(3, generator=generator, dtype=torch.float64),
        "scalar": torch.tensor(4.5),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False, True]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "count": torch.tensor(12, dtype=torch.int64),
        "transposed": torch.randn(4, 6, generator=generator).T,
    }


def write(path: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> None:
    path.write_bytes(b"".join(tensor_file.pieces(tensors, metadata)))


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert tensor.shape == right[name].shape, name
        assert torch.equal(tensor, right[name]), name


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    write(tmp_path / "x", example(), step="4")
    assert_same(example(), load_file(tmp_path / "x"))
    with safe_open(tmp_path / "x", "pt") as stream:
        assert stream.metadata() == {"step": "4"}


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in example().items()}
    save_file(tensors, tmp_path / "x", metadata={"step": "4"})
    content = tensor_file.read(tmp_path / "x")
    assert_same(tensors, content.tensors)
    assert content.metadata == {"step": "4"}
    assert content.entry.sha256 == hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()


def test_no_tensors_at_all(tmp_path: Path) -> None:
    write(tmp_path / "x", {})
    assert tensor_file.read(tmp_path / "x").tensors == {}


def test_a_misaligned_file_of_another_writer_is_read(tmp_path: Path) -> None:
    """A header whose length is not a multiple of 8 puts the data at odd places."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * ((3 - len(header)) % 8)
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1.0, 2.0))
    assert tensor_file.read(tmp_path / "x").tensors["a"].tolist() == [1.0, 2.0]


def test_a_wrong_digest_is_damage(tmp_path: Path) -> None:
    write(tmp_path / "x", example())
    size = (tmp_path / "x").stat().st_size
    with pytest.raises(Damaged, match="x does not match its SHA-256"):
        tensor_file.read(tmp_path / "x", FileEntry(size, "0" * 64))
    with pytest.raises(Damaged, match=f"x has {size} bytes instead of 3"):
        tensor_file.read(tmp_path / "x", FileEntry(3, "0" * 64))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "too short"),
        (b"\x01\x02", "too short"),
        (struct.pack("<Q", 1 << 60) + b"{}", "cut inside its header"),
        (struct.pack("<Q", 2) + b"{]", "damaged header"),
        (struct.pack("<Q", 2) + b"[]", "damaged header"),
    ],
)
def test_no_header(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(Damaged, match=reason):
        tensor_file.read(tmp_path / "x")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]},
    ],
)
def test_a_lying_header(tmp_path: Path, entry: dict[str, object]) -> None:
    header = json.dumps({"a": entry}).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(Damaged, match="damaged header"):
        tensor_file.read(tmp_path / "x")


def test_a_dtype_that_cannot_be_held_is_named() -> None:
    with pytest.raises(TypeError, match=r"odd has dtype torch\.complex64"):
        list(tensor_file.pieces({"odd": torch.zeros(1, dtype=torch.complex64)}, {}))
