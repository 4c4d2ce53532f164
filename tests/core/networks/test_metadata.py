from __future__ import annotations

import json
from pathlib import Path

import torch
from network_cases import full_network, randomise

from trainer_core.config import DatasetConfig, LoraConfig, MetadataConfig, ModelConfig, RunConfig, TrainConfig
from trainer_core.models import SDXLModel
from trainer_core.networks import (
    FolderFacts,
    TrainingFacts,
    build_metadata,
    export_lora,
    fit_metadata,
    inspect_lora,
    model_file_hashes,
    save_lora,
    tag_frequency,
)
from trainer_core.networks.metadata import session_id

FACTS = TrainingFacts(
    run_id="20260101-120000-ab12",
    started_at=1.5,
    finished_at=1_767_225_600.25,
    step=500,
    epoch=10,
    max_train_steps=500,
    epochs=10,
    batches_per_epoch=50,
    output_name="heart",
    parts=("unet", "te1", "te2"),
    resolution=(1024, 768),
    compute="bf16",
    folders={"4_heart": FolderFacts(repeats=4, pictures=10)},
    prior_folders={"1_shape": FolderFacts(repeats=1, pictures=5)},
    tag_frequency={"4_heart": {"a heart": 10}},
    buckets=(((1024, 768), 40),),
)
CONFIG = TrainConfig(
    model=ModelConfig(path="/models/base.safetensors"),
    lora=LoraConfig(rank=16, conv_rank=8),
    dataset=DatasetConfig(path="/data"),
    run=RunConfig(seed=7),
)


def test_values_are_kohyas_spelling() -> None:
    metadata = build_metadata(CONFIG, FACTS)
    assert all(isinstance(value, str) for value in metadata.values())
    wanted = {
        "ss_base_model_version": "sdxl_base_v1-0",
        "ss_v2": "False",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "16",
        "ss_network_alpha": "8.0",
        "ss_network_dropout": "None",
        "ss_sd_model_name": "base.safetensors",
        "ss_seed": "7",
        "ss_steps": "500",
        "ss_num_train_images": "40",
        "ss_num_reg_images": "5",
        "ss_learning_rate": "0.0001",
        "ss_optimizer": "torch.optim.adamw.AdamW",
        "ss_mixed_precision": "bf16",
        "ss_resolution": "(1024, 768)",
        "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.resolution": "1024x768",
        "modelspec.title": "heart",
        "modelspec.prediction_type": "epsilon",
        "modelspec.date": "2026-01-01T00:00:00+00:00",
    }
    assert {key: metadata[key] for key in wanted} == wanted
    assert json.loads(metadata["ss_network_args"]) == {"conv_dim": "8", "conv_alpha": "4.0"}
    assert json.loads(metadata["ss_dataset_dirs"]) == {"4_heart": {"n_repeats": 4, "img_count": 10}}
    assert json.loads(metadata["ss_tag_frequency"]) == {"4_heart": {"a heart": 10}}
    assert json.loads(metadata["ss_bucket_info"])["buckets"] == {"0": {"resolution": [1024, 768], "count": 40}}
    assert list(metadata) == sorted(metadata)


def test_minimal_metadata_tells_nothing_about_the_pictures() -> None:
    from dataclasses import replace

    metadata = build_metadata(replace(CONFIG, metadata=MetadataConfig(minimal=True)), FACTS)
    assert {key for key in metadata if not key.startswith("modelspec.")} == {
        "ss_v2",
        "ss_base_model_version",
        "ss_network_module",
        "ss_network_dim",
        "ss_network_alpha",
        "ss_network_args",
    }
    assert "heart" not in json.dumps({key: value for key, value in metadata.items() if key != "modelspec.title"})


def test_session_id_follows_the_run() -> None:
    assert session_id("a") == session_id("a") != session_id("b")
    assert 0 <= session_id("a") < 2**32


def test_tags_are_counted_as_kohya_does() -> None:
    assert tag_frequency(["A cat,  dog,", "a cat", ""]) == {"a cat": 2, "dog": 1}


def test_model_hashes(tmp_path: Path) -> None:
    import hashlib

    content = bytes(range(256)) * 8192
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    old = hashlib.sha256(content[0x100000:0x110000]).hexdigest()[:8]
    assert model_file_hashes(path) == (old, hashlib.sha256(content).hexdigest())
    assert model_file_hashes(tmp_path) == ("IsADirectory", "IsADirectory")
    assert model_file_hashes(tmp_path / "no") == ("NOFILE", "NOFILE")


def test_long_tag_lists_are_cut_to_the_commonest_and_said(tmp_path: Path) -> None:
    state = {
        "lora_unet_input_blocks_4_1_proj_in.lora_down.weight": torch.ones(1, 2),
        "lora_unet_input_blocks_4_1_proj_in.lora_up.weight": torch.ones(2, 1),
    }
    tags = {f'tag "{i}" é': 1 for i in range(60_000)} | {"common": 99}
    metadata = {"ss_tag_frequency": json.dumps({"d": tags}, ensure_ascii=False), "ss_base_model_version": "x"}
    fitting, notes = fit_metadata(metadata, state)
    kept = json.loads(fitting["ss_tag_frequency"])["d"]
    assert 1000 < len(kept) < 60_000
    assert kept["common"] == 99
    assert "rare tags" in notes[0]
    saved = save_lora(tmp_path / "a.safetensors", state, fitting)
    assert 1_000_000 < saved.header_size <= 1 << 20
    assert fit_metadata({"ss_a": "b"}, state) == ({"ss_a": "b"}, ())


def test_inspect_tells_who_trained_what(model: SDXLModel, tmp_path: Path) -> None:
    network = randomise(full_network(model))
    with torch.no_grad():
        network.modules["lora_unet_middle_block_1_proj_in"].lora_up.weight.zero_()
    path = tmp_path / "a.safetensors"
    export_lora(path, network, model, build_metadata(CONFIG, FACTS))
    delta = network.modules["lora_unet_input_blocks_4_1_proj_in"].delta_weight().norm()
    network.detach()
    found = inspect_lora(path)
    parts = {part.part: part for part in found.parts}
    assert {name: part.modules for name, part in parts.items()} == {"te1": 18, "te2": 18, "unet": 257}
    assert dict(parts["unet"].ranks) == {2: 38, 4: 219}
    assert dict(parts["te1"].scales) == {0.5: 18}
    assert parts["unet"].changed == 256
    assert found.does_something
    assert found.round_trip
    assert found.claimed_hash == found.model_hash
    assert [block.block for block in found.blocks if block.part == "unet"][:3] == ["IN01", "IN02", "IN03"]
    in04 = next(block for block in found.blocks if block.block == "IN04")
    assert in04.norm > float(delta) > 0
    json.dumps(found.to_dict())
    assert "text encoder 1: 18 modules" in found.text
    assert "steps: 500" in found.text
    assert "a heart (10)" in found.text
    assert "does something: yes" in found.text
