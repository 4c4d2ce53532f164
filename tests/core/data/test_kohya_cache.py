"""sd-scripts' latent caches: used when valid, refused with a reason otherwise, written so that they are valid."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from trainer_core.config import DatasetConfig
from trainer_core.data import Item, LatentCache, ScanReport
from trainer_core.data.kohya_cache import KohyaLatents, kohya_path, read_kohya_latents, write_kohya_latents

from .test_kind_pictures import png, write

Scan = Callable[..., ScanReport]


@pytest.fixture
def item(tmp_path: Path, scan: Scan) -> Item:
    write(tmp_path / "set", "a b.png", png(70, 100))
    return scan(tmp_path / "set").items[0]


def store(item: Item, **changes: Any) -> None:
    arrays: dict[str, Any] = {
        "latents": np.ones((4, 9, 7), np.float32),
        "original_size": np.array([70, 100]),
        "crop_ltrb": np.array([2.0, 0.0, 52.4, 72.0]),
        **changes,
    }
    np.savez(kohya_path(item), **{name: array for name, array in arrays.items() if array is not None})


def test_valid_file_is_read(item: Item) -> None:
    assert kohya_path(item).name == "a b_0070x0100_sdxl.npz"
    assert item.bucket == (56, 72)
    store(item)
    found = read_kohya_latents(item)
    assert isinstance(found, KohyaLatents)
    assert torch.equal(found.latents_CHW, torch.ones(4, 9, 7))


BAD = {
    "shape": ({"latents": np.ones((4, 8, 8), np.float32)}, "this bucket needs (4, 9, 7)"),
    "nan": ({"latents": np.full((4, 9, 7), np.nan, np.float32)}, "NaN or infinity"),
    "size": ({"original_size": np.array([100, 70])}, "made from a picture of [100, 70]"),
    "bucket": ({"crop_ltrb": np.array([0.0, 0.0, 56.0, 72.0])}, "another bucket"),
    "key": ({"crop_ltrb": None}, "lacks crop_ltrb"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_kind_cache_invalid_foreign_file_is_refused_with_a_reason(name: str, item: Item) -> None:
    changes, words = BAD[name]
    store(item, **changes)
    found = read_kohya_latents(item)
    assert isinstance(found, str)
    assert words in found


def test_kind_cache_older_broken_and_missing_foreign_files(item: Item) -> None:
    assert read_kohya_latents(item) == "it is not there"
    store(item)
    os.utime(kohya_path(item), (1, 1))
    assert read_kohya_latents(item) == "it is older than its picture"
    kohya_path(item).write_bytes(b"PK broken")
    assert "cannot be read" in str(read_kohya_latents(item))


def test_cache_uses_a_valid_one_and_encodes_the_others(item: Item, tmp_path: Path, vae: AutoencoderKL) -> None:
    store(item)
    cache = LatentCache(tmp_path / "cache", vae, "v", DatasetConfig(workers=0, kohya_cache="read"))
    assert cache.ensure([item]) == 0
    entry = cache.load(item)
    assert torch.equal(entry.mean_CHW, torch.ones(4, 9, 7))
    assert entry.std_CHW.abs().max() == 0
    store(item, latents=np.ones((4, 8, 8), np.float32))
    again = LatentCache(tmp_path / "cache", vae, "v", DatasetConfig(workers=0, kohya_cache="read"))
    assert cache.notes() == ["sd-scripts' latents (.npz) are used for 1 picture; which VAE made them cannot be told"]
    assert again.ensure([item]) == 1
    assert again.ensure([item]) == 0  # asked for twice, as when measured pictures are trained too: told once
    (note,) = again.notes()
    assert "a b.png (its latents are (4, 8, 8), this bucket needs (4, 9, 7))" in note
    assert note.endswith("encoded anew")


def test_written_files_are_valid(item: Item, tmp_path: Path, vae: AutoencoderKL) -> None:
    cache = LatentCache(tmp_path / "cache", vae, "v", DatasetConfig(workers=0, kohya_cache="write"))
    cache.ensure([item])
    found = read_kohya_latents(item)
    assert isinstance(found, KohyaLatents)
    assert torch.equal(found.latents_CHW, cache.load(item).mean_CHW)
    path = write_kohya_latents(item, found.latents_CHW, found.latents_CHW.flip(-1))
    assert sorted(np.load(path).files) == ["crop_ltrb", "latents", "latents_flipped", "original_size"]
