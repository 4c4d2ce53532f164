"""Kinds of public bug reports about pictures: image-decode, damaged-file, discovery, bucket."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from trainer_core.config import BucketConfig, DatasetConfig
from trainer_core.data import BatchPlan, ScanReport, decode_picture, examine_dataset
from trainer_core.data.decode import examine_picture, parse_background
from trainer_core.draws import Draws
from trainer_core.errors import ConfigError, DatasetError

Scan = Callable[..., ScanReport]


def write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def png(width: int = 64, height: int = 64, colour: tuple[int, int, int] = (220, 40, 40)) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, "PNG")
    return buffer.getvalue()


# ------------------------------------------------------------------ image-decode
@pytest.mark.parametrize("kind", ["TIFF", "WEBP", "PNG", "AVIF", "JPEG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_kind_image_decode_orientation_in_every_format(
    kind: str, orientation: int, generator: Any, tmp_path: Path
) -> None:
    upright = generator.quad(48, 72)
    stored = generator.stored_for(upright, orientation)
    options = {"tiffinfo": {0x0112: orientation}} if kind == "TIFF" else {"exif": generator.exif_bytes(orientation)}
    path = write(tmp_path, "picture", generator.enc(stored, kind, quality=95, **options))
    pixels = decode_picture(path)
    assert pixels.shape == (72, 48, 3)
    assert np.abs(pixels.astype(int)[[18, 18, 54, 54], [12, 36, 12, 36]] - [q[1] for q in generator.QUAD]).max() <= 14


def test_kind_image_decode_wide_grey_is_scaled_not_clipped(generator: Any, tmp_path: Path) -> None:
    grey = np.full((16, 16), 32768, np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in grey)
    clear = generator.chunk(b"tRNS", struct.pack(">H", 32768))
    for name, data, value in (
        ("deep.png", generator.png_raw(16, 16, 16, 0, rows), 128),
        ("clear.png", generator.png_raw(16, 16, 16, 0, rows, extra=clear), 255),
        ("deep.tif", generator.enc(Image.fromarray(grey), "TIFF"), 128),
        ("float.tif", generator.enc(Image.fromarray(np.full((16, 16), 0.5, np.float32)), "TIFF"), 128),
    ):
        assert np.unique(decode_picture(write(tmp_path, name, data))).tolist() == [value], name


def test_kind_image_decode_transparency_takes_the_background(generator: Any, tmp_path: Path) -> None:
    red = generator.flat(16, 16, (200, 0, 0))
    for name, data in (
        ("rgb.png", generator.enc(red, "PNG", transparency=(200, 0, 0))),
        ("grey.png", generator.enc(red.convert("L"), "PNG", transparency=red.convert("L").getpixel((0, 0)))),
        ("la.png", generator.enc(Image.merge("LA", (red.convert("L"), Image.new("L", (16, 16), 0))), "PNG")),
    ):
        path = write(tmp_path, name, data)
        assert decode_picture(path)[0, 0].tolist() == [255, 255, 255], name
        assert decode_picture(path, "#102030")[0, 0].tolist() == [16, 32, 48], name


def test_kind_image_decode_background_forms() -> None:
    assert parse_background("1,2,3") == (1, 2, 3)
    assert parse_background("black") == (0, 0, 0)
    with pytest.raises(DatasetError, match="background = 'colourful' is no colour"):
        parse_background("colourful")


def test_kind_image_decode_first_frame_with_a_note(generator: Any, tmp_path: Path, scan: Scan) -> None:
    first, second = generator.quad(64, 64), generator.flat(64, 64, (9, 9, 9))
    for name, kind in (("a.png", "PNG"), ("b.webp", "WEBP"), ("c.tif", "TIFF"), ("d.gif", "GIF")):
        write(tmp_path, name, generator.enc(first, kind, save_all=True, append_images=[second]))
    report = scan(tmp_path)
    assert len(report.items) == 4
    for item in report.items:
        assert np.abs(decode_picture(item.path)[8, 8].astype(int) - (220, 40, 40)).max() <= 20
        assert any("animated (2 frames)" in warning for warning in item.warnings)
    assert sum("animated" in warning for warning in report.warnings) == 1


def test_kind_image_decode_says_what_a_foreign_file_is(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "good.png", png())
    write(tmp_path, "a.png", b"%PDF-1.4 text")
    write(tmp_path, "b.jpg", b"version https://git-lfs.github.com/spec/v1\noid sha256:0")
    write(tmp_path, "c.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    write(tmp_path, "d.png", b"\0" * 99)
    write(tmp_path, "e.heic", b"\0\0\0\x18ftypheic")
    report = scan(tmp_path)
    reasons = dict(report.refused)
    assert "PDF" in reasons["a.png"]
    assert "git lfs pull" in reasons["b.jpg"]
    assert "PostScript" in reasons["c.jpg"]
    assert "zero bytes" in reasons["d.png"]
    assert any("e.heic" in warning for warning in report.warnings)
    assert [item.file for item in report.items] == ["good.png"]


JXL_START = b"\xff\x0a"
NO_JXL = "the plugin pillow-jxl-plugin is not installed (pip install pillow-jxl-plugin)"


def test_kind_image_decode_jpeg_xl_without_its_plugin_says_what_to_install(
    tmp_path: Path, scan: Scan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_core.data.decode._try_jxl_plugin", lambda: None)
    Image.init()
    monkeypatch.setattr(Image, "OPEN", {name: opener for name, opener in Image.OPEN.items() if name != "JXL"})
    folder = tmp_path / "set"
    for name, data in (("bare.jxl", JXL_START + bytes(40)), ("boxed.png", b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(40))):
        os.utime(write(folder, name, data), (1e9, 1e9))
    write(folder, "good.png", png())
    report = scan(folder)
    assert [item.file for item in report.items] == ["good.png"]
    reason = "a JPEG XL picture, and no decoder is installed for these: pip install pillow-jxl-plugin"
    assert report.refused == (("bare.jxl", reason), ("boxed.png", reason))
    assert examine_picture(folder / "bare.jxl").content_hash == ""  # so it is looked at again when the plugin is there


def test_kind_image_decode_jpeg_xl_with_its_plugin(generator: Any, tmp_path: Path, scan: Scan) -> None:
    pytest.importorskip("pillow_jxl", reason=NO_JXL)
    folder = tmp_path / "set"
    noise = np.random.default_rng(0).integers(0, 256, (72, 48, 3), dtype=np.uint8)
    clear = np.dstack([noise, np.zeros((72, 48), np.uint8)])
    deep = (np.arange(64 * 64).reshape(64, 64) * 16).astype(np.uint16)
    files = {
        "plain.jxl": generator.enc(Image.fromarray(noise), "JXL", lossless=True),
        "ending.png": generator.enc(Image.fromarray(noise), "JXL", quality=90),
        "clear.jxl": generator.enc(Image.fromarray(clear), "JXL", lossless=True),
        "deep.jxl": generator.enc(Image.fromarray(deep), "JXL", lossless=True),
    }
    files["cut.jxl"] = files["plain.jxl"][: len(files["plain.jxl"]) // 2]
    for name, data in files.items():
        write(folder, name, data)
    report = scan(folder)
    assert [(item.file, item.upright_size) for item in report.items] == [
        ("clear.jxl", (48, 72)),
        ("deep.jxl", (64, 64)),
        ("ending.png", (48, 72)),
        ("plain.jxl", (48, 72)),
    ]
    assert report.refused == (("cut.jxl", "truncated or damaged: its JPEG XL data cannot be decoded"),)
    assert np.array_equal(decode_picture(folder / "plain.jxl"), noise)
    assert (decode_picture(folder / "clear.jxl") == 255).all()
    assert np.unique(decode_picture(folder / "deep.jxl")).size >= 200


# ------------------------------------------------------------------ damaged-file
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
@pytest.mark.parametrize("share", [0.4, 0.9])
def test_kind_damaged_file_cut_in_every_format(kind: str, share: float, generator: Any, tmp_path: Path) -> None:
    whole = generator.enc(generator.noise(96, 96, 3), kind)
    facts = examine_picture(write(tmp_path, "cut", whole[: int(len(whole) * share)]))
    assert facts.reason is not None
    assert "truncated" in facts.reason or "damaged" in facts.reason


def test_kind_damaged_file_png_checksum_and_end(generator: Any, tmp_path: Path) -> None:
    whole = png()
    assert "truncated" in (examine_picture(write(tmp_path, "a.png", whole[:-12])).reason or "")
    spoilt = bytearray(whole)
    spoilt[-20] ^= 1  # checksum of the pixel block
    assert "damaged" in (examine_picture(write(tmp_path, "b.png", bytes(spoilt))).reason or "")
    assert examine_picture(write(tmp_path, "c.png", whole + b"trailing")).reason is None


def test_kind_damaged_file_others_tolerance_does_not_hide_it(
    generator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)  # as other programs in one process set it
    whole = generator.enc(generator.noise(96, 96, 3), "JPEG")
    assert "truncated" in (examine_picture(write(tmp_path, "a.jpg", whole[: len(whole) // 2])).reason or "")
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_kind_damaged_file_broken_exif_is_no_reason_to_refuse(generator: Any, tmp_path: Path) -> None:
    data = generator.enc(generator.quad(64, 64), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert examine_picture(write(tmp_path, "a.jpg", data)).reason is None


def test_kind_damaged_file_bombs_cost_neither_time_nor_memory(generator: Any, tmp_path: Path) -> None:
    import tracemalloc

    bmp = generator.enc(generator.quad(64, 64), "BMP")
    bombs = {
        "a.png": generator.png_raw(100000, 100000, 8, 2, b"\0" * 64),
        "b.bmp": bmp[:18] + struct.pack("<ii", 100000, 100000) + bmp[26:],
        "c.gif": b"GIF89a" + struct.pack("<HH", 65535, 65535) + generator.enc(generator.quad(64, 64), "GIF")[10:],
    }
    start = time.perf_counter()
    tracemalloc.start()
    for name, data in bombs.items():
        assert "pixels" in (examine_picture(write(tmp_path, name, data)).reason or ""), name
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.perf_counter() - start < 2
    assert peak < 20 * 2**20


def test_kind_damaged_file_strict_refuses_the_set_and_names_all(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "good.png", png())
    write(tmp_path, "empty.png", b"")
    write(tmp_path, "html.jpg", b"<html>")
    with pytest.raises(DatasetError, match="strict = true, and 2 pictures") as caught:
        scan(tmp_path, strict=True)
    assert "empty.png: empty file" in str(caught.value)
    assert "html.jpg: not an image" in str(caught.value)


def test_kind_damaged_file_worker_processes_find_the_same(tmp_path: Path, cases: dict[str, Any], scan: Scan) -> None:
    for index in range(70):  # above the number that is decoded in this process
        write(tmp_path, f"p{index:02}.png", png(64, 64, (index, 0, 0)))
    write(tmp_path, "cut.jpg", (cases["truncated_jpeg"].data / "cut.jpg").read_bytes())
    alone, helped = scan(tmp_path, workers=0), scan(tmp_path, workers=1)
    assert alone.to_json() == helped.to_json()
    assert [file for file, _ in helped.refused] == ["cut.jpg"]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the administrator may read everything")
def test_kind_damaged_file_without_permission(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "good.png", png())
    write(tmp_path, "locked.png", png()).chmod(0)
    assert scan(tmp_path).refused == (("locked.png", "cannot be read: permission denied"),)


# ------------------------------------------------------------------ discovery
@pytest.mark.parametrize(
    "form", ["{}", " {}", "{} ", "{}\n", '"{}"', "'{}'", "{}/", '"{}/" ', "\u201c{}\u201d", "{}//"]
)
def test_kind_discovery_folder_as_people_type_it(form: str, tmp_path: Path, scan: Scan) -> None:
    write(tmp_path / "my pictures", "a.png", png())
    assert [item.file for item in scan(form.format(tmp_path / "my pictures")).items] == ["a.png"]


def test_kind_discovery_missing_folder_is_shown_between_marks(tmp_path: Path, scan: Scan) -> None:
    with pytest.raises(DatasetError, match="The folder '.*nowhere' does not exist. The nearest folder that does is"):
        scan(f"  {tmp_path}/nowhere  ")
    with pytest.raises(DatasetError, match="is a file"):
        scan(write(tmp_path, "a.png", png()))
    with pytest.raises(DatasetError, match="No folder of pictures was given"):
        scan("  ")


def test_kind_discovery_kohya_folders(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "10_sks dog/a.png", png())
    write(tmp_path, "10_sks dog/b.png", png(64, 64, (1, 2, 3)))
    write(tmp_path, "10_sks dog/b.txt", b"a dog that runs")
    write(tmp_path, "3_cat/c.png", png(64, 64, (1, 2, 4)))
    write(tmp_path, "other/d.png", png(64, 64, (1, 2, 5)))
    report = scan(tmp_path)
    assert [(item.file, item.repeats, item.caption) for item in report.items] == [
        ("10_sks dog/a.png", 10, "sks dog"),
        ("10_sks dog/b.png", 10, "a dog that runs"),
        ("3_cat/c.png", 3, "cat"),
    ]
    assert any("sub-folders are left out: other (1)" in warning for warning in report.warnings)


def test_kind_discovery_prior_set_has_its_own_weight(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "own/a.png", png())
    write(tmp_path, "prior/a.png", png(64, 64, (1, 2, 3)))
    report = scan(tmp_path / "own", prior_path=str(tmp_path / "prior"), prior_loss_weight=0.5)
    assert [(item.file, item.is_prior, item.loss_weight) for item in report.items] == [
        ("a.png", False, 1.0),
        ("prior:a.png", True, 0.5),
    ]
    with pytest.raises(DatasetError, match="are the same folder"):
        scan(tmp_path / "own", prior_path=str(tmp_path / "own"))


def test_kind_discovery_prior_set_inside_the_set_is_not_counted_twice(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "a.png", png())
    write(tmp_path, "reg/b.png", png(64, 64, (1, 2, 3)))
    report = scan(tmp_path, prior_path=str(tmp_path / "reg"), recursive=True)
    assert [item.file for item in report.items] == ["a.png", "prior:b.png"]


def test_kind_discovery_kohya_balance_of_prior_pictures(tmp_path: Path, scan: Scan) -> None:
    for index in range(7):
        write(tmp_path, f"own/{index}.png", png(64, 64, (index, 0, 0)))
    for index in range(2):
        write(tmp_path, f"reg/{index}.png", png(64, 64, (0, index, 9)))
    report = scan(tmp_path / "own", prior_path=str(tmp_path / "reg"), compat="kohya")
    assert [item.repeats for item in report.items if item.is_prior] == [4, 3]


def test_kind_discovery_order_is_the_same_whatever_the_disk_says(tmp_path: Path, scan: Scan) -> None:
    for name in ("b.png", "a.png", "B.png", "aa.png", "a/z.png"):
        write(tmp_path, name, png())
    # a folder's own files first, then its sub-folders
    found = [item.file for item in scan(tmp_path, recursive=True).items]
    assert found == ["B.png", "a.png", "aa.png", "b.png", "a/z.png"]


def test_kind_discovery_system_folders_and_orphans(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "a.png", png())
    write(tmp_path, "__MACOSX/b.png", png())
    write(tmp_path, ".ipynb_checkpoints/a-checkpoint.png", png())
    write(tmp_path, "lonely.txt", b"words")
    report = scan(tmp_path, recursive=True)
    assert [item.file for item in report.items] == ["a.png"]
    assert report.ignored == ("lonely.txt",)
    assert any("without a picture of that name: lonely.txt" in warning for warning in report.warnings)


# ------------------------------------------------------------------ bucket
def plan_of(report: ScanReport, batch_size: int) -> BatchPlan:
    return BatchPlan(report.items, batch_size, Draws(7))


def test_kind_bucket_every_picture_once_in_short_batches_too(cases: dict[str, Any], scan: Scan) -> None:
    plan = plan_of(scan(cases["bucket_underfilled"].data), 4)
    assert plan.micro_batches_per_epoch == 2
    for epoch in range(3):
        batches = plan.batches(epoch)
        assert sorted(len(batch) for batch in batches) == [1, 4]
        assert sorted(ref.item_index for batch in batches for ref in batch) == [0, 1, 2, 3, 4]


def test_kind_bucket_one_picture_gives_a_step_an_epoch(cases: dict[str, Any], scan: Scan) -> None:
    plan = plan_of(scan(cases["one_image"].data), 4)
    assert plan.steps_per_epoch(4) == 1
    assert len(plan.batches(0)) == 1
    assert plan.accumulation_note(1) == ""
    assert "= 4, but an epoch has only 1 micro-batch, and" in plan.accumulation_note(4)
    assert "every step sees 1 sample." in plan.accumulation_note(4)


def test_kind_bucket_seven_pictures_accumulation_four(tmp_path: Path, scan: Scan) -> None:
    for index in range(7):
        write(tmp_path, f"{index}.png", png(64, 64, (index, 0, 0)))
    assert plan_of(scan(tmp_path), 1).steps_per_epoch(4) == 2


@pytest.mark.parametrize("upscale", [True, False])
@pytest.mark.parametrize("native", [64, 1024])
def test_kind_bucket_odd_sizes_never_give_a_zero_side(upscale: bool, native: int, tmp_path: Path, scan: Scan) -> None:
    sizes = [(8, 8), (8, 64), (63, 9), (2000, 251), (1, 1), (300, 7), (1025, 1), (64, 512)]
    for width, height in sizes:
        write(tmp_path, f"{width}x{height}.png", png(width, height))
    report = examine_dataset(DatasetConfig(path=str(tmp_path)), BucketConfig(upscale=upscale), native)
    assert len(report.items) + len(report.refused) == len(sizes)
    assert len(report.items) >= 5
    step = 64 if native == 1024 else 8
    for item in report.items:
        assert min(item.bucket) >= step
        assert all(side % step == 0 for side in item.bucket)
        assert item.resized[0] >= item.bucket[0]
        assert item.resized[1] >= item.bucket[1]


def test_kind_bucket_contradictory_limits_are_all_named(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "a.png", png())
    with pytest.raises(ConfigError, match="3 problems") as caught:
        scan(tmp_path, bucket=BucketConfig(min_size=128, max_size=32, step=12), resolution=(64, 64))
    assert {problem.field for problem in caught.value.problems} == {"bucket.min_size", "bucket.max_size", "bucket.step"}


def test_limits_of_buckets_say_nothing_without_buckets(tmp_path: Path, scan: Scan) -> None:
    """The kohya preset on a model of 64 pixels: its bucket.min_size of 256 refused a run without buckets."""
    write(tmp_path, "a.png", png())
    report = scan(tmp_path, bucket=BucketConfig(enabled=False, min_size=256, max_size=32), resolution=(64, 64))
    assert [item.bucket for item in report.items] == [(64, 64)]


def test_kind_bucket_one_size_when_switched_off(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "wide.png", png(200, 50))
    report = scan(tmp_path, bucket=BucketConfig(enabled=False))
    assert report.items[0].bucket == (64, 64)
    assert report.items[0].resized == (256, 64)
