"""The pictures of a scan, one after another: known by the memo or decoded, captioned, judged, put in the table."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..collector import collector_paused
from . import scan_warnings as say
from .buckets import BucketChooser, BucketLimits, Placement
from .caption_files import CaptionError, CaptionText, normal_stem, read_caption
from .captions import fixed_captions
from .decode import PictureError, PictureFacts
from .find import FoundFolder, FoundSet
from .locations import file_of, locate, shown_name
from .memo import FileMemo, Known, Row, stamp_of, stamps_in
from .pool import DecodePool, examine_job
from .records import StopRequested
from .sets import SetSpec
from .table import ItemTable
from .token_count import TokenCounter, least_tokens

_INLINE_PICTURES = 64
_PROGRESS_SECONDS = 0.2
_PAGE = 1000
# places of a `Row`'s fields in what the memo gives: making a `Row` of each would cost more than all the comparing
_NAME, _STAMP, _CONTENT, _WIDTH, _HEIGHT = map(Row._fields.index, ("name", "stamp", "content", "width", "height"))
_CAPTION, _CAPTION_NAME, _CAPTION_KEY = map(Row._fields.index, ("caption", "caption_name", "caption_key"))
_CAPTION_STAMP, _TOKENS, _PLAIN = map(Row._fields.index, ("caption_stamp", "tokens", "plain"))


@dataclass(slots=True)
class _Task:
    """One picture on its way: known already, or with the function that waits for its facts."""

    found: FoundSet
    folder: FoundFolder
    number: int
    name: str
    path: str
    stamp: bytes | None
    known: Known | None
    result: Callable[[], object] | None


class PictureScan:
    """Fills `table` and `refused` from the sets that were found."""

    def __init__(
        self,
        sets: Sequence[FoundSet],
        notes: say.ScanNotes,
        memo: FileMemo,
        *,
        counter: tuple[TokenCounter, bool],
        workers: int | None,
        verify: bool,
        progress: Callable[[int, int, str], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self.sets = sets
        self.notes = notes
        self.memo = memo
        self.count_tokens, self.exact_tokens = counter
        self.workers = workers
        self.verify = verify
        self.progress = progress
        self.should_stop = should_stop
        self.table = ItemTable()
        self.refused: list[tuple[str, str]] = []
        self.decoded = 0
        self.decode_seconds = 0.0
        self._choosers: dict[BucketLimits, tuple[BucketChooser, dict[tuple[int, int], Placement]]] = {}
        self._told = 0.0

    def run(self) -> None:
        """Look at every picture. Raises StopRequested when asked to stop; what was learnt stays in the memo."""
        with collector_paused():
            self._run()

    def _run(self) -> None:
        total = sum(found.pictures for found in self.sets)
        start = time.monotonic()
        with DecodePool(_workers(self.workers, total)) as pool:
            waiting: deque[_Task] = deque()
            most = 4 * max(1, pool.workers)
            for task in self._tasks(pool, waiting):
                waiting.append(task)
                while waiting and (waiting[0].result is None or len(waiting) > most):
                    self._finish(waiting.popleft(), total)
            while waiting:
                self._finish(waiting.popleft(), total)
            if self.progress and total:
                self.progress(total, total, "")
        self.decode_seconds = time.monotonic() - start if self.decoded else 0.0

    def _tasks(self, pool: DecodePool, waiting: deque[_Task]) -> Iterator[_Task]:
        """Pictures that need more than a look at what is known of them; the others are done on the way.

        Order is kept: while a picture waits for its facts, all after it wait too.
        """
        for found in self.sets:
            for folder in found.folders:
                yield from self._folder_tasks(found, folder, pool, waiting)

    def _folder_tasks(
        self, found: FoundSet, folder: FoundFolder, pool: DecodePool, waiting: deque[_Task]
    ) -> Iterator[_Task]:
        """`_tasks` of one folder."""
        path = str(folder.folder.path)
        start = os.path.join(path, "")
        is_tar = folder.folder.path.suffix.lower() == ".tar" and folder.folder.path.is_file()
        shared = stamp_of(path) if is_tar and self.memo.active else None
        number = self.table.folder(path, folder.prefix)
        quick = None
        if not is_tar and self._is_plain(found, folder):
            quick = QuickPath(self, found, folder, number)
        for at in range(0, len(folder.folder.pictures), _PAGE):
            names = folder.folder.pictures[at : at + _PAGE]
            rows = [None] * len(names) if self.verify else self.memo.rows(path, names)
            if quick is not None:
                quick.turn_to(at, rows)
            place = 0
            while place < len(names):
                if quick is not None and not waiting:
                    place = quick.take_from(place)
                    if place == len(names):
                        break
                name, row = names[place], rows[place]
                place += 1
                whole = locate(path, name) if is_tar else start + name
                stamp = shared if is_tar else stamp_of(whole) if self.memo.active else None
                if stamp is None or row is None or row[_STAMP] != stamp:
                    job = pool.submit(examine_job(whole, found.spec.background))
                    yield _Task(found, folder, number, name, whole, stamp, None, job)
                else:
                    yield _Task(found, folder, number, name, whole, stamp, Row._make(row).known(), None)

    def _is_plain(self, found: FoundSet, folder: FoundFolder) -> bool:
        """Whether captions come as they are from files beside the pictures, so a known picture needs no thought."""
        spec = folder.spec
        return (
            self.memo.active
            and not self.verify
            and not self.exact_tokens
            and found.metadata is None
            and not spec.mask
            and spec.rules.untouched
        )

    def _finish(self, task: _Task, total: int) -> None:
        facts = task.known.facts if task.known else _facts(task.result)
        self.decoded += task.known is None
        known = task.known or Known(task.stamp or b"", facts)
        file = task.folder.prefix + shown_name(task.name)
        changed = task.known is None
        try:
            reason = facts.reason or _ratio_reason(facts.size, task.folder.spec.max_ratio)
            if reason:
                self.refused.append((file, reason))
            else:
                changed |= self._take(task, file, known)
        except CaptionError as error:
            self.refused.append((file, str(error)))
        if changed and task.stamp is not None and facts.content_hash:
            self.memo.put(str(task.folder.folder.path), task.name, known)
        self.tell(file, total)

    def tell(self, file: str, total: int = 0) -> None:
        """Report progress and ask about a stop a few times a second. Raises StopRequested."""
        now = time.monotonic()
        if now - self._told < _PROGRESS_SECONDS:
            return
        self._told = now
        if self.should_stop and self.should_stop():
            raise StopRequested
        if self.progress:
            total = total or sum(found.pictures for found in self.sets)
            self.progress(len(self.table) + len(self.refused), total, file)

    # ------------------------------------------------------------------ judging
    def _take(self, task: _Task, file: str, known: Known) -> bool:
        """Put a good picture into the table; True when its caption file was read anew."""
        spec, facts = task.folder.spec, known.facts
        text, name, changed = self._caption_text(task, known)
        caption, notes = self._caption(task, file, text, name)
        for note in facts.notes:
            self.notes.decoded.setdefault(note, say.Told()).add(file)
        if known.tokens < 0 or changed:
            known.tokens = least_tokens(text.joined)
        notes = (*facts.notes, *notes, *self._length_note(file, caption, spec))
        mask = self._mask(task, file)
        self.table.add(
            spec,
            task.number,
            task.name,
            content_hash=facts.content_hash,
            size=facts.size,
            place=self.place(spec, facts.size),
            caption=caption,
            notes=notes,
            mask=mask,
        )
        return changed

    def place(self, spec: SetSpec, size: tuple[int, int]) -> Placement:
        entry = self._choosers.get(spec.limits)
        if entry is None:
            entry = self._choosers[spec.limits] = (BucketChooser(spec.limits), {})
        chooser, known = entry
        place = known.get(size)
        if place is None:
            place = known[size] = chooser.place(*size)
        return place

    def _caption_text(self, task: _Task, known: Known) -> tuple[CaptionText, str, bool]:
        """(text, where it comes from, whether a file was read). CaptionError when a file is there but is no text."""
        inside = (task.folder.prefix + shown_name(task.name))[len(task.found.spec.prefix) :]
        if task.found.metadata is not None:
            lines = task.found.metadata.find(inside)
            if lines is not None:
                return CaptionText(lines), task.found.metadata.name, False
        name = task.folder.folder.captions.find(normal_stem(task.name), task.found.ending)
        if name is None:
            return CaptionText(()), "", False
        path = locate(str(task.folder.folder.path), name)
        spec = task.folder.spec
        stamp = stamp_of(file_of(path)) if self.memo.active else None
        key = spec.caption_encoding or ""
        same = known.caption_name == name and known.caption_key == key and known.caption_stamp == stamp
        if known.caption is not None and same and not self.verify:
            return known.caption, name, False
        text = read_caption(path, shown_name(name), spec.caption_encoding)
        known.caption_name, known.caption_key, known.caption_stamp, known.caption = name, key, stamp or b"", text
        return text, name, stamp is not None

    def _caption(self, task: _Task, file: str, text: CaptionText, name: str) -> tuple[str, tuple[str, ...]]:
        """Caption and notes about it."""
        spec, index = task.folder.spec, task.folder.folder.captions
        self.notes.endings.add(task.found.ending)
        if not name:
            stem = normal_stem(task.name)
            strays = [index.find(stem, other) for other in index.extensions if other != task.found.ending]
            for stray in filter(None, strays):
                self.notes.other_endings.add(task.folder.prefix + shown_name(stray))
        if text.lines:
            return ("\n".join(text.lines) if spec.keeps_lines else text.joined), text.notes
        (self.notes.empty if name else self.notes.without).add(file)
        fallback = spec.default_caption or spec.class_tokens
        self.notes.fallback.add(fallback)
        return fallback, (*text.notes, f"the caption in {shown_name(name)} is empty" if name else "no caption file")

    def _length_note(self, file: str, caption: str, spec: SetSpec) -> tuple[str, ...]:
        fixed = fixed_captions(caption, spec.rules)
        text, limit = fixed[0] if fixed else caption, spec.max_token_length
        # a token stands for at least one byte, so most short captions need no counting
        if len(text) * 4 <= limit or (text.isascii() and len(text) <= limit):
            return ()
        count = self.count_tokens(text)
        if count <= limit:
            return ()
        words = f"{count}" if self.exact_tokens else f"at least {count}"
        self.notes.long.add(f"{file} ({words})")
        return (f"caption too long: {words} tokens, the window holds {limit}; the rest is cut off",)

    def _mask(self, task: _Task, file: str) -> str | None:
        spec = task.folder.spec
        if not spec.mask or spec.is_prior:
            return None
        if spec.mask == "alpha":
            return "alpha"
        found = task.found.masks.find(file[len(task.found.spec.prefix) :]) if task.found.masks else None
        if found is None:
            self.notes.unmasked.add(file)
        return found


class QuickPath:
    """Takes pictures of one folder that are known, good and captioned as before, without another thought.

    It goes page by page, because list comprehensions and one call for many files cost a fraction of calls for each.
    """

    def __init__(self, scan: PictureScan, found: FoundSet, folder: FoundFolder, number: int) -> None:
        self.scan = scan
        self.folder = folder
        self.number = number
        self.captions = folder.folder.captions.stems(found.ending)
        self.starts: dict[tuple[int, int], bytes] = {}
        self.rows: Sequence[tuple[Any, ...] | None] = ()
        self.ready = bytearray()

    def turn_to(self, at: int, rows: Sequence[tuple[Any, ...] | None]) -> None:
        """Begin the page of pictures from place `at` of the folder on, given what the memo knows of them."""
        key, limit = self.folder.spec.caption_encoding or "", self.folder.spec.max_token_length
        captions = map(self.captions.get, self.folder.folder.stems[at : at + len(rows)])
        good = [
            (place, row)
            for place, (row, caption) in enumerate(zip(rows, captions, strict=True))
            if row is not None
            and row[_PLAIN]
            and row[_CAPTION_NAME] == caption
            and row[_CAPTION_KEY] == key
            and 0 <= row[_TOKENS] <= limit
        ]
        path = str(self.folder.folder.path)
        pictures = stamps_in(path, [row[_NAME] for _, row in good])
        texts = stamps_in(path, [row[_CAPTION_NAME] for _, row in good])
        self.rows, self.ready = rows, bytearray(len(rows))
        for (place, row), picture, text in zip(good, pictures, texts, strict=True):
            self.ready[place] = row[_STAMP] == picture and row[_CAPTION_STAMP] == text

    def take_from(self, place: int) -> int:
        """Put the page's pictures from `place` on into the table; the place of the first that needs a closer look."""
        end = self.ready.find(0, place)
        run = [row for row in self.rows[place : end if end >= 0 else None] if row is not None]
        starts: list[bytes] = []
        for row in run:
            size = row[_WIDTH], row[_HEIGHT]
            start = self.starts.get(size) or self._start(size)
            if not start:
                break
            starts.append(start)
        if starts:
            del run[len(starts) :]
            contents, names, captions = zip(*((row[_CONTENT], row[_NAME], row[_CAPTION]) for row in run), strict=True)
            self.scan.table.add_many(starts, contents, names, captions)
            self.scan.tell(self.folder.prefix + names[-1])
        return place + len(starts)

    def _start(self, size: tuple[int, int]) -> bytes:
        """Start of the table's row for pictures of this size; empty for a size that is refused."""
        if _ratio_reason(size, self.folder.spec.max_ratio):
            return b""
        chosen = self.scan.place(self.folder.spec, size)
        found = self.starts[size] = self.scan.table.row_start(self.folder.spec, self.number, size, chosen)
        return found


def _ratio_reason(size: tuple[int, int], limit: float) -> str | None:
    ratio = max(size) / max(1, min(size))
    if ratio <= limit:
        return None
    return f"aspect ratio {ratio:.0f}:1 ({size[0]}x{size[1]}) is beyond the limit of {limit:g}:1"


def _facts(result: Callable[[], object] | None) -> PictureFacts:
    assert result is not None, "a picture is either known or decoded"
    try:
        found = result()
    except PictureError as error:
        return PictureFacts("", (0, 0), reason=str(error))
    assert isinstance(found, PictureFacts), f"an examine job answers facts, got {type(found).__name__}"
    return found


def _workers(asked: int | None, pictures: int) -> int:
    """Processes for the first pass: none for small sets, where starting them takes longer than the work."""
    if asked == 0 or pictures < _INLINE_PICTURES:
        return 0
    return min(max(asked or 1, os.cpu_count() or 1), 8)
