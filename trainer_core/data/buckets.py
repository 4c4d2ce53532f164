"""Aspect buckets: which size each picture is trained at, and the size values SDXL is told about it.

Kohya's list and choice (facts: sd-scripts `library/model_util.py`, `make_bucket_resolutions`, and
`library/train_util.py`, `BucketManager`), equal to golden tables. Sizes are (width, height) in pixels unless a
name ends in `_hw` or `_tl`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

from ..config import BucketConfig
from ..errors import ConfigError, Problem

VAE_FACTOR = 8


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """Resolved limits: training size (w, h), shortest and longest bucket side, and the step between sides."""

    size: tuple[int, int]
    min_side: int
    max_side: int
    step: int
    upscale: bool = True
    enabled: bool = True


def resolve_limits(size: tuple[int, int] | None, bucket: BucketConfig, native_size: int) -> BucketLimits:
    """Limits of a run: unset ones follow from the model's native size (design section 6).

    min = native / 4, max = native x 2, step = 64, or 8 below 256 pixels. A training size below a quarter of the native
    size takes its place; an unset maximum gives way to a training size above it.
    Raises ConfigError naming every contradiction.
    """
    width, height = size or (native_size, native_size)
    base = native_size if min(width, height) >= native_size // 4 else max(VAE_FACTOR, min(width, height))
    step = bucket.step or (64 if base >= 256 else VAE_FACTOR)
    problems: list[Problem] = []
    if step % VAE_FACTOR:
        problems.append(Problem("bucket.step", step, f"bucket sides must be multiples of {VAE_FACTOR}", "Use 64."))
    for name, side in (("width", width), ("height", height)):
        if side % VAE_FACTOR or side <= 0:
            problems.append(
                Problem(
                    "dataset.resolution",
                    (width, height),
                    f"the {name} is no multiple of {VAE_FACTOR}",
                    "Use e.g. 1024.",
                )
            )
    # Without buckets every picture gets the training size, and the limits say nothing (as in sd-scripts).
    low = (bucket.enabled and bucket.min_size) or min(base // 4, width, height)
    high = (bucket.enabled and bucket.max_size) or max(base * 2, width, height)
    if low > min(width, height):
        problems.append(
            Problem(
                "bucket.min_size", low, f"is above the training size {width}x{height}", "Lower it, or unset it (none)."
            )
        )
    if high < max(width, height):
        problems.append(
            Problem(
                "bucket.max_size", high, f"is below the training size {width}x{height}", "Raise it, or unset it (none)."
            )
        )
    if problems:
        raise ConfigError(problems)
    low = max(step, low // step * step)
    high = -(-high // step) * step
    return BucketLimits((width, height), low, high, step, bucket.upscale, bucket.enabled)


def bucket_list(size: tuple[int, int], min_side: int, max_side: int, step: int) -> list[tuple[int, int]]:
    """All buckets of at most the training area, sorted."""
    area = size[0] * size[1]
    square = math.isqrt(area) // step * step
    found = {(square, square)} if square else set()
    for width in range(min_side, max_side + 1, step):
        height = min(max_side, area // width // step * step)
        if height >= min_side:
            found |= {(width, height), (height, width)}
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a picture goes: its size after scaling and the bucket it is cut to."""

    resized: tuple[int, int]
    bucket: tuple[int, int]


