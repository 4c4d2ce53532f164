"""What is known of files from earlier scans: (folder, name, size, times, inode) to content hash and caption text.

A file whose size, modification time, change time and inode are as they were is not read again, so a big set starts at
the speed of the file system; `verify` reads everything anyway. A file that changed in the last seconds before it was
read is not remembered, because another change within the clock's grain could not be told. SQLite; losing the file costs
one decoding pass and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL

from .caption_files import CaptionText
from .decode import PictureFacts

log = logging.getLogger(__name__)

FILE_NAME = "files.db"
_VERSION = f"1 pillow {PIL.__version__}"
_PAGE = 2000
_FRESH_NS = 2_000_000_000

Stamp = bytes
"""Size, modification time, change time and inode of a file, packed."""


def stamp_of(path: str) -> Stamp | None:
    """The file's stamp (of what a link points to), or None when it cannot be looked at."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return struct.pack("<qqqQ", found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def is_fresh(stamp: Stamp) -> bool:
    """Whether the file changed so recently that its stamp says nothing yet."""
    _, modified, changed, _ = struct.unpack("<qqqQ", stamp)
    return time.time_ns() - max(modified, changed) < _FRESH_NS


@dataclass(slots=True)
class Known:
    """One remembered picture and its caption file, if any."""

    stamp: Stamp
    facts: PictureFacts
    caption_name: str = ""
    caption_key: str = ""
    caption_stamp: Stamp = b""
    caption: CaptionText | None = None


class FileMemo:
    """The memo in `folder` (None: remembers nothing). A memo that cannot be opened is left aside with a log line."""

    def __init__(self, folder: Path | None) -> None:
        self._base: sqlite3.Connection | None = None
        self._waiting: list[tuple[object, ...]] = []
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._base = _open(folder / FILE_NAME)
        except (OSError, sqlite3.Error) as error:
            log.warning("the memo of known files in '%s' cannot be used (%s); all pictures are read", folder, error)

    @property
    def active(self) -> bool:
        return self._base is not None

    def folder(self, path: str) -> FolderMemo:
        """What is known of one folder, to be asked for names in ascending order."""
        return FolderMemo(self._pages(os.fsencode(path)))

    def _pages(self, folder: bytes) -> Iterator[tuple[bytes, Known]]:
        last = b""
        while self._base is not None:
            rows = self._base.execute(
                "SELECT name, stamp, hash, width, height, format, notes, reason, caption_name, caption_key, "
                "caption_stamp, caption FROM files WHERE folder = ? AND name > ? ORDER BY name LIMIT ?",
                (folder, last, _PAGE),
            ).fetchall()
            for row in rows:
                yield row[0], _known(row)
            if len(rows) < _PAGE:
                return
            last = rows[-1][0]

    def put(self, folder: str, name: str, known: Known) -> None:
        """Remember a picture. Written in batches; call `flush` at the end."""
        if self._base is None or is_fresh(known.stamp):
            return
        facts, text = known.facts, known.caption
        caption = None if text is None or is_fresh(known.caption_stamp) else json.dumps([text.lines, text.notes])
        self._waiting.append(
            (
                os.fsencode(folder), os.fsencode(name), known.stamp, bytes.fromhex(facts.content_hash),
                facts.size[0], facts.size[1], facts.format, json.dumps(facts.notes) if facts.notes else None,
                facts.reason, os.fsencode(known.caption_name), known.caption_key, known.caption_stamp, caption,
            )
        )  # fmt: skip
        if len(self._waiting) >= _PAGE:
            self.flush()

    def flush(self) -> None:
        if self._base is None or not self._waiting:
            return
        try:
            with self._base:
                self._base.executemany(f"INSERT OR REPLACE INTO files VALUES ({','.join('?' * 13)})", self._waiting)
        except sqlite3.Error as error:
            log.warning("the memo of known files cannot be written: %s", error)
        self._waiting.clear()

    def close(self) -> None:
        self.flush()
        if self._base is not None:
            self._base.close()
            self._base = None


class FolderMemo:
    """A reader of one folder's rows that walks along with a sorted list of names."""

    def __init__(self, rows: Iterator[tuple[bytes, Known]]) -> None:
        self._rows = rows
        self._next = next(rows, None)

    def find(self, name: str) -> Known | None:
        wanted = os.fsencode(name)
        while self._next is not None and self._next[0] < wanted:
            self._next = next(self._rows, None)
        return self._next[1] if self._next is not None and self._next[0] == wanted else None


def _known(row: tuple[Any, ...]) -> Known:
    _, stamp, content, width, height, form, notes, reason, caption_name, caption_key, caption_stamp, caption = row
    facts = PictureFacts(
        content.hex(),
        (width, height),
        form,
        tuple(json.loads(notes)) if notes else (),
        reason,
    )
    text = None
    if caption is not None:
        lines, more = json.loads(caption)
        text = CaptionText(tuple(lines), tuple(more))
    return Known(stamp, facts, os.fsdecode(caption_name), caption_key, caption_stamp, text)


def _open(path: Path) -> sqlite3.Connection:
    """The database with this version's table; another version's, or a damaged one, is made anew."""
    base = sqlite3.connect(path, timeout=10)
    try:
        base.execute("CREATE TABLE IF NOT EXISTS meta (version TEXT)")
        found = base.execute("SELECT version FROM meta").fetchone()
    except sqlite3.DatabaseError:
        base.close()
        path.unlink(missing_ok=True)
        return _open_new(path)
    if found == (_VERSION,):
        return base
    base.close()
    path.unlink(missing_ok=True)
    return _open_new(path)


def _open_new(path: Path) -> sqlite3.Connection:
    base = sqlite3.connect(path, timeout=10)
    with base:
        base.execute("CREATE TABLE meta (version TEXT)")
        base.execute("INSERT INTO meta VALUES (?)", (_VERSION,))
        base.execute(
            "CREATE TABLE files (folder BLOB, name BLOB, stamp BLOB, hash BLOB, width INTEGER, height INTEGER, "
            "format TEXT, notes TEXT, reason TEXT, caption_name BLOB, caption_key TEXT, caption_stamp BLOB, "
            "caption TEXT, PRIMARY KEY (folder, name)) WITHOUT ROWID"
        )
    return base
