"""How many processes decode pictures: measured on the first ones, bounded by processors and free memory."""

from __future__ import annotations

import math
import os

_MOST = 8
_SHARE_OF_FREE = 0.25
_WORKER_BYTES = 120 * 2**20
"""An interpreter with Pillow and NumPy."""
_BYTES_A_PIXEL = 4 * 3
"""Of a picture while it is decoded, turned and scaled: about four copies of three bytes."""


def choose_workers(
    decode_s: float,
    encode_s: float,
    *,
    largest_pixels: int,
    processors: int | None = None,
    free_bytes: int | None = None,
) -> int:
    """Processes that keep the VAE busy; at least one, so that a hostile picture takes no more down than itself.

    Args:
        decode_s, encode_s: seconds for one picture, measured.
        largest_pixels: of the largest picture as it lies on disk.
        processors, free_bytes: of this machine unless given.
    """
    wanted = math.ceil(decode_s / encode_s) if encode_s > 0 else 1
    fitting = int(_SHARE_OF_FREE * (free_memory() if free_bytes is None else free_bytes))
    fitting //= _WORKER_BYTES + _BYTES_A_PIXEL * largest_pixels
    return max(1, min(wanted, _MOST, processors or os.cpu_count() or 1, fitting))


def free_memory() -> int:
    """Bytes of host memory that can be used without paging."""
    import psutil

    return int(psutil.virtual_memory().available)
