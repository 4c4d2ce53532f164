"""Decoding processes: as many as keep the VAE busy, within processors and free memory."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_core.data.loader_choice import choose_workers

GIB = 2**30


@pytest.mark.parametrize(
    ("decode_s", "encode_s", "machine", "expected"),
    [
        (0.01, 0.5, {}, 1),  # a slow VAE is never kept waiting
        (0.10, 0.04, {}, 3),
        (0.10, 0.001, {}, 8),
        (0.10, 0.001, {"processors": 4}, 4),
        (0.10, 0.001, {"free_bytes": GIB}, 1),  # a quarter of it holds no second worker and its picture
        (0.10, 0.001, {"free_bytes": 4 * GIB}, 3),
        (0.10, 0.001, {"free_bytes": 4 * GIB, "largest_pixels": 100_000_000}, 1),
        (0.0, 0.0, {}, 1),
    ],
)
def test_choice(decode_s: float, encode_s: float, machine: dict[str, Any], expected: int) -> None:
    plenty = {"processors": 16, "free_bytes": 64 * GIB, "largest_pixels": 12_000_000}
    assert choose_workers(decode_s, encode_s, **{**plenty, **machine}) == expected
