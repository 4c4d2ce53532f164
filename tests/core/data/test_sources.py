"""Where pictures come from: metadata files, data-set config files, masks, the memo of known files, the table."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from trainer_core.config import BucketConfig, DatasetConfig
from trainer_core.data import BatchLoader, BatchPlan, LatentCache, ScanReport, scan_dataset
from trainer_core.data import memo as memo_module
from trainer_core.draws import Draws
from trainer_core.errors import ConfigError, DatasetError

from .test_kind_pictures import png, write

Scan = Callable[..., ScanReport]


def captions(report: ScanReport) -> dict[str, str]:
    return {item.file: item.caption for item in report.items}


# ------------------------------------------------------------------ metadata
def test_metadata_lines_in_the_layouts_people_have(tmp_path: Path, scan: Scan) -> None:
    for index, name in enumerate(("a.png", "b.png", "c.png", "sub/d.png", "e.png")):
        write(tmp_path, name, png(64, 64, (index, 0, 0)))
    write(tmp_path, "e.txt", b"from its own file")
    rows = [
        {"file_name": "a.png", "text": "words a"},
        {"image_path": str(tmp_path / "b.png"), "caption": "words b", "tags": ["x", "y"], "image_size": [1, 1]},
        {"image": "c.png", "tags": "only, tags"},
        {"file_name": "sub\\d.png", "caption": "in a sub-folder"},
    ]
    write(tmp_path, "metadata.jsonl", "\n".join(json.dumps(row) for row in rows).encode())
    report = scan(tmp_path)
    assert captions(report) == {
        "a.png": "words a",
        "b.png": "words b, x, y",
        "c.png": "only, tags",
        "sub/d.png": "in a sub-folder",
        "e.png": "from its own file",
    }
    assert report.ignored == ()


def test_metadata_object_of_sd_scripts(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "a.png", png())
    write(tmp_path, "b.png", png(64, 64, (1, 1, 1)))
    content = {"a": {"caption": "no ending"}, str(tmp_path / "b.png"): {"tags": "t"}}
    write(tmp_path, "meta/all.json", json.dumps(content).encode())
    (tmp_path / "meta" / "all.json").rename(tmp_path / "all.json")
    assert captions(scan(tmp_path, metadata_file="all.json")) == {"a.png": "no ending", "b.png": "t"}


def test_metadata_problems_name_file_and_line(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "a.png", png())
    lines = ['{"file_name": "a.png", "text": "x"}', "{broken", '{"text": "whose?"}', '{"file_name": "gone.png"}']
    lines.append('{"file_name": "../outside.png"}')
    write(tmp_path, "metadata.jsonl", "\n".join(lines).encode())
    report = scan(tmp_path)
    assert report.refused == (("gone.png", "listed in metadata.jsonl but not found"),)
    text = "\n".join(report.warnings)
    assert "metadata.jsonl line 2 is no JSON" in text
    assert "metadata.jsonl line 3 names no picture" in text
    assert "'../outside.png', which is outside" in text
    with pytest.raises(DatasetError, match="'no.jsonl' is neither in"):
        scan(tmp_path, metadata_file="no.jsonl")


# ------------------------------------------------------------------ data-set config file
def read(tmp_path: Path, text: str, **options: Any) -> ScanReport:
    path = write(tmp_path, "sets.toml", text.encode())
    return scan_dataset(DatasetConfig(config_file=str(path), **options), BucketConfig(), 64)


@pytest.fixture
def two_folders(tmp_path: Path) -> Path:
    write(tmp_path, "cats/a.png", png())
    write(tmp_path, "dogs/a.png", png(64, 64, (1, 2, 3)))
    write(tmp_path, "dogs/a.cap", b"words")
    return tmp_path


def test_config_file_values_ascend(two_folders: Path) -> None:
    report = read(
        two_folders,
        """
        [general]
        caption_prefix = "g"
        keep_tokens = 1
        shuffle_caption = true
        batch_size = 7
        [[datasets]]
        batch_size = 3
        keep_tokens = 2
        resolution = [64, 48]
        [[datasets.subsets]]
        image_dir = "cats"
        class_tokens = "cat"
        keep_tokens = 3
        num_repeats = 4
        [[datasets.subsets]]
        image_dir = "dogs"
        caption_extension = ".cap"
        is_reg = true
        flip_aug = true
        [[datasets]]
        resolution = 32
        [[datasets.subsets]]
        image_dir = "cats"
        """,
        prior_loss_weight=0.5,
    )
    first, second, third = sorted(
        report.items, key=lambda item: (item.is_prior, item.spec.limits.size[0]), reverse=True
    )
    assert (first.file, first.caption, first.loss_weight, first.spec.flip) == ("prior:dogs/a.png", "words", 0.5, True)
    assert (second.caption, second.repeats, second.rules.keep_tokens, second.spec.batch_size) == ("cat", 4, 3, 3)
    assert (second.rules.prefix, second.rules.shuffle, first.rules.keep_tokens) == ("g", True, 2)
    assert (third.bucket, third.spec.batch_size) == ((32, 32), 7)
    assert len({item.file for item in report.items}) == 3


REJECTED = {
    "unknown": ("[general]\nflip_augg = true", "Did you mean flip_aug"),
    "prior_loss_weight": ("[general]\nprior_loss_weight = 0.5", "dataset.prior_loss_weight"),
    "max_token_length": ("[[datasets]]\nmax_token_length = 150", "dataset.max_token_length"),
    "subset key above": ('[general]\nimage_dir = "x"', "extra keys not allowed"),
    "data-set key below": ('[[datasets]]\n[[datasets.subsets]]\nimage_dir = "cats"\nbatch_size = 2', "batch_size"),
    "wrong type": ("[general]\nnum_repeats = 1.5", "must be a whole number"),
    "bool for int": ("[general]\nkeep_tokens = true", "must be a whole number"),
    "share": ("[general]\ncaption_dropout_rate = 1.5", "between 0 and 1"),
    "zero": ("[general]\nnum_repeats = 0", "at least 1"),
    "no folder": ("[[datasets]]\n[[datasets.subsets]]\nnum_repeats = 2", "every subset needs a folder"),
    "no subsets": ("[[datasets]]\nresolution = 64", "at least one table"),
    "no datasets": ("[general]\nresolution = 64", "at least one table"),
    "metadata in some": (
        '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "cats"\nmetadata_file = "m.json"\n'
        '[[datasets.subsets]]\nimage_dir = "dogs"',
        "some subsets have it and some do not",
    ),
    "reg with metadata": (
        '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "cats"\nmetadata_file = "m.json"\nis_reg = true',
        "is_reg",
    ),
    "augmentation": ('[[datasets]]\n[[datasets.subsets]]\nimage_dir = "cats"\ncolor_aug = true', "latents are cached"),
    "interpolation": ('[general]\nresize_interpolation = "magic"', "must be one of"),
}


@pytest.mark.parametrize("name", list(REJECTED))
def test_config_file_rejects_what_sd_scripts_rejects(name: str, two_folders: Path) -> None:
    text, words = REJECTED[name]
    with pytest.raises(ConfigError, match="sets.toml") as caught:
        read(two_folders, text)
    assert words in str(caught.value)


ACCEPTED = [
    "color_aug = false",
    "validation_split = 0.1",
    "cache_info = true",
    'custom_attributes = {a = "b"}',
    "token_warmup_step = 0.5",
    'resize_interpolation = "area"',
    "alpha_mask = true",
]


@pytest.mark.parametrize("line", ACCEPTED)
def test_config_file_accepts_in_a_subset(line: str, two_folders: Path) -> None:
    report = read(two_folders, f'[[datasets]]\n[[datasets.subsets]]\nimage_dir = "cats"\n{line}')
    assert [item.file for item in report.items] == ["a.png"]


def test_config_file_collects_all_problems(two_folders: Path) -> None:
    with pytest.raises(ConfigError, match="3 problems"):
        read(
            two_folders,
            '[general]\nbad = 1\nbatch_size = 0\n[[datasets]]\n[[datasets.subsets]]\nx = 1\nimage_dir="cats"',
        )


def test_config_file_as_json_and_broken(two_folders: Path) -> None:
    path = write(two_folders, "sets.json", json.dumps({"datasets": [{"subsets": [{"image_dir": "cats"}]}]}).encode())
    report = scan_dataset(DatasetConfig(config_file=str(path)), BucketConfig(), 64)
    assert [item.file for item in report.items] == ["a.png"]
    with pytest.raises(DatasetError, match="cannot be parsed"):
        read(two_folders, "[[datasets")
    with pytest.raises(DatasetError, match="cannot be read"):
        scan_dataset(DatasetConfig(config_file=str(two_folders / "no.toml")), BucketConfig(), 64)


def test_config_file_same_folder_twice_counts_once(two_folders: Path) -> None:
    subset = '[[datasets.subsets]]\nimage_dir = "cats"\n'
    assert len(read(two_folders, f"[[datasets]]\n{subset}{subset}").items) == 1
    assert len(read(two_folders, f"[[datasets]]\n{subset}[[datasets]]\nresolution = 32\n{subset}").items) == 2


def test_sets_of_different_batch_size_never_share_a_batch(two_folders: Path) -> None:
    for index in range(4):
        write(two_folders, f"cats/{index}.png", png(64, 64, (index, 9, 9)))
        write(two_folders, f"dogs/{index}.png", png(64, 64, (index, 8, 8)))
    text = '[[datasets]]\nbatch_size = 2\n[[datasets.subsets]]\nimage_dir = "cats"\n'
    text += '[[datasets]]\nbatch_size = 4\n[[datasets.subsets]]\nimage_dir = "dogs"\n'
    plan = BatchPlan(read(two_folders, text).items, 1, Draws(1))
    assert sorted(len(batch) for batch in plan.batches(0)) == [1, 1, 2, 2, 4]
    assert plan.micro_batches_per_epoch == 5


# ------------------------------------------------------------------ masks
def rgba(alpha: np.ndarray) -> bytes:
    buffer = BytesIO()
    colour = np.full((*alpha.shape, 3), 90, np.uint8)
    Image.fromarray(np.dstack([colour, alpha])).save(buffer, "PNG")
    return buffer.getvalue()


def half() -> np.ndarray:
    alpha = np.zeros((64, 64), np.uint8)
    alpha[:, :32] = 255
    return alpha


def batch_of(report: ScanReport, vae: AutoencoderKL, folder: Path) -> Any:
    dataset = DatasetConfig(workers=0)
    cache = LatentCache(folder, vae, "v", dataset)
    cache.ensure(report.items)
    loader = BatchLoader(BatchPlan(report.items, 8, Draws(1)), cache, None, dataset)
    (refs,) = loader.plan.batches(0)
    batch = loader.load(0, refs)
    assert batch.masks_B1HW is not None
    return dict(zip(batch.files, batch.masks_B1HW, strict=True))


def test_alpha_masks_and_whole_pictures(tmp_path: Path, scan: Scan, vae: AutoencoderKL) -> None:
    write(tmp_path / "set", "cut.png", rgba(half()))
    write(tmp_path / "set", "whole.png", png())
    masks = batch_of(scan(tmp_path / "set", mask="alpha"), vae, tmp_path / "cache")
    assert masks["cut.png"].shape == (1, 8, 8)
    assert masks["cut.png"][0, 4].tolist() == pytest.approx([1, 1, 1, 1, 0, 0, 0, 0], abs=0.01)
    assert torch.equal(masks["whole.png"], torch.ones(1, 8, 8))


def test_mask_folder_by_name(tmp_path: Path, scan: Scan, vae: AutoencoderKL) -> None:
    write(tmp_path / "set", "a.png", png())
    write(tmp_path / "set", "b.png", png(64, 64, (1, 1, 1)))
    buffer = BytesIO()
    Image.fromarray(half()).save(buffer, "PNG")
    write(tmp_path / "masks", "a.png", buffer.getvalue())
    report = scan(tmp_path / "set", mask=str(tmp_path / "masks"))
    assert any("without a mask, trained as a whole: b.png" in warning for warning in report.warnings)
    masks = batch_of(report, vae, tmp_path / "cache")
    assert masks["a.png"].mean().item() == pytest.approx(0.5, abs=0.01)
    assert masks["b.png"].mean().item() == 1
    write(tmp_path / "masks", "b.png", png(64, 16))
    with pytest.raises(DatasetError, match="b.png.* is 64x16, but its picture b.png is 64x64"):
        batch_of(scan(tmp_path / "set", mask=str(tmp_path / "masks")), vae, tmp_path / "cache")
    with pytest.raises(DatasetError, match="The folder of masks 'nowhere' does not exist"):
        scan(tmp_path / "set", mask="nowhere")


# ------------------------------------------------------------------ memo
def examine_again(folder: Path, cache: Path, **options: Any) -> ScanReport:
    dataset = DatasetConfig(path=str(folder), **options)
    return scan_dataset(dataset, BucketConfig(), 64, cache_dir=cache)


def test_memo_reads_changed_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo_module, "_FRESH_NS", 0)
    folder, cache = tmp_path / "set", tmp_path / "cache"
    for index in range(5):
        write(folder, f"{index}.png", png(64, 64, (index, 0, 0)))
        write(folder, f"{index}.txt", f"words {index}".encode())
    write(folder, "bad.png", b"<html>")
    first = examine_again(folder, cache)
    second = examine_again(folder, cache)
    assert (first.decoded, second.decoded) == (6, 0)
    assert first.to_json() == second.to_json()
    write(folder, "3.png", png(64, 64, (9, 9, 9)))
    write(folder, "2.txt", b"other words")
    third = examine_again(folder, cache)
    assert third.decoded == 1
    assert captions(third)["2.png"] == "other words"
    assert examine_again(folder, cache, verify=True).decoded == 6


def test_kind_cache_memo_sees_an_edit_behind_the_same_size_and_time(
    tmp_path: Path, cases: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memo_module, "_FRESH_NS", 0)
    source, folder = cases["stale_cache"].data, tmp_path / "set"
    found = []
    for version in ("v1", "v2"):
        for name in ("img.bmp", "img.txt"):
            target = write(folder, name, (source / version / name).read_bytes())
            stat = (source / version / name).stat()
            os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        time.sleep(0.02)
        report = examine_again(folder, tmp_path / "cache")
        found.append((report.items[0].content_hash, report.items[0].caption))
    assert found[0][0] != found[1][0]
    assert [caption for _, caption in found] == ["old words", "new words"]


def test_memo_does_not_trust_files_that_just_changed(tmp_path: Path) -> None:
    write(tmp_path / "set", "a.png", png())
    examine_again(tmp_path / "set", tmp_path / "cache")
    assert examine_again(tmp_path / "set", tmp_path / "cache").decoded == 1


def test_memo_that_is_damaged_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo_module, "_FRESH_NS", 0)
    write(tmp_path / "set", "a.png", png())
    write(tmp_path / "cache", memo_module.FILE_NAME, b"no database at all" * 100)
    assert examine_again(tmp_path / "set", tmp_path / "cache").decoded == 1
    assert examine_again(tmp_path / "set", tmp_path / "cache").decoded == 0


# ------------------------------------------------------------------ table
def test_table_gives_back_what_was_put_in(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "\u65e5\u672c \U0001f600.png", png(70, 100))
    write(tmp_path, "\u65e5\u672c \U0001f600.txt", "\u82b1 words".encode())
    write(tmp_path, "sub/b.png", png(300, 64))
    items = scan(tmp_path, recursive=True).items
    assert [item.file for item in items] == ["\u65e5\u672c \U0001f600.png", "sub/b.png"]
    assert items[0].caption == "\u82b1 words"
    assert items[-1].path == tmp_path / "sub" / "b.png"
    assert items[0:2] == list(items)
    with pytest.raises(IndexError):
        items[2]
    assert items[0].upright_size == (70, 100)
    assert len(items[0].content_hash) == 32