@dataclass
class BucketChooser:
    """Chooses a bucket for a picture size. Build once: the list is made at the start."""

    limits: BucketLimits
    buckets: list[tuple[int, int]] = field(init=False)
    _ratios: list[tuple[float, int]] = field(init=False)

    def __post_init__(self) -> None:
        limits = self.limits
        if limits.enabled:
            self.buckets = bucket_list(limits.size, limits.min_side, limits.max_side, limits.step)
        else:
            self.buckets = [limits.size]
        self._ratios = sorted((w / h, i) for i, (w, h) in enumerate(self.buckets))

    def place(self, width: int, height: int) -> Placement:
        """Scaled size and bucket of a width x height picture. Every side is at least one step."""
        if self.limits.enabled and not self.limits.upscale:
            return self._place_without_upscaling(width, height)
        if self.limits.enabled and (width, height) in self.buckets:
            return Placement((width, height), (width, height))
        bucket = self._nearest(width / height)
        return Placement(cover(width, height, bucket), bucket)

    def _nearest(self, ratio: float) -> tuple[int, int]:
        """The bucket with the smallest plain difference of ratios; the first of the list on ties, as kohya's argmin."""
        at = bisect_left(self._ratios, (ratio, -1))
        near = self._ratios[max(0, at - 1) : at + 1]
        best = min(abs(r - ratio) for r, _ in near)
        same = [i for r, i in self._ratios if abs(r - ratio) == best] if len(near) else []
        return self.buckets[min(same)]

    def _place_without_upscaling(self, width: int, height: int) -> Placement:
        """Kohya's no-upscale choice: shrink to the area where needed, then cut to steps; limits do not apply.

        Deviation: a picture smaller than one step is enlarged to one step, where kohya makes a bucket of size 0.
        """
        step, (max_w, max_h) = self.limits.step, self.limits.size
        ratio = width / height
        resized = (width, height)
        if width * height > max_w * max_h:
            ideal_w = math.sqrt(max_w * max_h * ratio)
            by_w, by_h = self._floor(ideal_w), self._floor(max_w * max_h / ideal_w)
            error_w = abs(by_w / self._floor(by_w / ratio) - ratio) if self._floor(by_w / ratio) else math.inf
            error_h = abs(self._floor(by_h * ratio) / by_h - ratio) if by_h else math.inf
            if error_w < error_h:
                resized = (by_w, int(by_w / ratio + 0.5))
            elif by_h:
                resized = (int(by_h * ratio + 0.5), by_h)
        bucket = (max(step, resized[0] // step * step), max(step, resized[1] // step * step))
        if bucket[0] > resized[0] or bucket[1] > resized[1]:
            resized = cover(width, height, bucket)
        return Placement(resized, bucket)

    def _floor(self, length: float) -> int:
        return int(length + 0.5) // self.limits.step * self.limits.step


def cover(width: int, height: int, bucket: tuple[int, int]) -> tuple[int, int]:
    """Smallest size of the same shape that covers `bucket`."""
    scale = bucket[1] / height if width / height > bucket[0] / bucket[1] else bucket[0] / width
    return max(bucket[0], int(width * scale + 0.5)), max(bucket[1], int(height * scale + 0.5))


def crop_ltrb(bucket: tuple[int, int], original: tuple[int, int]) -> tuple[float, float, float, float]:
    """Kohya's size values (left, top, right, bottom): margins of the original fitted *inside* the bucket.

    These are not the pixels that were cut away; sd-scripts feeds these letterbox margins as crop coordinates and SDXL
    LoRAs are trained with them (kohya.md 3.3).
    """
    (width, height), ratio = bucket, original[0] / original[1]
    if width / height > ratio:
        inner_w, inner_h = height * ratio, float(height)
        left, top = (width - inner_w) // 2, 0.0
    else:
        inner_w, inner_h = float(width), width / ratio
        left, top = 0.0, (height - inner_h) // 2
    return left, top, left + inner_w, top + inner_h


def crop_tl_letterbox(bucket: tuple[int, int], original: tuple[int, int], *, flipped: bool) -> tuple[int, int]:
    """(top, left) for the time ids, kohya's way; mirrored when the picture is."""
    left, top, right, _ = crop_ltrb(bucket, original)
    return int(top), int(bucket[0] - right if flipped else left)


def crop_tl_true(
    bucket: tuple[int, int], resized: tuple[int, int], *, flipped: bool, left: int | None = None
) -> tuple[int, int]:
    """(top, left) really cut from the scaled picture (centre crop unless `left` is given), mirrored when flipped."""
    at = (resized[0] - bucket[0]) // 2 if left is None else left
    return (resized[1] - bucket[1]) // 2, resized[0] - bucket[0] - at if flipped else at
