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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import PIL

from .caption_files import CaptionText
from .decode import PictureFacts

log = logging.getLogger(__name__)

FILE_NAME = "files.db"
_VERSION = f"2 pillow {PIL.__version__}"
_PAGE = 2000
_FRESH_NS = 2_000_000_000

Stamp = bytes
"""Size, modification time, change time and inode of a file, packed."""


_stat = os.stat
_pack = struct.Struct("<qqqQ").pack
_facts = attrgetter("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino")  # one call for the four of them


def stamp_of(path: str) -> Stamp | None:
    """The file's stamp (of what a link points to), or None when it cannot be looked at."""
    try:
        return _pack(*_facts(_stat(path)))
    except (OSError, ValueError):
        return None


def stamps_in(folder: str, names: Sequence[str]) -> list[Stamp | None]:
    """`stamp_of` for names in one folder, which is looked up once where the system can do that."""
    try:
        number = os.open(folder, os.O_RDONLY) if _stat in os.supports_dir_fd else None
    except OSError:
        number = None
    start = os.path.join(folder, "") if number is None else ""
    try:
        return [_pack(*_facts(_stat(start + name, dir_fd=number))) for name in names]
    except (OSError, ValueError):  # one of them cannot be looked at: each for itself
        return [stamp_of(os.path.join(folder, name)) for name in names]
    finally:
        if number is not None:
            os.close(number)


def is_fresh(stamp: Stamp) -> bool:
    """Whether the file changed so recently that its stamp says nothing yet."""
    _, modified, changed, _ = struct.unpack("<qqqQ", stamp)
    return time.time_ns() - max(modified, changed) < _FRESH_NS


@dataclass(slots=True)
class Known:
    """One remembered picture and its caption file, if any. `tokens`: at least so many in the caption, -1 unknown."""

    stamp: Stamp
    facts: PictureFacts
    caption_name: str = ""
    caption_key: str = ""
    caption_stamp: Stamp = b""
    caption: CaptionText | None = None
    tokens: int = -1


class Row(NamedTuple):
    """One row as it is stored: what the fast path of the scan compares without making a `Known`.

    `plain`: nothing has to be said about the picture, and its caption is one line of text.
    """

    name: str
    stamp: Stamp
    content: bytes
    width: int
    height: int
    format: str
    notes: str | None
    reason: str | None
    caption_name: str
    caption_key: str
    caption_stamp: Stamp
    caption: str | None
    caption_notes: str | None
    tokens: int
    plain: int | None

    def known(self) -> Known:
        """The row as the scan uses it."""
        notes = tuple(json.loads(self.notes)) if self.notes else ()
        facts = PictureFacts(self.content.hex(), (self.width, self.height), self.format, notes, self.reason)
        text = None
        if self.caption is not None:
            lines = tuple(self.caption.split("\n")) if self.caption else ()
            text = CaptionText(lines, tuple(json.loads(self.caption_notes)) if self.caption_notes else ())
        return Known(self.stamp, facts, self.caption_name, self.caption_key, self.caption_stamp, text, self.tokens)


_SELECT = (
    "SELECT name, stamp, hash, width, height, format, notes, reason, caption_name, caption_key, caption_stamp, "
    "caption, caption_notes, tokens, "
    "notes IS NULL AND reason IS NULL AND caption_notes IS NULL AND caption <> '' AND instr(caption, char(10)) = 0 "
    "FROM files WHERE folder = ? AND name BETWEEN ? AND ? ORDER BY name"
)


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

    def rows(self, folder: str, names: Sequence[str]) -> list[tuple[Any, ...] | None]:
        """What is known of each of `names`: the fields of a `Row` as they come from the database, or None.

        `names` ascend and are at most a few thousand: all are read at once.
        """
        storable = names if is_text("".join(names)) else list(filter(is_text, names))
        if self._base is None or not storable or not is_text(folder):
            return [None] * len(names)
        found = self._base.execute(_SELECT, (folder, storable[0], storable[-1]))
        first: list[tuple[Any, ...] | None] = found.fetchmany(len(names))
        if [row[0] for row in first if row] == names:  # the usual case: no file came or went
            return first
        wanted = set(names)  # between first and last may lie any number of files that are gone
        known = {row[0]: row for row in chain(first, found) if row and row[0] in wanted}
        return [known.get(name) for name in names]

    def put(self, folder: str, name: str, known: Known) -> None:
        """Remember a picture. Written in batches; call `flush` at the end."""
        names = (folder, name, known.caption_name)
        if self._base is None or is_fresh(known.stamp) or not all(map(is_text, names)):
            return
        facts, text = known.facts, known.caption
        keep = text is not None and not is_fresh(known.caption_stamp) and is_text("".join(text.lines))
        self._waiting.append(
            (
                folder, name, known.stamp, bytes.fromhex(facts.content_hash), facts.size[0], facts.size[1],
                facts.format, json.dumps(facts.notes) if facts.notes else None, facts.reason,
                known.caption_name, known.caption_key, known.caption_stamp,
                "\n".join(text.lines) if keep and text else None,
                json.dumps(text.notes) if keep and text and text.notes else None, known.tokens,
            )
        )  # fmt: skip
        if len(self._waiting) >= _PAGE:
            self.flush()

    def flush(self) -> None:
        if self._base is None or not self._waiting:
            return
        try:
            with self._base:
                self._base.executemany(f"INSERT OR REPLACE INTO files VALUES ({','.join('?' * 15)})", self._waiting)
        except sqlite3.Error as error:
            log.warning("the memo of known files cannot be written: %s", error)
        self._waiting.clear()

    def close(self) -> None:
        self.flush()
        if self._base is not None:
            self._base.close()
            self._base = None


def is_text(name: str) -> bool:
    """Whether a name can be stored: undecodable bytes in a name cannot, so such a file is read every time."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


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
            "CREATE TABLE files (folder TEXT, name TEXT, stamp BLOB, hash BLOB, width INTEGER, height INTEGER, "
            "format TEXT, notes TEXT, reason TEXT, caption_name TEXT, caption_key TEXT, caption_stamp BLOB, "
            "caption TEXT, caption_notes TEXT, tokens INTEGER, PRIMARY KEY (folder, name)) WITHOUT ROWID"
        )
    return base
