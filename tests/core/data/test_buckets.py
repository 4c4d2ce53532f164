"""Buckets, their choice and the size values, equal to kohya's golden tables."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from trainer_core.config import BucketConfig
from trainer_core.data import BucketChooser, BucketLimits, bucket_list, crop_ltrb, resolve_limits
from trainer_core.data.buckets import crop_tl_letterbox, crop_tl_true

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "fixtures" / "kohya_golden.json").read_text())


@pytest.mark.parametrize("key", list(GOLDEN["bucket_resos"]))
def test_golden_bucket_lists(key: str) -> None:
    size, low, high, step = ast.literal_eval(key)
    assert [list(bucket) for bucket in bucket_list(size, low, high, step)] == GOLDEN["bucket_resos"][key]


def test_golden_list_has_41_buckets() -> None:
    assert len(bucket_list((1024, 1024), 256, 2048, 64)) == 41


@pytest.mark.parametrize("row", GOLDEN["select_bucket"], ids=lambda row: f"{row['img']}-{row['no_upscale']}")
def test_golden_bucket_choice(row: dict[str, Any]) -> None:
    limits = BucketLimits((1024, 1024), 256, 2048, 64, upscale=not row["no_upscale"])
    place = BucketChooser(limits).place(*row["img"])
    assert list(place.bucket) == row["reso"]
    assert list(place.resized) == row["resized"]
    ratio_error = place.bucket[0] / place.bucket[1] - row["img"][0] / row["img"][1]
    assert ratio_error == pytest.approx(row["ar_err"], abs=1e-12)
    assert list(crop_ltrb(place.bucket, tuple(row["img"]))) == pytest.approx(row["crop_ltrb"], abs=1e-9)


def test_limits_follow_the_native_size() -> None:
    limits = resolve_limits(None, BucketConfig(), 1024)
    assert (limits.size, limits.min_side, limits.max_side, limits.step) == ((1024, 1024), 256, 2048, 64)
    toy = resolve_limits(None, BucketConfig(), 64)
    assert (toy.size, toy.min_side, toy.max_side, toy.step) == ((64, 64), 16, 128, 8)
    half = resolve_limits((512, 512), BucketConfig(), 1024)
    assert (half.min_side, half.max_side, half.step) == (256, 2048, 64)
    small = resolve_limits((128, 128), BucketConfig(), 1024)
    assert (small.min_side, small.max_side, small.step) == (32, 256, 8)


def test_ties_go_to_the_first_bucket_of_the_list() -> None:
    chooser = BucketChooser(BucketLimits((1024, 1024), 256, 2048, 64))
    for index, (width, height) in enumerate(chooser.buckets):
        for ratio in (width / height, width / height * 1.01, width / height * 0.99):
            best = min(chooser.buckets, key=lambda bucket: abs(bucket[0] / bucket[1] - ratio))
            assert chooser.place(round(ratio * 100000), 100000).bucket == best, index


def test_kind_conditioning_true_crop_of_a_cut_picture() -> None:
    """B56: a 100x64 picture cut to 96x64 at left 4; mirrored, the offset is counted from the other side."""
    assert crop_tl_true((96, 64), (100, 64), flipped=False, left=4) == (0, 4)
    assert crop_tl_true((96, 64), (100, 64), flipped=True, left=4) == (0, 0)
    assert crop_tl_true((96, 64), (100, 64), flipped=False) == (0, 2)


def test_kind_conditioning_letterbox_mirrors_with_the_picture() -> None:
    bucket, original = (832, 1216), (1000, 1500)
    assert crop_tl_letterbox(bucket, original, flipped=False) == (0, 10)
    assert crop_tl_letterbox(bucket, original, flipped=True) == (0, 11)  # int(832 - 820.67)
