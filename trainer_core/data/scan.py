"""Scan of a data set before anything is loaded: every picture decoded in full, every problem with its file.

Nothing is lost silently: a file is usable, refused with a reason, or passed over by name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import BucketConfig, DatasetConfig
from ..errors import DatasetError
from . import scan_warnings as say
from .buckets import BucketChooser, resolve_limits
from .caption_files import CaptionError, CaptionText, read_caption
from .captions import CaptionRules, fixed_captions
from .decode import ENDINGS, PictureError, PictureFacts, parse_background
from .folders import Folder, Source, clean_folder, kohya_folders, list_folder, pictures_below, walk
from .pool import DecodePool, examine_job
from .records import Item, ScanReport, StopRequested
from .token_count import token_counter

Progress = Callable[[int, int, str], None]
ShouldStop = Callable[[], bool]

_INLINE_PICTURES = 64
_UPSCALE_NOTED = 1.02


def scan_dataset(
    dataset: DatasetConfig,
    bucket: BucketConfig,
    native_size: int,
    *,
    tokenizers: Sequence[Any] | None = None,
    progress: Progress | None = None,
    should_stop: ShouldStop | None = None,
) -> ScanReport:
    """Scan `dataset` and return what can be trained. `native_size` is the model's own picture size in pixels.

    `tokenizers`: the model's, for exact token counts. `progress(done, total, file)` is called as pictures are decoded.

    Raises:
        DatasetError: no folder, nothing usable, or a bad file under `dataset.strict`.
        ConfigError: resolution and bucket limits contradict each other.
        StopRequested: `should_stop` answered True.
    """
    report = examine_dataset(
        dataset, bucket, native_size, tokenizers=tokenizers, progress=progress, should_stop=should_stop
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
) -> ScanReport:
    """As `scan_dataset`, but a set that cannot be trained comes back as a report whose `error` says why."""
    return _Scan(dataset, bucket, native_size, tokenizers, progress, should_stop).run()


def scan_folder_json(path: str, *, native_size: int = 1024, **options: Any) -> dict[str, Any]:
    """The facts about one folder as plain data (contract of `scan FOLDER --json`).

    `options` are fields of DatasetConfig (`recursive`, `resolution`, ...), plus `tokenizers` and `bucket`.
    """
    bucket = options.pop("bucket", None) or BucketConfig()
    tokenizers = options.pop("tokenizers", None)
    dataset = DatasetConfig(path=path, **options)
    return examine_dataset(dataset, bucket, native_size, tokenizers=tokenizers).to_json()


@dataclass
class _Found:
    """One picture file before it is decoded."""

    file: str
    path: Path
    folder: Folder
    name: str
    source: Source
    prior: bool


@dataclass
class _Notes:
    """What the warnings of the report are made from."""

    free: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    long: list[tuple[str, int]] = field(default_factory=list)
    upscaled: list[tuple[str, float]] = field(default_factory=list)
    other_endings: list[tuple[str, str]] = field(default_factory=list)
    decoded: dict[str, list[str]] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    fallback: set[str] = field(default_factory=set)


class _Scan:
    def __init__(
        self,
        dataset: DatasetConfig,
        bucket: BucketConfig,
        native_size: int,
        tokenizers: Sequence[Any] | None,
        progress: Progress | None,
        should_stop: ShouldStop | None,
    ) -> None:
        self.dataset = dataset
        self.limits = resolve_limits(dataset.resolution, bucket, native_size)
        self.crop_values = bucket.crop_values
        self.max_ratio = bucket.max_aspect_ratio
        self.chooser = BucketChooser(self.limits)
        self.background = parse_background(dataset.background)
        self.rules = CaptionRules.from_config(dataset)
        self.count_tokens, self.exact_tokens = token_counter(tokenizers)
        self.progress = progress
        self.should_stop = should_stop
        self.notes = _Notes()
        self.ignored: list[str] = []
        self.refused: list[tuple[str, str]] = []
        self.items: list[Item] = []
        self.stems: list[list[str]] = []

    def run(self) -> ScanReport:
        start = time.monotonic()
        root = clean_folder(self.dataset.path)
        prior = clean_folder(self.dataset.prior_path) if self.dataset.prior_path else None
        if prior and os.path.realpath(prior) == os.path.realpath(root):
            raise DatasetError(f"dataset.path and dataset.prior_path are the same folder '{root}'.", root)
        found = self._find(root, prior=False, skip=prior)
        own = len(found)
        if prior:
            found += self._find(prior, prior=True, skip=None)
        endings = {flag: self._caption_ending([f for f in found if f.prior == flag]) for flag in (False, True)}
        for picture, facts in self._decoded(found):
            self._take(picture, facts, endings[picture.prior])
        self.items.sort(key=lambda item: item.file)
        self.refused.sort()
        if self.dataset.compat == "kohya":
            self.items = _balance_prior(self.items)
        return ScanReport(
            folder=str(root),
            size=self.limits.size,
            items=self.items,
            refused=tuple(self.refused),
            ignored=tuple(sorted(self.ignored)),
            warnings=tuple(self._warnings(endings)),
            error=self._error(root, own),
            seconds=time.monotonic() - start,
            decoded=len(found),
        )

    # ------------------------------------------------------------------ finding
    def _find(self, root_path: Path, *, prior: bool, skip: Path | None) -> list[_Found]:
        """All picture files of one set, in the order of their paths."""
        extensions = self.dataset.caption_extensions
        root = list_folder(root_path, "", extensions)
        if skip is not None:
            real = os.path.realpath(skip)
            root.folders = [name for name in root.folders if os.path.realpath(root_path / name) != real]
        sources = self._sources(root)
        found: list[_Found] = []
        for source in sources:
            deep = self.dataset.recursive
            for folder in walk(source, extensions, recursive=deep, problems=self.notes.free, skip=skip):
                found += self._pictures(folder, source, prior)
        return sorted(found, key=lambda picture: picture.file)

    def _sources(self, root: Folder) -> list[Source]:
        """The folder itself, kohya's numbered sub-folders, or both, saying what is left out."""
        repeats = self.dataset.repeats
        own = Source(root.path, "", repeats)
        if self.dataset.recursive:
            return [own]
        numbered: list[Source] = []
        counts = pictures_below(root)
        for name, times, tokens in kohya_folders(root):
            if counts.get(name) and times > 0:
                numbered.append(Source(root.path / name, name, times * repeats, tokens))
        left_out = {name: count for name, count in counts.items() if name not in {s.relative for s in numbered}}
        if left_out and (root.pictures or numbered):
            shown = say.names(f"{name} ({count})" for name, count in left_out.items())
            self.notes.free.append(f"pictures in sub-folders are left out: {shown}. Set recursive = true to use them")
        if not numbered:
            return [own]
        if not root.pictures:
            self.ignored += [name for name in root.others] + list(root.captions.names())
            return numbered
        self.notes.free.append(
            f"pictures lie both in the folder itself ({len(root.pictures)}) and in numbered sub-folders; all are used"
        )
        return [own, *numbered]

    def _pictures(self, folder: Folder, source: Source, prior: bool) -> Iterator[_Found]:
        label = "prior:" if prior else ""
        stems: dict[str, list[str]] = {}
        used: set[str] = set()
        for name in folder.pictures:
            file = label + folder.name_of(name)
            stems.setdefault(Path(name).stem, []).append(file)
            used |= {caption for ext in folder.captions.extensions if (caption := folder.captions.find(name, ext))}
            yield _Found(file, folder.path / name, folder, name, source, prior)
        self.stems += [files for files in stems.values() if len(files) > 1]
        orphans = [name for name in folder.captions.names() if name not in used]
        self.ignored += [label + folder.name_of(name) for name in (*folder.others, *orphans)]
        self.notes.unreadable += [label + folder.name_of(name) for name in folder.unreadable]
        if orphans and folder.pictures:
            shown = say.names(folder.name_of(name) for name in orphans)
            self.notes.free.append(
                f"{say.counted(len(orphans), 'caption file')} without a picture of that name: {shown}"
            )

    def _caption_ending(self, found: Sequence[_Found]) -> str:
        """The ending of this set's captions: the first of the list that any picture has. One set, one ending.

        So a set of .txt captions is not mixed with stray .caption files of another tool; those are named.
        """
        extensions = found[0].folder.captions.extensions if found else (".txt",)
        for ext in extensions:
            if any(picture.folder.captions.find(picture.name, ext) for picture in found):
                return ext
        return extensions[0]

    # ------------------------------------------------------------------ decoding
    def _decoded(self, found: Sequence[_Found]) -> Iterator[tuple[_Found, PictureFacts]]:
        """Every picture with its facts, decoded in worker processes where there are many."""
        workers = _scan_workers(self.dataset.workers, len(found))
        with DecodePool(workers) as pool:
            waiting: list[tuple[_Found, Callable[[], Any]]] = []
            done = 0
            for at in range(len(found) + 1):
                if at < len(found):
                    waiting.append((found[at], pool.submit(examine_job(found[at].path, self.background))))
                while waiting and (at == len(found) or len(waiting) > 4 * max(1, workers)):
                    if self.should_stop and self.should_stop():
                        raise StopRequested
                    picture, result = waiting.pop(0)
                    facts = _facts(result)
                    done += 1
                    if self.progress:
                        self.progress(done, len(found), picture.file)
                    yield picture, facts

    # ------------------------------------------------------------------ judging
    def _take(self, picture: _Found, facts: PictureFacts, ending: str) -> None:
        """Make an item of a decoded picture, or refuse it with a reason."""
        reason = facts.reason or self._ratio_reason(facts.size)
        if reason:
            self.refused.append((picture.file, reason))
            return
        try:
            caption, notes = self._caption(picture, ending)
        except CaptionError as error:
            self.refused.append((picture.file, str(error)))
            return
        for note in facts.notes:
            self.notes.decoded.setdefault(note, []).append(picture.file)
        place = self.chooser.place(*facts.size)
        factor = max(place.resized[0] / facts.size[0], place.resized[1] / facts.size[1])
        warnings = [*facts.notes, *notes, *self._length_note(picture.file, caption)]
        if factor > _UPSCALE_NOTED:
            self.notes.upscaled.append((picture.file, factor))
            warnings.append(f"small: {facts.size[0]}x{facts.size[1]} is upscaled {factor:.1f} times")
        self.items.append(
            Item(
                file=picture.file,
                path=picture.path,
                content_hash=facts.content_hash,
                upright_size=facts.size,
                resized=place.resized,
                bucket=place.bucket,
                caption=caption,
                repeats=picture.source.repeats,
                loss_weight=self.dataset.prior_loss_weight if picture.prior else 1.0,
                is_prior=picture.prior,
                crop_values=self.crop_values,
                rules=self.rules,
                warnings=tuple(warnings),
            )
        )

    def _ratio_reason(self, size: tuple[int, int]) -> str | None:
        ratio = max(size) / max(1, min(size))
        if ratio <= self.max_ratio:
            return None
        return f"aspect ratio {ratio:.0f}:1 ({size[0]}x{size[1]}) is beyond the limit of {self.max_ratio:g}:1"

    def _caption(self, picture: _Found, ending: str) -> tuple[str, tuple[str, ...]]:
        """Caption text and notes about it. CaptionError when the file is there but is no text."""
        index = picture.folder.captions
        name = index.find(picture.name, ending)
        for other in index.extensions:
            stray = index.find(picture.name, other)
            if other != ending and stray and not name:
                self.notes.other_endings.append((picture.file, picture.folder.name_of(stray)))
        text = CaptionText(())
        if name:
            text = read_caption(picture.folder.path / name, self.dataset.caption_encoding)
        if text.lines:
            return ("\n".join(text.lines) if self.rules.keeps_lines else text.joined), text.notes
        (self.notes.empty if name else self.notes.without).append(picture.file)
        fallback = self.dataset.default_caption or picture.source.class_tokens
        self.notes.fallback.add(fallback)
        return fallback, (*text.notes, "the caption file is empty" if name else "no caption file")

    def _length_note(self, file: str, caption: str) -> tuple[str, ...]:
        fixed = fixed_captions(caption, self.rules)
        count = self.count_tokens(fixed[0] if fixed else caption)
        limit = self.dataset.max_token_length
        if count <= limit:
            return ()
        self.notes.long.append((file, count))
        words = f"{count}" if self.exact_tokens else f"at least {count}"
        return (f"caption too long: {words} tokens, the window holds {limit}; the rest is cut off",)

    # ------------------------------------------------------------------ reporting
    def _warnings(self, endings: dict[bool, str]) -> list[str]:
        notes, found = self.notes, list(self.notes.free)
        if notes.without or notes.empty:
            texts = sorted(text for text in notes.fallback if text)
            instead = (
                f"trained with {say.names(repr(text) for text in texts)}" if texts else "trained with an empty caption"
            )
            found.append(say.missing_captions(notes.without, notes.empty, instead))
        if notes.other_endings:
            found.append(say.other_endings(notes.other_endings, endings[False]))
        if notes.long:
            found.append(say.long_captions(notes.long, self.dataset.max_token_length, exact=self.exact_tokens))
        if notes.upscaled:
            found.append(say.upscaled(notes.upscaled))
        found += [f"{note}: {say.names(files)}" for note, files in notes.decoded.items()]
        if self.stems:
            found.append(say.same_stem(self.stems))
        by_content: dict[str, list[str]] = {}
        for item in self.items:
            by_content.setdefault(item.content_hash, []).append(item.file)
        copies = [files for files in by_content.values() if len(files) > 1]
        if copies:
            found.append(say.same_content(copies))
        if notes.unreadable:
            found.append(
                f"pictures in formats that are not read: {say.names(notes.unreadable)}. Save them as PNG or JPEG"
            )
        return found

    def _error(self, root: Path, own: int) -> str | None:
        """Why nothing can be trained, or None."""
        bad = "".join(f"\n  - {file}: {reason}" for file, reason in self.refused[:20])
        more = f"\n  - and {len(self.refused) - 20} more" if len(self.refused) > 20 else ""
        if self.refused and self.dataset.strict:
            return (
                f"strict = true, and {say.counted(len(self.refused), 'picture')} of '{root}' cannot be used:{bad}{more}"
            )
        if any(not item.is_prior for item in self.items):
            return None
        if own:
            return f"No usable pictures in '{root}': all {own} were refused:{bad}{more}"
        below = pictures_below(list_folder(root, "", ()))
        if below and not self.dataset.recursive:
            shown = say.names(f"{name} ({count})" for name, count in below.items())
            return (
                f"No pictures directly in '{root}', but some lie in sub-folders: {shown}. "
                "Set recursive = true to use them."
            )
        return (
            f"No pictures found in '{root}': 0 files with one of the endings {' '.join(ENDINGS)}; "
            f"{say.counted(len(self.ignored), 'other file')} there."
        )


def _facts(result: Callable[[], Any]) -> PictureFacts:
    try:
        return result()
    except PictureError as error:
        return PictureFacts("", (0, 0), reason=str(error))


def _scan_workers(asked: int, pictures: int) -> int:
    """Processes for the first pass: none for small sets, where starting them takes longer than the work."""
    if asked == 0 or pictures < _INLINE_PICTURES:
        return 0
    return min(max(asked, os.cpu_count() or 1), 8)


def _balance_prior(items: list[Item]) -> list[Item]:
    """Kohya's balance: prior pictures are repeated in turn until they are as many as the others."""
    wanted = sum(item.repeats for item in items if not item.is_prior)
    prior = [item for item in items if item.is_prior]
    if not prior:
        return items
    each, extra = divmod(wanted, len(prior))
    repeats = {item.file: each + (1 if at < extra else 0) for at, item in enumerate(prior)}
    balanced = [replace(item, repeats=repeats[item.file]) if item.is_prior else item for item in items]
    return [item for item in balanced if item.repeats > 0]
