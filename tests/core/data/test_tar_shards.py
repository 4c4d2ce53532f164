"""Tar shards in WebDataset's layout behave like folders: scan, captions, cache, order, damage."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL

from trainer_core.config import BucketConfig, DatasetConfig
from trainer_core.data import BatchLoader, BatchPlan, LatentCache, ScanReport, decode_picture, scan_dataset
from trainer_core.data import memo as memo_module
from trainer_core.data.locations import locate, shown_name, tar_name
from trainer_core.draws import Draws

from .test_kind_pictures import png, write

Scan = Callable[..., ScanReport]


def shard(path: Path, first: int, count: int) -> Path:
    """`count` flat pictures with captions, numbered from `first`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for index in range(first, first + count):
            for name, data in (
                (f"{index:04}.png", png(64, 64, (index * 9 % 256, 50, 90))),
                (f"{index:04}.txt", f"words {index}".encode()),
                (f"{index:04}.json", b"{}"),
            ):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return path


def test_shards_are_sets_of_pictures(tmp_path: Path, scan: Scan) -> None:
    shard(tmp_path / "set" / "b.tar", 5, 4)
    shard(tmp_path / "set" / "a.tar", 0, 5)
    items = scan(tmp_path / "set").items
    assert [item.file for item in items] == [
        *(f"a.tar/{n:04}.png" for n in range(5)),
        *(f"b.tar/{n:04}.png" for n in range(5, 9)),
    ]
    assert [item.caption for item in items] == [f"words {n}" for n in range(9)]
    assert decode_picture(items[7].source)[0, 0].tolist() == [63, 50, 90]
    assert items[7].path == tmp_path / "set" / "b.tar"


def test_one_shard_as_the_data_set(tmp_path: Path, scan: Scan) -> None:
    report = scan(shard(tmp_path / "a.tar", 0, 3))
    assert [item.file for item in report.items] == [f"a.tar/{n:04}.png" for n in range(3)]


@pytest.mark.parametrize("workers", [0, 1])
def test_shards_train_like_a_folder(workers: int, tmp_path: Path, scan: Scan, vae: AutoencoderKL) -> None:
    shard(tmp_path / "tar" / "a.tar", 0, 6)
    for index in range(6):
        write(tmp_path / "flat", f"{index:04}.png", png(64, 64, (index * 9 % 256, 50, 90)))
    tar, flat = scan(tmp_path / "tar").items, scan(tmp_path / "flat").items
    assert [item.content_hash for item in tar] == [item.content_hash for item in flat]
    dataset = DatasetConfig(workers=workers)
    cache = LatentCache(tmp_path / "cache", vae, "v", dataset)
    assert cache.ensure(tar) == 6
    assert cache.ensure(flat) == 0
    loader = BatchLoader(BatchPlan(tar, 4, Draws(3)), cache, None, dataset)
    for refs in loader.plan.batches(0):
        batch = loader.load(0, refs)
        for at, ref in enumerate(refs):
            assert torch.equal(batch.mean_BCHW[at], cache.load(flat[ref.item_index]).mean_CHW)
            assert batch.captions[at] == f"words {ref.item_index}"


def test_resuming_at_a_sample_needs_nothing_but_the_epoch_and_the_step(tmp_path: Path, scan: Scan) -> None:
    items = scan(shard(tmp_path / "a.tar", 0, 10)).items
    unbroken = [refs for epoch in range(2) for refs in BatchPlan(items, 3, Draws(1)).batches(epoch)]
    resumed = BatchPlan(scan(tmp_path / "a.tar").items, 3, Draws(1))
    assert [*resumed.batches(0)[2:], *resumed.batches(1)] == unbroken[2:]


def test_damaged_shards_are_named_and_the_rest_is_used(tmp_path: Path, scan: Scan) -> None:
    good = shard(tmp_path / "set" / "good.tar", 0, 2)
    write(tmp_path / "set", "cut.tar", good.read_bytes()[: 512 * 8 + 10])
    write(tmp_path / "set", "gzip.tar", b"\x1f\x8b" + b"x" * 1000)
    report = scan(tmp_path / "set")
    assert {item.file for item in report.items} >= {"good.tar/0000.png", "good.tar/0001.png"}
    reasons = dict(report.refused)
    assert "truncated" in reasons["cut.tar"] or "damaged" in reasons["cut.tar"]
    assert "no plain tar archive" in reasons["gzip.tar"]


def test_shards_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo_module, "_FRESH_NS", 0)
    path = shard(tmp_path / "a.tar", 0, 4)

    def again() -> ScanReport:
        return scan_dataset(DatasetConfig(path=str(path)), BucketConfig(), 64, cache_dir=tmp_path / "cache")

    first, second = again(), again()
    assert (first.decoded, second.decoded) == (4, 0)
    assert first.to_json() == second.to_json()


def test_names_and_locations() -> None:
    name = tar_name("dir/a.png", 512, 99)
    assert shown_name(name) == "dir/a.png"
    assert locate("/x/s.tar", name).startswith("/x/s.tar")
    assert shown_name("odd\x1fname.png") == "odd\x1fname.png"
