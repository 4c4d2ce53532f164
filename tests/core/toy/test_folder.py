from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from trainer_core.toy import TOY_FOLDER, folder
from trainer_core.toy.micro import make_micro


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_micro(tmp_path_factory.mktemp("micro"), seed=5)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - safe_open is no dict


def test_micro_is_the_same_whatever_the_global_random_state(micro: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    again = make_micro(tmp_path, seed=5)
    files = sorted(p.relative_to(micro) for p in micro.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(again) for p in again.rglob("*") if p.is_file())
    for name in files:
        assert (micro / name).read_bytes() == (again / name).read_bytes(), name


def test_micro_loads_and_predicts(micro: Path) -> None:
    models = folder.load_models(micro)
    added = {"text_embeds": torch.zeros(2, 64), "time_ids": torch.zeros(2, 6)}
    with torch.no_grad():
        out = models.unet(
            torch.ones(2, 4, 8, 8), torch.tensor([1, 900]), torch.ones(2, 77, 96), added_cond_kwargs=added
        )
    assert out.sample.shape == (2, 4, 8, 8)
    assert torch.isfinite(out.sample).all()
    assert out.sample.std() > 1e-3
    weights = _tensors(micro / "unet" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(value, weights[key]) for key, value in models.unet.state_dict().items())


def test_text_encoder_1_is_stored_with_the_prefix_that_transformers_4_needs(micro: Path) -> None:
    for root in (micro, TOY_FOLDER):
        keys = _tensors(root / "text_encoder" / "model.safetensors")
        assert all(key.startswith("text_model.") for key in keys)
        assert "text_model.encoder.layers.2.mlp.fc2.weight" in keys
        assert "text_model.final_layer_norm.bias" in keys
        keys_2 = _tensors(root / "text_encoder_2" / "model.safetensors")
        assert {key.split(".")[0] for key in keys_2} == {"text_model", "text_projection"}
        stored = {key.removeprefix("text_model."): value for key, value in keys.items()}
        state = folder.load_models(root).text_encoder.state_dict()
        for key, value in state.items():
            assert torch.equal(value, stored[key.removeprefix("text_model.")].float()), key


def test_pooled_vector_is_the_projection_at_end_of_text() -> None:
    encoder = CLIPTextModelWithProjection.from_pretrained(TOY_FOLDER / "text_encoder_2", dtype=torch.float32).eval()
    tokenizer = CLIPTokenizer.from_pretrained(TOY_FOLDER / "tokenizer_2")
    texts = ["a red circle", "", "word " * 100]
    ids = tokenizer(texts, padding="max_length", truncation=True, max_length=77, return_tensors="pt").input_ids
    with torch.no_grad():
        output = encoder(ids)
        ends = [row.tolist().index(tokenizer.eos_token_id) for row in ids]
        expected = encoder.text_projection(output.last_hidden_state[torch.arange(3), ends])
    assert ends == [4, 1, 76]
    torch.testing.assert_close(output.text_embeds, expected)


def test_shipped_folder_is_small_fp16_and_of_sdxls_blocks() -> None:
    files = [path for path in TOY_FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 16_000_000
    for path in files:
        if path.suffix == ".safetensors":
            assert {value.dtype for value in _tensors(path).values()} == {torch.float16}, path
    config = json.loads((TOY_FOLDER / "unet" / "config.json").read_text(encoding="utf-8"))
    assert config["down_block_types"] == ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"]
    assert config["up_block_types"] == ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"]
    assert config["sample_size"] == 8
    assert config["addition_embed_type"] == "text_time"


def test_weights_that_overflow_fp16_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a.weight"):
        folder.save_weights(tmp_path / "x.safetensors", {"a.weight": torch.tensor([1e6])}, dtype=torch.float16)
    assert not (tmp_path / "x.safetensors").exists()
