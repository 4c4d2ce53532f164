"""Latents of all pictures, encoded once and kept by content.

An entry's key holds everything that changes the result: content of the file, VAE, scaled size, bucket, crop, mirroring,
background, scaling filter. Stored are mean and standard deviation before the scaling factor, fp32, so that every epoch
draws its own sample. A latent that is not finite ends the run with the picture's name and is never written.

Shapes: B batch, C latent channel, H W latent height and width.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np
import torch

from ..config import DatasetConfig
from ..errors import DatasetError, NonFiniteError, ResourceError
from ..models import encode_images
from .buckets import VAE_FACTOR, crop_tl_letterbox, crop_tl_true
from .cache_files import HOLE, DigestMaker, ShardStore
from .decode import PictureError
from .kohya_cache import read_kohya_latents, write_kohya_latents
from .loader_choice import choose_workers
from .masks import MaskCache
from .pool import DecodePool, Job, fit_job
from .records import Item, StopRequested
from .scan_warnings import Told, counted

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

log = logging.getLogger(__name__)

_FORMAT = "latents-1"
_BATCH_PIXELS = 512 * 512
_MOST_IN_BATCH = 16
_SHARD_BYTES = 64 * 2**20
_SHARD_ENTRIES = 4096
_RAM_BYTES = 128 * 2**20
_PROGRESS_SECONDS = 0.2
_BATCHES_AHEAD = 2
_MEASURED = 2
"""Batches that are timed to choose the number of decoding processes; the first one starts a process and warms up."""
_BYTES_A_PLACE = 4 * 2 * 4
"""Channels, mean and standard deviation, fp32."""


@dataclass(frozen=True, slots=True)
class LatentEntry:
    """Unscaled latent statistics of one picture and its size values in pixels, as they go into SDXL's time ids."""

    mean_CHW: torch.Tensor  # noqa: N815
    std_CHW: torch.Tensor  # noqa: N815
    original_hw: tuple[int, int]
    crop_tl: tuple[int, int]
    target_hw: tuple[int, int]
    mask_1HW: torch.Tensor | None = None  # noqa: N815


@dataclass(frozen=True, slots=True)
class _Wanted:
    key: str
    item: Item
    flipped: bool


class _Missing(Sequence[_Wanted]):
    """Entries to make, as places in `items`: each is put together when it is looked at."""

    def __init__(self, cache: LatentCache, items: Sequence[Item]) -> None:
        self.cache = cache
        self.items = items
        self.bytes_needed = 0
        self._places = array("q")
        self._flipped = bytearray()
        self._buckets = array("l")
        self._known: dict[tuple[int, int], int] = {}
        self._order: np.ndarray = np.empty(0, np.int64)

    def add(self, place: int, flipped: bool, bucket: tuple[int, int]) -> None:
        self._places.append(place)
        self._flipped.append(flipped)
        self._buckets.append(self._known.setdefault(bucket, len(self._known)))
        self.bytes_needed += bucket[0] * bucket[1] // VAE_FACTOR**2 * _BYTES_A_PLACE

    def sort(self) -> None:
        """Bring the entries into the order of their buckets."""
        names = sorted(self._known)
        rank = np.array([names.index(bucket) for bucket in self._known], dtype=np.int64)
        self._order = np.argsort(rank[np.asarray(self._buckets)], kind="stable") if names else self._order

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> _Wanted: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Wanted]: ...
    def __getitem__(self, index: int | slice) -> _Wanted | list[_Wanted]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        row = self._order[index]
        item, flipped = self.items[self._places[row]], bool(self._flipped[row])
        return _Wanted(self.cache.key(item, flipped), item, flipped)


