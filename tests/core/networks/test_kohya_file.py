from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from trainer_core.errors import AdapterError
from trainer_core.networks import free_path, load_lora, save_lora
from trainer_core.networks.kohya_file import hashes

Q = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
K = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_k"


def pair(name: str, rank: int, alpha: float | None = None, dtype: str = "float32") -> dict[str, np.ndarray]:
    tensors = {
        f"{name}.lora_down.weight": np.arange(rank * 8, dtype=dtype).reshape(rank, 8) / 8,
        f"{name}.lora_up.weight": np.ones((6, rank), dtype),
    }
    return tensors if alpha is None else {**tensors, f"{name}.alpha": np.array(alpha, dtype)}


def torch_pair(name: str, rank: int, alpha: float = 2.0) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(np.asarray(value)) for key, value in pair(name, rank, alpha).items()}


def write(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    path.write_bytes(safetensors.numpy.save(tensors, {"ss_network_dim": "4"}))
    return path


def test_hashes_are_kohyas(fixtures: Path) -> None:
    golden = json.loads((fixtures / "kohya_golden.json").read_text(encoding="utf-8"))
    tensors = {
        "lora_unet_a.alpha": torch.tensor(4.0),
        "lora_unet_a.lora_down.weight": torch.arange(12.0).view(2, 6),
        "lora_unet_a.lora_up.weight": torch.arange(8.0).view(4, 2),
    }
    assert list(hashes(tensors, {"ss_network_dim": "2"})) == golden["hash_small"]


def test_legacy_hash_covers_the_second_mebibyte_of_the_file_with_ss_metadata_only() -> None:
    tensors = {f"{Q}.lora_down.weight": torch.arange(400_000.0).view(4, -1)}
    metadata = {"ss_output_name": "x", "modelspec.title": "not in the legacy hash"}
    content = safetensors.torch.save(tensors, {"ss_output_name": "x"})
    assert len(content) > 0x110000
    assert hashes(tensors, metadata)[1] == hashlib.sha256(content[0x100000:0x110000]).hexdigest()[:8]
    assert hashes(tensors, {})[1] != hashes(tensors, metadata)[1]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_saved_file_reads_back_and_names_its_own_hash(tmp_path: Path, dtype: str) -> None:
    state = torch_pair(Q, 4)
    saved = save_lora(tmp_path / "deep" / "a.safetensors", state, {"ss_b": "2", "ss_a": "schön"}, dtype)
    raw = saved.path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert list(header["__metadata__"]) == sorted(header["__metadata__"])
    assert (8 + length) % 8 == 0
    assert header["__metadata__"]["ss_a"] == "schön"
    assert (
        header["__metadata__"]["sshs_model_hash"] == hashlib.sha256(raw[8 + length :]).hexdigest() == saved.model_hash
    )
    assert header[f"{Q}.alpha"] == {"dtype": "F32", "shape": [], "data_offsets": header[f"{Q}.alpha"]["data_offsets"]}
    wanted = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    with safetensors.safe_open(saved.path, "pt") as file:  # the library itself accepts our header
        assert set(file.keys()) == set(state)
        assert torch.equal(file.get_tensor(f"{Q}.lora_down.weight"), state[f"{Q}.lora_down.weight"].to(wanted))
    loaded = load_lora(saved.path)
    assert loaded.alphas == {Q: 2.0}
    assert loaded.scales == {Q: 0.5}
    assert [path.name for path in saved.path.parent.iterdir()] == ["a.safetensors"]


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    state = torch_pair(Q, 4) | torch_pair(K, 2)
    metadata = {f"ss_{i}": str(i) for i in range(30)}
    first = save_lora(tmp_path / "a.safetensors", state, metadata)
    backwards = dict(reversed(list(metadata.items())))
    second = save_lora(tmp_path / "b.safetensors", dict(reversed(list(state.items()))), backwards)
    assert first.path.read_bytes() == second.path.read_bytes()


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "name.safetensors"
    save_lora(path, torch_pair(Q, 4), {})
    before = path.read_bytes()
    with pytest.raises(AdapterError, match="not overwritten"):
        save_lora(path, torch_pair(Q, 2), {})
    assert path.read_bytes() == before
    assert free_path(path).name == "name-2.safetensors"
    save_lora(free_path(path), torch_pair(Q, 2), {})
    assert free_path(path).name == "name-3.safetensors"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["name-2.safetensors", "name.safetensors"]


@pytest.mark.parametrize(
    ("value", "dtype", "word"),
    [(float("nan"), "fp32", "NaN"), (1e6, "fp16", "too large"), (float("inf"), "bf16", "NaN")],
)
def test_values_that_do_not_fit_are_not_saved(tmp_path: Path, value: float, dtype: str, word: str) -> None:
    state = torch_pair(Q, 4)
    state[f"{Q}.lora_up.weight"][0, 0] = value
    with pytest.raises(AdapterError, match=word):
        save_lora(tmp_path / "a.safetensors", state, {}, dtype)
    assert list(tmp_path.iterdir()) == []


def test_alpha_cases(tmp_path: Path) -> None:
    """The cases of `weights_alpha`: alpha of every form, missing alpha = rank also with mixed ranks, alpha 0 warned."""

    def scales(tensors: dict[str, np.ndarray]) -> dict[str, float]:
        return load_lora(write(tmp_path / "x.safetensors", tensors)).scales

    assert scales(pair(Q, 4, 4.0)) == {Q: 1.0}
    assert scales(pair(Q, 4, 2.0)) == {Q: 0.5}
    assert scales(pair(Q, 4, 8.0)) == {Q: 2.0}
    assert scales(pair(Q, 4, 2.0, "float16")) == {Q: 0.5}
    assert scales({**pair(Q, 4), f"{Q}.alpha": np.array([2.0], "float32")}) == {Q: 0.5}
    assert scales({**pair(Q, 4), f"{Q}.alpha": np.array(2, "int64")}) == {Q: 0.5}
    assert scales({**pair(Q, 4), **pair(K, 2)}) == {Q: 1.0, K: 1.0}
    file = load_lora(write(tmp_path / "x.safetensors", pair(Q, 4)))
    assert "no alpha" in file.warnings[0]
    zero = load_lora(write(tmp_path / "x.safetensors", pair(Q, 4, 0.0)))
    assert zero.scales == {Q: 0.0}
    assert "alpha 0" in zero.warnings[0]
    assert "no effect" in zero.warnings[0]


OK = safetensors.numpy.save(pair(Q, 4, 4.0), {"ss_network_dim": "4"})
DAMAGED = {
    "cut_in_body": OK[: len(OK) // 2],
    "cut_in_header": OK[:40],
    "empty": b"",
    "huge_header": struct.pack("<Q", 1 << 60) + OK[8:],
    "html": b"<html><body>Sign in to download</body></html>\n" * 3,
    "too_long": OK + b"\0" * 8,
    "pickle": b"PK\x03\x04" + b"\0" * 40 + b"data.pkl" + b"\0" * 40,
}
PLAIN_REASONS = ("damaged", "truncated", "cut off", "incomplete", "header", "not a safetensors", "empty", "cannot read")


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.safetensors"
    path.write_bytes(DAMAGED[name])
    with pytest.raises(AdapterError) as caught:
        load_lora(path)
    assert path.name in str(caught.value)
    assert any(reason in str(caught.value).lower() for reason in PLAIN_REASONS)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no file"):
        load_lora(tmp_path / "gone.safetensors")
    with pytest.raises(AdapterError, match="folder"):
        load_lora(tmp_path)


BAD_CONTENT = {
    "half": ({f"{Q}.lora_down.weight": np.ones((4, 8), "float32")}, "only one of"),
    "nan": ({**pair(Q, 4), f"{Q}.lora_up.weight": np.full((6, 4), np.nan, "float32")}, "NaN"),
    "shapes": ({**pair(Q, 4), f"{Q}.lora_up.weight": np.ones((6, 3), "float32")}, "cannot be multiplied"),
    "checkpoint": (
        {"model.diffusion_model.x": np.ones(2, "float32"), "conditioner.embedders.0.y": np.ones(2, "float32")},
        "full SDXL checkpoint",
    ),
    "vae": ({"first_stage_model.encoder.x": np.ones(2, "float32")}, "VAE"),
    "sd1": (pair("lora_unet_down_blocks_0_attentions_0_proj_in", 4), "SD 1.x"),
    "sd1_sgm": (pair("lora_unet_input_blocks_1_1_proj_in", 4), "SD 1.x"),
    "tucker": ({**pair(Q, 4), f"{Q}.lora_mid.weight": np.ones((4, 4, 3, 3), "float32")}, "Tucker"),
    "flux": (pair("lora_unet_double_blocks_0_img_attn_proj", 4), "Flux"),
    "loha": ({f"{Q}.hada_w1_a": np.ones((4, 8), "float32")}, "LoHa"),
    "dora": ({**pair(Q, 4), f"{Q}.dora_scale": np.ones((6, 1), "float32")}, "DoRA"),
    "nothing": ({"x": np.ones(2, "float32")}, "1 tensors, such as 'x'"),
    "alphas": ({**pair(Q, 4), f"{Q}.alpha": np.ones(3, "float32")}, "one number"),
}


@pytest.mark.parametrize("name", BAD_CONTENT)
def test_foreign_and_broken_content_is_named(tmp_path: Path, name: str) -> None:
    tensors, words = BAD_CONTENT[name]
    path = write(tmp_path / f"{name}.safetensors", tensors)
    with pytest.raises(AdapterError, match=words) as caught:
        load_lora(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("where", ["alpha", "lora_down.weight", "lora_up.weight"])
def test_numbers_beyond_float32_are_refused(tmp_path: Path, where: str) -> None:
    """They are finite in a float64 file, and infinite as soon as anything is computed."""
    tensors = pair(Q, 2, 1.0, "float64")
    tensors[f"{Q}.{where}"] = np.full_like(tensors[f"{Q}.{where}"], 1e300)
    with pytest.raises(AdapterError, match=rf"{where}' holds numbers above 3\.4e\+38, which are infinite in float32"):
        load_lora(write(tmp_path / "a.safetensors", tensors))
    assert load_lora(write(tmp_path / "b.safetensors", pair(Q, 2, 1.0, "float64"))).alphas == {Q: 1.0}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_in_8_bits_are_read_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {key: value if key.endswith(".alpha") else value.to(dtype) for key, value in torch_pair(Q, 2).items()}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    file = load_lora(tmp_path / "a.safetensors")
    assert file.dtypes == ("float16",)
    assert any("2 of 3 tensors are in 8 bits" in text for text in file.warnings)
    for key, value in tensors.items():
        assert torch.equal(file.state[key].float(), value.float().reshape(file.state[key].shape))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_weights_that_are_no_plain_numbers_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Their values alone would be taken for weights, and the file acts as something else."""
    tensors = torch_pair(Q, 2)
    key = f"{Q}.lora_down.weight"
    safetensors.torch.save_file({**tensors, key: tensors[key].to(dtype)}, tmp_path / "a.safetensors")
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(AdapterError, match=f"lora_down.weight' is stored as {name}; LoRA weights"):
        load_lora(tmp_path / "a.safetensors")
    safetensors.torch.save_file({**tensors, f"{Q}.alpha": torch.tensor(2)}, tmp_path / "b.safetensors")
    assert load_lora(tmp_path / "b.safetensors").alphas == {Q: 2.0}
