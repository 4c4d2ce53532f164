"""Caches, batches and the kinds cache, vae-precision, conditioning and determinism."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors import safe_open

from trainer_core.config import DatasetConfig
from trainer_core.data import (
    BatchLoader,
    BatchPlan,
    Item,
    LatentCache,
    ScanReport,
    StopRequested,
    TextCache,
    captions_to_encode,
)
from trainer_core.data.cache_files import HOLE, DigestMaker, ShardStore, digest
from trainer_core.data.subset import Subset
from trainer_core.data.table import ItemTable
from trainer_core.draws import Draws
from trainer_core.errors import DatasetError, NonFiniteError, ResourceError
from trainer_core.models import SDXLModel, encode_images, load_sdxl

from .test_kind_pictures import png, write

Scan = Callable[..., ScanReport]


@pytest.fixture(scope="session")
def toy() -> SDXLModel:
    return load_sdxl("toy")


def cache_in(folder: Path, vae: AutoencoderKL, **options: Any) -> LatentCache:
    return LatentCache(folder, vae, "vae-1", DatasetConfig(**{"workers": 0, **options}))


def pictures(folder: Path, count: int, scan: Scan, size: int = 64) -> ScanReport:
    for index in range(count):
        write(folder, f"{index:03}.png", png(size, size, (index * 7 % 256, 90, 120)))
        write(folder, f"{index:03}.txt", f"picture {index}".encode())
    return scan(folder)


# ------------------------------------------------------------------ cache
def test_kind_cache_edited_picture_with_the_same_stamp(
    cases: dict[str, Any], scan: Scan, vae: AutoencoderKL, tmp_path: Path
) -> None:
    folder, source = tmp_path / "set", cases["stale_cache"].data
    means, words = [], []
    for version in ("v1", "v2"):
        for name in ("img.bmp", "img.txt"):
            target = write(folder, name, (source / version / name).read_bytes())
            stat = (source / version / name).stat()
            os.utime(target, (stat.st_atime, stat.st_mtime))
        report = scan(folder)
        cache = cache_in(tmp_path / "cache", vae)
        assert cache.ensure(report.items) == 1
        means.append(cache.load(report.items[0]).mean_CHW)
        words.append(report.items[0].caption)
    assert words == ["old words", "new words"]
    colours = torch.tensor([[220, 40, 40], [40, 60, 220]]).view(2, 3, 1, 1).expand(2, 3, 64, 64) / 127.5 - 1
    with torch.no_grad():
        wanted = encode_images(vae, colours).mean_BCHW
    assert torch.stack(means).sub(wanted).abs().max() < 1e-4
    assert wanted[0].sub(wanted[1]).abs().max() > 1e-2


def test_kind_cache_same_stem_keeps_own_pixels(
    cases: dict[str, Any], scan: Scan, vae: AutoencoderKL, tmp_path: Path
) -> None:
    for name in ("duplicate_stems", "nested_same_stem", "prefix_stems", "long_names", "unicode_names"):
        case = cases[name]
        report = scan(case.data, recursive=True)
        cache = cache_in(tmp_path / name, vae)
        assert cache.ensure(report.items) == len(report.items), name
        found = [cache.load(item).mean_CHW for item in report.items]
        for at, one in enumerate(found):
            assert not any(torch.equal(one, other) for other in found[:at]), name
        for path in (tmp_path / name).iterdir():
            assert len(path.name.encode()) < 143


def test_kind_cache_reads_what_it_wrote_and_makes_nothing_twice(scan: Scan, vae: AutoencoderKL, tmp_path: Path) -> None:
    report = pictures(tmp_path / "set", 5, scan)
    first = cache_in(tmp_path / "cache", vae)
    assert first.ensure(report.items) == 5
    second = cache_in(tmp_path / "cache", vae)
    assert second.ensure(report.items) == 0
    for item in report.items:
        assert torch.equal(first.load(item).mean_CHW, second.load(item).mean_CHW)
        assert first.load(item).std_CHW.dtype == torch.float32


@pytest.mark.parametrize("change", ["background", "interpolation", "vae", "bucket", "flip"])
def test_kind_cache_key_holds_everything_that_changes_the_result(
    change: str, scan: Scan, vae: AutoencoderKL, tmp_path: Path
) -> None:
    item = pictures(tmp_path / "set", 1, scan, size=96).items[0]
    base = cache_in(tmp_path / "cache", vae)
    keys = {base.key(item, False)}
    if change == "vae":
        keys.add(LatentCache(tmp_path / "cache", vae, "vae-2", DatasetConfig()).key(item, False))
    elif change == "bucket":
        keys.add(base.key(replace(item, bucket=(48, 80)), False))
    elif change == "flip":
        keys.add(base.key(item, True))
    else:
        value = {"background": (0, 0, 0), "interpolation": "box"}[change]
        keys.add(base.key(replace(item, spec=replace(item.spec, **{change: value})), False))
    assert len(keys) == 2


def test_kind_cache_latent_does_not_depend_on_its_neighbours(scan: Scan, vae: AutoencoderKL, tmp_path: Path) -> None:
    report = pictures(tmp_path / "set", 20, scan)
    together = cache_in(tmp_path / "a", vae)
    together.ensure(report.items)
    alone = cache_in(tmp_path / "b", vae)
    for item in report.items[:3]:
        alone.ensure([item])
        assert torch.equal(alone.load(item).mean_CHW, together.load(item).mean_CHW)


@pytest.mark.parametrize("workers", [1, 2])
def test_kind_determinism_worker_processes_change_nothing(
    workers: int, scan: Scan, vae: AutoencoderKL, tmp_path: Path
) -> None:
    report = pictures(tmp_path / "set", 20, scan, size=80)
    alone, helped = cache_in(tmp_path / "a", vae), cache_in(tmp_path / "b", vae, workers=workers)
    alone.ensure(report.items)
    helped.ensure(report.items)
    for item in report.items:
        assert torch.equal(alone.load(item).mean_CHW, helped.load(item).mean_CHW)


def test_kind_cache_mirrored_latents_are_their_own(
    scan: Scan, vae: AutoencoderKL, tmp_path: Path, generator: Any
) -> None:
    write(tmp_path / "set", "a.png", generator.enc(generator.quad(64, 64), "PNG"))
    item = scan(tmp_path / "set", flip=True).items[0]
    cache = cache_in(tmp_path / "cache", vae)
    assert cache.ensure([item]) == 2
    assert not torch.equal(cache.load(item, False).mean_CHW, cache.load(item, True).mean_CHW)


@pytest.mark.parametrize("damage", ["cut", "empty", "header", "bit"])
def test_kind_cache_damaged_file_is_made_again(
    damage: str, scan: Scan, vae: AutoencoderKL, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = pictures(tmp_path / "set", 3, scan)
    cache = cache_in(tmp_path / "cache", vae)
    cache.ensure(report.items)
    good = [cache.load(item).mean_CHW for item in report.items]
    (path,) = (tmp_path / "cache").iterdir()
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[-5] ^= 0x40
    spoilt = {"cut": data[: len(data) // 2], "empty": b"", "header": b"\xff" * 8 + data[8:], "bit": data}[damage]
    path.write_bytes(bytes(spoilt))
    with caplog.at_level(logging.WARNING):
        again = cache_in(tmp_path / "cache", vae)
        again.ensure(report.items)
        found = [again.load(item).mean_CHW for item in report.items]
    assert all(torch.equal(a, b) for a, b in zip(good, found, strict=True))
    assert path.name in caplog.text


def test_kind_cache_unwritable_folder_is_named(scan: Scan, vae: AutoencoderKL, tmp_path: Path) -> None:
    write(tmp_path, "file", b"")
    with pytest.raises(ResourceError, match="cannot be made"):
        cache_in(tmp_path / "file" / "cache", vae)


def test_kind_cache_unwritable_folder_is_refused_with_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer_core.config import TrainConfig
    from trainer_core.config_rules import problems
    from trainer_core.preflight import preflight

    (tmp_path / "file").write_text("")
    config = replace(TrainConfig(), dataset=DatasetConfig(cache_dir=str(tmp_path / "file" / "cache")))
    found = [problem for problem in problems(config) if problem.field == "dataset.cache_dir"]
    assert [problem.why for problem in found] == [f"{tmp_path / 'file'} is a file"]
    config = replace(TrainConfig(), dataset=DatasetConfig(cache_dir=str(tmp_path / "new" / "cache")))
    others = {"model.path", "lora.weights", "run.device"}
    assert not [problem for problem in problems(config) if problem.field == "dataset.cache_dir"]
    assert preflight(config, others) == []

    def read_only(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("trainer_core.preflight.tempfile.TemporaryFile", read_only)
    (problem,) = preflight(config, others)
    assert (problem.field, problem.why) == (
        "dataset.cache_dir",
        f"{tmp_path} cannot be written: Read-only file system",
    )


def test_kind_cache_too_little_room_is_told_before_the_work(
    scan: Scan, vae: AutoencoderKL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = pictures(tmp_path / "set", 3, scan)
    cache = cache_in(tmp_path / "cache", vae)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 3 * 8 * 8 * 32 - 1))  # type: ignore[attr-defined]
    with pytest.raises(ResourceError, match=r"latents of 3 pictures need 0\.0 GiB.*dataset\.cache_dir"):
        cache.ensure(report.items)
    assert len(cache.store) == 0
    monkeypatch.undo()
    assert cache.ensure(report.items) == 3


def test_kind_cache_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ShardStore(tmp_path, "latents", ("mean",))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer_core.data.cache_files.os.fsync", full)
    with pytest.raises(ResourceError, match="it needs [0-9,]+ bytes, [0-9,]+ are free"):
        store.put({"key": {"mean": torch.zeros(4)}})
    assert list(tmp_path.iterdir()) == []


def test_kind_cache_stop_keeps_what_was_done(scan: Scan, vae: AutoencoderKL, tmp_path: Path) -> None:
    report = pictures(tmp_path / "set", 40, scan)
    cache = cache_in(tmp_path / "cache", vae)
    with pytest.raises(StopRequested):
        cache.ensure(report.items, should_stop=lambda: True)
    assert len(cache_in(tmp_path / "cache", vae).store) == 16
    assert cache_in(tmp_path / "cache", vae).ensure(report.items) == 24


def test_kind_cache_picture_changed_after_the_scan_is_named(scan: Scan, vae: AutoencoderKL, tmp_path: Path) -> None:
    report = pictures(tmp_path / "set", 2, scan)
    write(tmp_path / "set", "001.png", png(64, 64, (1, 2, 3)))
    with pytest.raises(DatasetError, match="001.png: the file was changed"):
        cache_in(tmp_path / "cache", vae).ensure(report.items)


# ------------------------------------------------------------------ vae-precision
class Broken(torch.nn.Module):
    """Turns what passes through into NaN for pictures that are bright on average."""

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        bright_B = x_BCHW.mean(dim=(1, 2, 3)) > 0.5
        return torch.where(bright_B.view(-1, 1, 1, 1), torch.nan, x_BCHW)


def test_kind_vae_precision_non_finite_latent_names_the_picture_and_writes_nothing(
    scan: Scan, vae: AutoencoderKL, tmp_path: Path
) -> None:
    for index, colour in enumerate([(10, 10, 10), (250, 250, 250), (30, 30, 30)]):
        write(tmp_path / "set", f"{index}.png", png(64, 64, colour))
    report = scan(tmp_path / "set")
    hook = vae.encoder.conv_in.register_forward_pre_hook(lambda _, inputs: (Broken()(inputs[0]),))
    try:
        with pytest.raises(NonFiniteError, match=r"NaN or infinity, in fp32\) for: 1\.png\.") as caught:
            cache_in(tmp_path / "cache", vae).ensure(report.items)
    finally:
        hook.remove()
    assert caught.value.sample_ids == ("1.png",)
    assert list((tmp_path / "cache").iterdir()) == []


def test_digest_maker_equals_digest() -> None:
    maker = DigestMaker("latents-1", HOLE, "vae", (64, 64), False)
    assert maker("00ff") == digest("latents-1", "00ff", "vae", (64, 64), False)


# ------------------------------------------------------------------ batches
def loader_for(report: ScanReport, vae: AutoencoderKL, folder: Path, **options: Any) -> BatchLoader:
    dataset = DatasetConfig(**{"workers": 0, **options})
    cache = LatentCache(folder, vae, "vae-1", dataset)
    cache.ensure(report.items)
    return BatchLoader(BatchPlan(report.items, 3, Draws(5)), cache, None, dataset)


def test_kind_cache_latent_and_caption_stay_together(scan: Scan, vae: AutoencoderKL, tmp_path: Path) -> None:
    """B52: six pictures, shuffled order, three epochs: 18 pairs, all of one picture."""
    report = pictures(tmp_path / "set", 6, scan)
    loader = loader_for(report, vae, tmp_path / "cache")
    own = {item.caption: loader.latents.load(item).mean_CHW for item in report.items}
    seen = 0
    for epoch in range(3):
        for refs in loader.plan.batches(epoch):
            batch = loader.load(epoch, refs)
            for at, caption in enumerate(batch.captions):
                assert torch.equal(batch.mean_BCHW[at], own[caption])
                seen += 1
    assert seen == 18


def test_kind_conditioning_size_values_are_per_picture_and_mirrored(
    vae: AutoencoderKL, tmp_path: Path, scan: Scan
) -> None:
    write(tmp_path / "set", "a.png", png(70, 100))
    report = scan(tmp_path / "set", flip=True)
    item = report.items[0]
    assert (item.upright_size, item.bucket) == ((70, 100), (56, 72))
    loader = loader_for(report, vae, tmp_path / "cache", flip=True)
    seen = set()
    for epoch in range(20):
        (refs,) = loader.plan.batches(epoch)
        seen.add(tuple(loader.load(epoch, refs).time_ids_B6[0].tolist()))
    # kohya's letterbox: the picture inside its bucket is 50.4 wide, so 2 pixels left, and 56 - 52.4 = 3 when mirrored
    assert seen == {(100, 70, 0, 2, 72, 56), (100, 70, 0, 3, 72, 56)}


def test_kind_resume_state_a_new_attempt_draws_anew_and_keeps_the_pictures(
    vae: AutoencoderKL, tmp_path: Path, scan: Scan
) -> None:
    """After a rollback (attempt + 1) flips and caption choices differ; which pictures a batch holds does not."""
    for index in range(9):
        write(tmp_path / "set", f"{index}.png", png(70, 100, (index, 0, 0)))  # mirrored = other size values
        write(tmp_path / "set", f"{index}.txt", b"a, b, c, d, e, f")
    report = scan(tmp_path / "set", flip=True, shuffle_caption=True)
    loader = loader_for(report, vae, tmp_path / "cache", flip=True)

    def epoch(draws: Draws | None) -> tuple[list[str], list[str], torch.Tensor]:
        batches = [loader.load(0, refs, draws=draws) for refs in loader.plan.batches(0)]
        files = [file for batch in batches for file in batch.files]
        captions = [caption for batch in batches for caption in batch.captions]
        return files, captions, torch.cat([batch.time_ids_B6 for batch in batches])

    first, same, again = epoch(None), epoch(Draws(5)), epoch(Draws(5, attempt=1))
    assert first[:2] == same[:2]
    assert torch.equal(first[2], same[2])
    assert first[0] == again[0]
    assert first[1] != again[1]
    assert not torch.equal(first[2], again[2])


def test_batches_never_mix_buckets_and_carry_weights(vae: AutoencoderKL, tmp_path: Path, scan: Scan) -> None:
    for index in range(4):
        write(tmp_path / "set", f"{index}.png", png(64, 64, (index, 0, 0)))
        write(tmp_path / "prior", f"{index}.png", png(64, 128, (index, 0, 9)))
    report = scan(tmp_path / "set", prior_path=str(tmp_path / "prior"), prior_loss_weight=0.25)
    loader = loader_for(report, vae, tmp_path / "cache")
    weights = []
    for refs in loader.plan.batches(0):
        batch = loader.load(0, refs)
        assert batch.mean_BCHW.shape[0] == len(refs) == len(batch.files) == len(batch.sample_keys)
        weights += batch.weights_B.tolist()
    assert sorted(weights) == [0.25] * 4 + [1.0] * 4


def test_kind_determinism_order_is_a_function_of_seed_and_epoch(tmp_path: Path, scan: Scan) -> None:
    items = pictures(tmp_path / "set", 9, scan).items
    orders = [
        [list(b) for b in BatchPlan(items, 2, Draws(seed)).batches(epoch)]
        for seed, epoch in ((7, 0), (7, 0), (8, 0), (7, 1))
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != orders[3]


def test_only_pictures_that_the_planned_steps_see_are_named(tmp_path: Path, scan: Scan) -> None:
    items = pictures(tmp_path / "set", 9, scan).items
    plan = BatchPlan(items, 2, Draws(7))
    for steps, accumulation in ((1, 1), (2, 1), (2, 2), (4, 1)):
        seen = plan.items_seen(steps, accumulation)
        refs = [ref for batch in plan.batches(0)[: steps * accumulation] for ref in batch]
        assert [item.file for item in seen] == [items[at].file for at in sorted({ref.item_index for ref in refs})]
        assert len(seen) < 9
    assert list(plan.items_seen(5, 1)) == list(items)
    assert list(plan.items_seen(3, 2)) == list(items)


def test_plan_of_a_table_and_of_a_list_is_one(tmp_path: Path, scan: Scan) -> None:
    for index in range(9):
        write(tmp_path / "set" / "2_wide", f"{index}.png", png(128, 64, (index, 0, 0)))
        write(tmp_path / "set" / "1_square", f"{index}.png", png(64, 64, (index, 9, 0)))
    table = scan(tmp_path / "set").items
    assert isinstance(table, ItemTable)
    some = Subset(table, [0, 3, 4, 11, 17])
    for items in (table, some):
        plan, plain = BatchPlan(items, 4, Draws(7)), BatchPlan(list(items), 4, Draws(7))
        assert plan.groups == plain.groups
        assert plan.group_samples == plain.group_samples
        assert list(plan.batches(1)) == list(plain.batches(1))
        assert plan.largest_batch() == plain.largest_batch()


def test_repeats_are_samples_of_their_own(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "3_thing/a.png", png())
    write(tmp_path, "1_other/b.png", png(64, 64, (1, 1, 1)))
    plan = BatchPlan(scan(tmp_path).items, 2, Draws(1))
    refs = [ref for batch in plan.batches(0) for ref in batch]
    assert sorted((ref.item_index, ref.repeat) for ref in refs) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert len({ref.key for ref in refs}) == 4


def test_largest_batch_is_found(tmp_path: Path, scan: Scan) -> None:
    for index in range(15):
        write(tmp_path, f"{index}.png", png(32, 32, (index, 0, 0)))
    write(tmp_path, "big.png", png(128, 128))
    from trainer_core.config import BucketConfig

    report = scan(tmp_path, bucket=BucketConfig(upscale=False), resolution=(128, 128))
    plan = BatchPlan(report.items, 1, Draws(1))
    assert [report.items[ref.item_index].file for ref in plan.largest_batch()] == ["big.png"]


# ------------------------------------------------------------------ text
def test_text_cache_equals_the_encoders_and_knows_the_empty_caption(toy: SDXLModel, tmp_path: Path) -> None:
    cache = TextCache(tmp_path, toy, 150)
    assert cache.ensure(["a red heart", "a blue star"]) == 3
    found = cache.encode(["a blue star", ""])
    assert found.context_BTD.shape[:2] == (2, 152)
    again = TextCache(tmp_path, toy, 150)
    assert again.ensure(["a red heart", ""]) == 0
    assert torch.equal(again.encode([""]).context_BTD[0], found.context_BTD[1])
    assert TextCache(tmp_path, toy, 75).key("a") != cache.key("a")


def test_text_cache_encodes_an_unknown_caption_on_the_spot_to_the_same_bits(toy: SDXLModel, tmp_path: Path) -> None:
    before = TextCache(tmp_path / "a", toy)
    before.ensure([f"caption {n}" for n in range(10)])
    after = TextCache(tmp_path / "b", toy)
    assert torch.equal(after.encode(["caption 4"]).pooled_BD, before.encode(["caption 4"]).pooled_BD)


def test_kind_cache_text_follows_the_caption(toy: SDXLModel, vae: AutoencoderKL, tmp_path: Path, scan: Scan) -> None:
    report = pictures(tmp_path / "set", 4, scan)
    dataset = DatasetConfig(workers=0, caption_dropout=0.5)
    items = [replace(item, spec=replace(item.spec, rules=replace(item.rules, dropout=0.5))) for item in report.items]
    latents = LatentCache(tmp_path / "cache", vae, "vae-1", dataset)
    latents.ensure(items)
    texts = TextCache(tmp_path / "cache", toy)
    captions = captions_to_encode(items)
    assert captions == ["", *(f"picture {n}" for n in range(4))]
    texts.ensure(captions)
    loader = BatchLoader(BatchPlan(items, 2, Draws(5)), latents, texts, dataset)
    empty = 0
    for epoch in range(4):
        for refs in loader.plan.batches(epoch):
            batch = loader.load(epoch, refs)
            assert batch.context_BTD is not None
            for at, caption in enumerate(batch.captions):
                empty += caption == ""
                assert torch.equal(batch.context_BTD[at], texts.encode([caption]).context_BTD[0])
    assert 3 <= empty <= 13


def test_shards_are_plain_safetensors(scan: Scan, vae: AutoencoderKL, tmp_path: Path) -> None:
    item: Item = pictures(tmp_path / "set", 1, scan).items[0]
    cache = cache_in(tmp_path / "cache", vae)
    cache.ensure([item])
    (path,) = (tmp_path / "cache").iterdir()
    with safe_open(path, "pt") as shard:
        assert set(shard.keys()) == {f"{cache.key(item, False)}/mean", f"{cache.key(item, False)}/std"}
