"""Scan of a data set before anything is loaded: every picture decoded in full, every problem with its file.

Nothing is lost silently: a file is usable, refused with a reason, or passed over by name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..config import BucketConfig, DatasetConfig
from ..errors import DatasetError
from . import scan_warnings as say
from .decode import ENDINGS
from .find import FoundSet, find_set
from .folders import list_folder, pictures_below
from .memo import FileMemo
from .records import UPSCALE_NOTED, Item, ScanReport
from .scan_pictures import PictureScan
from .sets import SetSpec, sets_from_config
from .table import ItemTable
from .token_count import token_counter

Progress = Callable[[int, int, str], None]
ShouldStop = Callable[[], bool]


def scan_dataset(
    dataset: DatasetConfig,
    bucket: BucketConfig,
    native_size: int,
    *,
    tokenizers: Sequence[Any] | None = None,
    progress: Progress | None = None,
    should_stop: ShouldStop | None = None,
    cache_dir: str | Path | None = None,
) -> ScanReport:
    """Scan `dataset` and return what can be trained. `native_size` is the model's own picture size in pixels.

    `tokenizers`: the model's, for exact token counts. `progress(done, total, file)` is called a few times a second.
    `cache_dir`: where what is known of files is kept, so that the next scan reads changed files only.

    Raises:
        DatasetError: no folder, nothing usable, or a bad file under `dataset.strict`.
        ConfigError: resolution and bucket limits contradict each other, or the data-set config file is wrong.
        StopRequested: `should_stop` answered True.
    """
    report = examine_dataset(
        dataset,
        bucket,
        native_size,
        tokenizers=tokenizers,
        progress=progress,
        should_stop=should_stop,
        cache_dir=cache_dir,
    )
    if report.error:
        raise DatasetError(report.error, report.folder)
    return report


def examine_dataset(
    dataset: DatasetConfig,
    bucket: BucketConfig,
    native_size: int,
    *,
    tokenizers: Sequence[Any] | None = None,
    progress: Progress | None = None,
    should_stop: ShouldStop | None = None,
    cache_dir: str | Path | None = None,
) -> ScanReport:
    """As `scan_dataset`, but a set that cannot be trained comes back as a report whose `error` says why."""
    start = time.monotonic()
    specs = sets_from_config(dataset, bucket, native_size)
    _refuse_same_folder(specs)
    notes = say.ScanNotes()
    sets = [find_set(spec, notes, _inside(spec, specs)) for spec in specs]
    memo = FileMemo(None if cache_dir is None else Path(cache_dir))
    try:
        pictures = PictureScan(
            sets,
            notes,
            memo,
            counter=token_counter(tokenizers),
            workers=dataset.workers,
            verify=dataset.verify,
            progress=progress,
            should_stop=should_stop,
        )
        pictures.run()
    finally:
        memo.close()
    items = pictures.table
    if dataset.compat == "kohya":
        _balance_prior(items)
    refused = sorted([*pictures.refused, *(entry for one in sets for entry in one.missing)])
    return ScanReport(
        folder=str(specs[0].folder),
        size=specs[0].limits.size,
        items=items.without_unused(),
        refused=tuple(refused),
        ignored=tuple(sorted(notes.ignored)),
        warnings=tuple([*say.scan_sentences(notes, dataset.max_token_length), *_table_warnings(items)]),
        error=_error(dataset, sets, items, refused, len(notes.ignored)),
        seconds=time.monotonic() - start,
        decoded=pictures.decoded,
        decode_seconds=pictures.decode_seconds,
    )


def scan_folder_json(path: str, *, native_size: int = 1024, **options: Any) -> dict[str, Any]:
    """The facts about one folder as plain data (contract of `scan FOLDER --json`).

    `options` are fields of DatasetConfig (`recursive`, `resolution`, ...), plus `tokenizers`, `bucket`, `cache_dir`.
    """
    bucket = options.pop("bucket", None) or BucketConfig()
    more = {name: options.pop(name) for name in ("tokenizers", "cache_dir") if name in options}
    return examine_dataset(DatasetConfig(path=path, **options), bucket, native_size, **more).to_json()


def _refuse_same_folder(specs: Sequence[SetSpec]) -> None:
    own = {os.path.realpath(spec.folder) for spec in specs if not spec.is_prior}
    for spec in specs:
        if spec.is_prior and os.path.realpath(spec.folder) in own:
            raise DatasetError(
                f"The data set and its prior (regularisation) set are the same folder '{spec.folder}'.", spec.folder
            )


def _inside(spec: SetSpec, specs: Sequence[SetSpec]) -> Path | None:
    """A prior set's folder below this set's, so that its pictures are not taken twice."""
    real = Path(os.path.realpath(spec.folder))
    for other in specs:
        if other.is_prior and not spec.is_prior and real in Path(os.path.realpath(other.folder)).parents:
            return other.folder
    return None


def _table_warnings(items: ItemTable) -> list[str]:
    found = []
    small = items.upscaled(UPSCALE_NOTED)
    if small:
        shown: list[Item] = [items[row] for row in small[: say.NAMES_SHOWN]]
        found.append(say.upscaled(len(small), [(item.file, item.upscale) for item in shown]))
    copies = items.copies()
    if copies:
        groups = [[items[row].file for row in group] for group in copies[: say.NAMES_SHOWN]]
        found.append(say.same_content(len(copies), groups))
    return found


def _error(
    dataset: DatasetConfig,
    sets: Sequence[FoundSet],
    items: ItemTable,
    refused: Sequence[tuple[str, str]],
    ignored: int,
) -> str | None:
    """Why nothing can be trained, or None."""
    bad = "".join(f"\n  - {file}: {reason}" for file, reason in refused[:20])
    bad += f"\n  - and {len(refused) - 20} more" if len(refused) > 20 else ""
    folders = " and ".join(f"'{one.spec.folder}'" for one in sets if not one.spec.is_prior)
    if refused and dataset.strict:
        return f"strict = true, and {say.counted(len(refused), 'picture')} of {folders} cannot be used:{bad}"
    if items.rows_of(prior=False):
        return None
    own = sum(one.pictures for one in sets if not one.spec.is_prior)
    if own or refused:
        return f"No usable pictures in {folders}: all {max(own, len(refused))} were refused:{bad}"
    for one in sets:
        below = {} if one.spec.recursive else pictures_below(list_folder(one.spec.folder, "", ()))
        if below:
            shown = say.names(f"{name} ({count})" for name, count in below.items())
            return (
                f"No pictures directly in '{one.spec.folder}', but some lie in sub-folders: {shown}. "
                "Set recursive = true to use them."
            )
    return (
        f"No pictures found in {folders}: 0 files with one of the endings {' '.join(ENDINGS)}; "
        f"{say.counted(ignored, 'other file')} there."
    )


def _balance_prior(items: ItemTable) -> None:
    """Kohya's balance: prior pictures are repeated in turn until they are as many as the others.

    More prior pictures than others: the surplus gets no repeat and is not used.
    """
    wanted = sum(items.repeats_of(row) for row in items.rows_of(prior=False))
    prior = items.rows_of(prior=True)
    if prior:
        each, extra = divmod(wanted, len(prior))
        for at, row in enumerate(prior):
            items.set_repeats(row, each + (1 if at < extra else 0))
