"""sd-scripts' latent caches: `<stem>_<W>x<H>_sdxl.npz` beside the picture (facts: kohya.md 4.5).

Such a file is not keyed by content or VAE, so it is used only when asked for, and only when everything that can be
checked agrees: picture size, latent shape, size values, finite numbers, and that it is not older than its picture. It
holds one drawn sample, so its standard deviation is 0 for us.
"""

from __future__ import annotations

import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .buckets import VAE_FACTOR, crop_ltrb
from .cache_files import write_whole
from .records import Item

_SIZE_VALUES_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class KohyaLatents:
    """Unscaled latents (C, H, W) fp32 of a picture, and of its mirror image where the file has them."""

    latents_CHW: torch.Tensor  # noqa: N815
    flipped_CHW: torch.Tensor | None  # noqa: N815


def kohya_path(item: Item) -> Path:
    """Where sd-scripts keeps the picture's latents. The size in the name is the picture's own."""
    path = Path(item.source)
    width, height = item.upright_size
    return path.with_name(f"{path.stem}_{width:04d}x{height:04d}_sdxl.npz")


def read_kohya_latents(item: Item) -> KohyaLatents | str:
    """The latents of sd-scripts' file for a picture, or why it cannot be used."""
    path = kohya_path(item)
    try:
        if path.stat().st_mtime < os.stat(item.source).st_mtime:
            return "it is older than its picture"
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: np.asarray(stored[name]) for name in stored.files}
    except FileNotFoundError:
        return "it is not there"
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        return f"it cannot be read ({error})"
    problem = _problem(item, arrays)
    if problem:
        return problem
    flipped = arrays.get("latents_flipped")
    return KohyaLatents(_tensor(arrays["latents"]), None if flipped is None else _tensor(flipped))


def _problem(item: Item, arrays: dict[str, np.ndarray]) -> str | None:
    missing = [name for name in ("latents", "original_size", "crop_ltrb") if name not in arrays]
    if missing:
        return f"it lacks {', '.join(missing)}"
    wanted = (item.bucket[1] // VAE_FACTOR, item.bucket[0] // VAE_FACTOR)
    latents = [arrays["latents"], *([arrays["latents_flipped"]] if "latents_flipped" in arrays else [])]
    if item.spec.flip and len(latents) == 1:
        return "it lacks latents_flipped"
    for array in latents:
        if array.ndim != 3 or array.shape[1:] != wanted:
            return f"its latents are {array.shape}, this bucket needs (4, {wanted[0]}, {wanted[1]})"
        if not np.isfinite(array).all():
            return "its latents hold NaN or infinity"
    if tuple(arrays["original_size"].tolist()) != item.upright_size:
        return f"it was made from a picture of {arrays['original_size'].tolist()} pixels"
    margins = np.asarray(crop_ltrb(item.bucket, item.upright_size))
    if arrays["crop_ltrb"].shape != (4,) or np.abs(arrays["crop_ltrb"] - margins).max() > _SIZE_VALUES_TOLERANCE:
        return "its size values belong to another bucket"
    return None


def write_kohya_latents(item: Item, latents_CHW: torch.Tensor, flipped_CHW: torch.Tensor | None = None) -> Path:  # noqa: N803
    """Write latents (unscaled) as sd-scripts reads them; whole or not at all. Raises ResourceError."""
    arrays = {
        "latents": latents_CHW.float().numpy(),
        "original_size": np.array(item.upright_size, dtype=np.int64),
        "crop_ltrb": np.array(crop_ltrb(item.bucket, item.upright_size), dtype=np.float64),
    }
    if flipped_CHW is not None:
        arrays["latents_flipped"] = flipped_CHW.float().numpy()
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    path = kohya_path(item)
    write_whole(path, buffer.getvalue())
    return path


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