class LatentCache:
    """Cache in `folder` for one VAE. `fingerprint` identifies the VAE's weights.

    Raises ResourceError when the folder cannot be made or written.
    """

    def __init__(self, folder: str | Path, vae: AutoencoderKL, fingerprint: str, dataset: DatasetConfig) -> None:
        self.vae = vae
        self.fingerprint = fingerprint
        self.workers = dataset.workers
        self.store = ShardStore(Path(folder), "latents", ("mean", "std"))
        self.masks = MaskCache(folder)
        self.kohya_cache = dataset.kohya_cache
        self.foreign_refused = Told()
        self._foreign: set[str] = set()
        self._looked_at: set[str] = set()
        self._makers: dict[tuple[object, ...], DigestMaker] = {}
        self._ram: OrderedDict[str, dict[str, torch.Tensor]] = OrderedDict()
        self._ram_bytes = 0

    def key(self, item: Item, flipped: bool) -> str:
        """Name of the picture's entry: equal keys mean equal latents."""
        spec = item.spec
        kind = (item.resized, item.bucket, flipped, spec.background, spec.interpolation)
        maker = self._makers.get(kind)
        if maker is None:
            maker = self._makers[kind] = DigestMaker(
                _FORMAT, HOLE, self.fingerprint, item.resized, item.bucket, "centre", flipped, spec.background,
                spec.interpolation, "float32",
            )  # fmt: skip
        return maker(item.content_hash)

    def ensure(
        self,
        items: Sequence[Item],
        *,
        progress: Callable[[int, int, str], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> int:
        """Encode what is missing; returns how many entries were made. `progress(done, total, file)`.

        Pictures are decoded ahead in `dataset.workers` processes while the VAE works; unset = as many as it needs.

        Raises:
            NonFiniteError: the VAE gives no finite latent for a picture (named); nothing of its batch is written.
            DatasetError: a picture cannot be read any more or was changed since the scan.
            StopRequested: `should_stop` answered True; what was encoded is kept.
        """
        self.masks.ensure(items, should_stop=should_stop)
        missing = self._missing(items)
        self._check_room(missing)
        told = 0.0
        done, pending, pending_bytes = 0, dict[str, dict[str, torch.Tensor]](), 0
        try:
            for batch, entries in self._encoded(missing):
                pending.update(entries)
                pending_bytes += sum(t.nbytes for parts in entries.values() for t in parts.values())
                if pending_bytes >= _SHARD_BYTES or len(pending) >= _SHARD_ENTRIES:
                    self.store.put(pending)
                    pending, pending_bytes = {}, 0
                done += len(batch)
                now = time.monotonic()
                if progress and (done == len(missing) or now - told > _PROGRESS_SECONDS):
                    told = now
                    progress(done, len(missing), batch[-1].item.file)
                if should_stop and should_stop():
                    raise StopRequested
        except StopRequested:
            self.store.put(pending)
            raise
        self.store.put(pending)
        if self.kohya_cache == "write":
            self._write_foreign(items)
        return done

    def notes(self) -> list[str]:
        """What is worth saying about the cache after `ensure`, one sentence each."""
        found = []
        if self._foreign:
            of = counted(len(self._foreign), "picture")
            found.append(f"sd-scripts' latents (.npz) are used for {of}; which VAE made them cannot be told")
        if self.foreign_refused.count:
            found.append(f"sd-scripts' latents (.npz) are not used for {self.foreign_refused}: encoded anew")
        if self.store.damaged:
            found.append(f"damaged cache files were set aside and made again: {', '.join(self.store.damaged)}")
        return found

    def load(self, item: Item, flipped: bool = False) -> LatentEntry:
        """The picture's latents; an entry that is missing or damaged is encoded again on the spot."""
        key = self.key(item, flipped)
        parts = self._ram.get(key)
        if parts is None:
            parts = self._from_foreign(item, flipped) or self.store.get(key)
            if parts is None:
                self._encode_again(item, flipped)
                parts = self.store.get(key)
                if parts is None:
                    raise DatasetError(
                        f"{item.file}: its latents cannot be read back from '{self.store.folder}'.", item.path
                    )
            self._remember(key, parts)
        size = (item.bucket[1], item.bucket[0])
        if item.spec.crop_values == "true":
            crop = crop_tl_true(item.bucket, item.resized, flipped=flipped)
        else:
            crop = crop_tl_letterbox(item.bucket, item.upright_size, flipped=flipped)
        width, height = item.upright_size
        mask_1HW = self.masks.load(item, flipped)
        return LatentEntry(parts["mean"], parts["std"], (height, width), crop, size, mask_1HW)

    def _encode_again(self, item: Item, flipped: bool) -> None:
        wanted = _Wanted(self.key(item, flipped), item, flipped)
        for _, entries in self._encoded([wanted], workers=0):
            self.store.put(entries)

    def _remember(self, key: str, parts: dict[str, torch.Tensor]) -> None:
        """Keep recently used entries in memory, up to a fixed size whatever the size of the set."""
        self._ram[key] = parts
        self._ram_bytes += sum(t.nbytes for t in parts.values())
        while self._ram_bytes > _RAM_BYTES:
            _, old = self._ram.popitem(last=False)
            self._ram_bytes -= sum(t.nbytes for t in old.values())

    def _missing(self, items: Sequence[Item]) -> _Missing:
        """Entries to make, each key once, grouped by bucket in item order."""
        if self.kohya_cache == "read":
            self._find_foreign(items)
        found, seen = _Missing(self, items), set[bytes]()
        for place, item in enumerate(items):
            if item.source in self._foreign:
                continue
            for flipped in (False, True) if item.spec.flip else (False,):
                key = self.key(item, flipped)
                if key not in self.store and (short := bytes.fromhex(key)) not in seen:
                    seen.add(short)
                    found.add(place, flipped, item.bucket)
        found.sort()
        return found

    def _check_room(self, missing: _Missing) -> None:
        """Raises ResourceError before hours of work when the disk cannot hold what they will make."""
        free, needed = shutil.disk_usage(self.store.folder).free, missing.bytes_needed
        if needed > free:
            raise ResourceError(
                f"The latents of {counted(len(missing), 'picture')} need {needed / 2**30:.1f} GiB, the disk of the "
                f"cache '{self.store.folder}' has {free / 2**30:.1f} GiB free. Free some space, set dataset.cache_dir "
                "to another disk, or use fewer pictures or a smaller dataset.resolution."
            )

    def _find_foreign(self, items: Sequence[Item]) -> None:
        """Note pictures whose sd-scripts cache is valid, and which one is there but is not."""
        for item in items:
            if item.source in self._looked_at:
                continue
            self._looked_at.add(item.source)
            found = read_kohya_latents(item)
            if not isinstance(found, str):
                self._foreign.add(item.source)
            elif found != "it is not there":
                self.foreign_refused.add(f"{item.file} ({found})")
                log.warning("sd-scripts' cache of %s is not used: %s", item.file, found)

    def _from_foreign(self, item: Item, flipped: bool) -> dict[str, torch.Tensor] | None:
        found = read_kohya_latents(item) if item.source in self._foreign else ""
        if isinstance(found, str):
            return None
        latents_CHW = found.flipped_CHW if flipped and found.flipped_CHW is not None else found.latents_CHW
        return {"mean": latents_CHW, "std": torch.zeros_like(latents_CHW)}

    def _write_foreign(self, items: Sequence[Item]) -> None:
        for item in items:
            flipped = self.load(item, True).mean_CHW if item.spec.flip else None
            write_kohya_latents(item, self.load(item, False).mean_CHW, flipped)

    def _encoded(
        self, wanted: Sequence[_Wanted], workers: int | None = None
    ) -> Iterator[tuple[list[_Wanted], dict[str, dict[str, torch.Tensor]]]]:
        """Batches of one bucket with their entries, decoded a few batches ahead of the VAE."""
        count, batches = self.workers if workers is None else workers, _batched(wanted)
        if count is None:
            times: list[tuple[float, float]] = []
            yield from self._measured(batches, times)
            largest = max((one.item.upright_size[0] * one.item.upright_size[1] for one in wanted), default=0)
            decode_s, encode_s = (min((pair[at] for pair in times), default=0.0) for at in (0, 1))
            count = choose_workers(decode_s, encode_s, largest_pixels=largest)
            log.info("%d processes decode: %.3f s a picture, encoding takes %.3f s", count, decode_s, encode_s)
        with DecodePool(count if len(wanted) > 1 else 0) as pool:
            ahead: deque[tuple[list[_Wanted], list[Callable[[], object]]]] = deque()
            for batch in batches:
                ahead.append((batch, [pool.submit(self._job(one.item)) for one in batch]))
                if len(ahead) > _BATCHES_AHEAD:
                    yield self._finished(*ahead.popleft())
            while ahead:
                yield self._finished(*ahead.popleft())

    def _measured(
        self, batches: Iterator[list[_Wanted]], times: list[tuple[float, float]]
    ) -> Iterator[tuple[list[_Wanted], dict[str, dict[str, torch.Tensor]]]]:
        """The first batches with their entries, one after the other: decoded in one process, then encoded. Adds the
        seconds of both for one picture to `times`."""
        with DecodePool(1) as pool:
            for batch in itertools.islice(batches, _MEASURED):
                begun = time.perf_counter()
                results = [pool.submit(self._job(one.item)) for one in batch]
                pixels = [_pixels(result, one.item) for result, one in zip(results, batch, strict=True)]
                decoded = time.perf_counter()
                entries = self._encode(batch, pixels)
                times.append(((decoded - begun) / len(batch), (time.perf_counter() - decoded) / len(batch)))
                yield batch, entries

    def _finished(
        self, batch: list[_Wanted], results: list[Callable[[], object]]
    ) -> tuple[list[_Wanted], dict[str, dict[str, torch.Tensor]]]:
        pixels = [_pixels(result, one.item) for result, one in zip(results, batch, strict=True)]
        return batch, self._encode(batch, pixels)

    def _job(self, item: Item) -> Job:
        return fit_job(
            item.source,
            item.spec.background,
            resized=item.resized,
            bucket=item.bucket,
            resample=item.spec.interpolation,
            content_hash=item.content_hash,
        )

    def _encode(self, batch: Sequence[_Wanted], pixels: Sequence[np.ndarray]) -> dict[str, dict[str, torch.Tensor]]:
        images = [_as_image(array, one.flipped) for array, one in zip(pixels, batch, strict=True)]
        # Always the same batch shape: another one rounds differently, and a picture's latent must not depend on which
        # pictures were missing along with it. The spare places hold copies of the last picture.
        spare = _batch_limit(batch[0].item.bucket) - len(images)
        images_B3HW = torch.stack(images + images[-1:] * spare)
        try:
            with torch.no_grad():
                mean_BCHW, std_BCHW = encode_images(self.vae, images_B3HW)
        except NonFiniteError as error:
            places = (min(int(place), len(batch) - 1) for place in error.sample_ids)
            files = tuple(dict.fromkeys(batch[place].item.file for place in places))
            raise NonFiniteError(
                f"The VAE gives no finite latents (NaN or infinity, in fp32) for: {', '.join(files)}. Look at the "
                "picture, and give another VAE (model.vae) if it is fine. Nothing was written for it.",
                sample_ids=files,
            ) from error
        mean_BCHW, std_BCHW = mean_BCHW.cpu(), std_BCHW.cpu()
        return {one.key: {"mean": mean_BCHW[at].clone(), "std": std_BCHW[at].clone()} for at, one in enumerate(batch)}


def _batch_limit(bucket: tuple[int, int]) -> int:
    """Pictures the VAE gets at once: one from 512x512 on, more of small ones."""
    return min(_MOST_IN_BATCH, max(1, _BATCH_PIXELS // (bucket[0] * bucket[1])))


def _batched(wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    """Runs of one bucket, each as large as its area allows."""
    batch: list[_Wanted] = []
    for one in wanted:
        if batch and (batch[0].item.bucket != one.item.bucket or len(batch) >= _batch_limit(one.item.bucket)):
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


def _pixels(result: Callable[[], object], item: Item) -> np.ndarray:
    try:
        found = result()
    except PictureError as error:
        raise DatasetError(f"{item.file}: {error}.", item.path) from error
    assert isinstance(found, np.ndarray), f"a fit job answers pixels, got {type(found).__name__}"
    return found


def _as_image(pixels: np.ndarray, flipped: bool) -> torch.Tensor:
    """uint8 (H, W, 3) to fp32 (3, H, W) in [-1, 1], mirrored when `flipped`."""
    image_3HW = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 127.5 - 1.0
    return image_3HW.flip(-1) if flipped else image_3HW
