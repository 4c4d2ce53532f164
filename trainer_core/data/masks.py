"""Loss masks in latent size: fitted like their picture, averaged over each latent cell, kept by content.

Shapes: B batch, H W latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ..errors import DatasetError
from .buckets import VAE_FACTOR
from .cache_files import ShardStore, digest
from .decode import decode_mask
from .locations import hash_location
from .records import Item, StopRequested
from .subset import Subset
from .table import ItemTable

_FORMAT = "mask-1"
_SHARD_ENTRIES = 2048


class MaskCache:
    """Masks of the pictures that have one, in `folder`. Raises ResourceError when the folder cannot be made."""

    def __init__(self, folder: str | Path) -> None:
        self.store = ShardStore(Path(folder), "masks", ("mask",))
        self._hashes: dict[str, str] = {}

    def key(self, item: Item) -> str:
        """Name of the picture's mask: its content and how it is fitted."""
        content = item.content_hash if item.mask == "alpha" else self._hash(str(item.mask))
        return digest(_FORMAT, item.mask == "alpha", content, item.resized, item.bucket)

    def _hash(self, path: str) -> str:
        if path not in self._hashes:
            try:
                self._hashes[path] = hash_location(path)
            except OSError as error:
                raise DatasetError(f"The mask '{path}' cannot be read: {error.strerror or error}.", path) from error
        return self._hashes[path]

    def ensure(self, items: Sequence[Item], *, should_stop: Callable[[], bool] | None = None) -> int:
        """Make what is missing; returns how many. DatasetError names a mask that cannot be used."""
        table = items.base if isinstance(items, Subset) else items
        if isinstance(table, ItemTable) and not table.has_masks:
            return 0
        pending: dict[str, dict[str, torch.Tensor]] = {}
        made = 0
        for item in items:
            if item.mask is None:
                continue
            key = self.key(item)
            if key in self.store or key in pending:
                continue
            if should_stop and should_stop():
                self.store.put(pending)
                raise StopRequested
            pending[key] = {"mask": make_mask(item)}
            made += 1
            if len(pending) >= _SHARD_ENTRIES:
                self.store.put(pending)
                pending = {}
        self.store.put(pending)
        return made

    def load(self, item: Item, flipped: bool = False) -> torch.Tensor | None:
        """(1, H, W) fp32 in 0..1, mirrored when `flipped`; None for a picture without a mask."""
        if item.mask is None:
            return None
        found = self.store.get(self.key(item))
        mask_1HW = make_mask(item) if found is None else found["mask"]
        return mask_1HW.flip(-1) if flipped else mask_1HW


def make_mask(item: Item) -> torch.Tensor:
    """(1, H, W) mask of a picture that has one. DatasetError when its size is not the picture's shape."""
    alpha = item.mask == "alpha"
    mask = decode_mask(item.source if alpha else str(item.mask), alpha=alpha)
    height, width = mask.shape
    wanted_w, wanted_h = item.upright_size
    if abs(width / height - wanted_w / wanted_h) > 0.02 * wanted_w / wanted_h:
        raise DatasetError(
            f"The mask '{item.mask}' is {width}x{height}, but its picture {item.file} is {wanted_w}x{wanted_h}: they "
            "must have the same shape.",
            item.mask,
        )
    image = Image.fromarray(mask).resize(item.resized, Image.Resampling.BILINEAR)
    left, top = (item.resized[0] - item.bucket[0]) // 2, (item.resized[1] - item.bucket[1]) // 2
    fitted = np.asarray(image)[top : top + item.bucket[1], left : left + item.bucket[0]]
    cells = torch.from_numpy(fitted.copy())[None, None]
    return torch.nn.functional.avg_pool2d(cells, VAE_FACTOR)[0].clamp(0, 1)
