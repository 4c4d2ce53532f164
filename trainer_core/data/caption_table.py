"""Captions of a data set one by one, for people who look at them and mend them: which file each is, and writing it.

Nothing is decoded here: a table is a listing, and a caption is read when it is looked at.
"""

from __future__ import annotations

import hashlib
import os
import stat
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..config import BucketConfig, DatasetConfig
from ..errors import DatasetError
from ..runs.platform import DurableIO
from . import scan_warnings as say
from .caption_files import CaptionError, decode_text, normal_stem
from .find import FoundFolder, FoundSet, find_set
from .locations import MARK, locate, read_location, shown_name
from .sets import SetSpec, sets_from_config

MAX_CHARACTERS = 8000
"""Longest caption that is written; the text encoders see 225 tokens at most."""

_KEPT = ("\n", "\t")


class CaptionChanged(Exception):
    """The caption on the disk is no longer the one that was looked at; nothing was written."""


@dataclass(frozen=True, slots=True)
class CaptionRow:
    """One picture. `key`: its id, 16 hex digits, from `file`, the POSIX path inside the data set.

    `picture`: location of the picture. `target`: the caption file to write, None where that cannot be done, and then
    `why` says why. `location`: of the caption file that is there, if any; `listed`: the caption of a metadata file.
    """

    key: str
    file: str
    picture: str
    background: tuple[int, int, int]
    target: Path | None
    location: str | None = None
    encoding: str | None = None
    listed: str | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class CaptionState:
    """A caption as it stands now. `version` changes with it; `problem` says why its file is no text."""

    text: str
    version: str
    problem: str = ""


def caption_rows(dataset: DatasetConfig, bucket: BucketConfig | None = None) -> list[CaptionRow]:
    """The pictures of a data set with their caption files, by name. Lists folders and opens no picture.

    Raises DatasetError or ConfigError as a scan does.
    """
    notes = say.ScanNotes()
    rows: list[CaptionRow] = []
    specs = sets_from_config(dataset, bucket or BucketConfig(), 1024)
    for spec in specs:
        found = find_set(spec, notes, _prior_inside(spec, specs))
        for folder in found.folders:
            rows += _rows_of(folder, found)
    return sorted(rows, key=lambda row: row.file)


def read_state(row: CaptionRow) -> CaptionState:
    """Text of the caption file as it stands, with its lines; a file that is no text gives `problem`."""
    if row.listed is not None:
        return CaptionState(row.listed, _version(row.listed.encode("utf-8", "surrogatepass")))
    if row.location is None:
        return CaptionState("", "")
    name = os.path.basename(shown_name(row.location))
    try:
        data = read_location(row.location)
    except FileNotFoundError:
        return CaptionState("", "")
    except OSError as error:
        return CaptionState("", "", f"its caption file {name} cannot be read: {error.strerror or error}")
    try:
        return CaptionState(decode_text(data, name, row.encoding)[0].rstrip("\r\n"), _version(data))
    except CaptionError as error:
        return CaptionState("", _version(data), str(error))


def write_caption(row: CaptionRow, text: str, version: str) -> CaptionState:
    """Write the caption file of `row`: UTF-8, whole or not at all. `version`: of the caption that was looked at.

    A link to a file elsewhere is replaced by a file of its own; the other file stays as it is.

    Raises:
        CaptionChanged: the caption has changed since.
        DatasetError: it cannot be written, or `text` is none.
    """
    if row.target is None:
        raise DatasetError(f"The caption of {row.file} cannot be changed here: {row.why}.")
    text = _clean(text)
    if read_state(row).version != version:
        raise CaptionChanged(f"The caption of {row.file} has been changed by somebody else. Load it again.")
    data = (text + "\n" if text else "").encode("utf-8")
    if row.encoding and row.encoding.lower().replace("_", "-") not in ("utf-8", "utf8", "utf-8-sig"):
        data = b"\xef\xbb\xbf" + data  # a mark outweighs caption_encoding, which would read these bytes wrongly
    mode = None
    with suppress(OSError):
        mode = stat.S_IMODE(row.target.stat().st_mode)
    try:
        DurableIO().replace_file(row.target, data)
        if mode is not None:
            os.chmod(row.target, mode)
    except OSError as error:
        raise DatasetError(
            f"The caption file {row.target.name} could not be written: {error.strerror or error}. "
            "The old caption stands. Look at the rights of the folder and the space on the disk."
        ) from error
    return CaptionState(text, _version(data))


def folders_of(dataset: DatasetConfig, bucket: BucketConfig | None = None) -> list[Path]:
    """The folders (or tar files) whose files a run of this data set reads. DatasetError when one is not there."""
    return [spec.folder for spec in sets_from_config(dataset, bucket or BucketConfig(), 1024)]


def _clean(text: str) -> str:
    """`text` with plain line ends. DatasetError for what no caption can hold."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").rstrip()
    if len(text) > MAX_CHARACTERS:
        raise DatasetError(f"The caption has {len(text)} characters, at most {MAX_CHARACTERS} are possible.")
    bad = next((c for c in text if c not in _KEPT and unicodedata.category(c) in ("Cc", "Cs")), None)
    if bad is not None:
        raise DatasetError(f"The caption holds a character that is no text (U+{ord(bad):04X}). Remove it.")
    return text


def _version(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _prior_inside(spec: SetSpec, specs: Sequence[SetSpec]) -> Path | None:
    """A prior set's folder below this set's, as the scan leaves it out."""
    real = Path(os.path.realpath(spec.folder))
    for other in specs:
        if other.is_prior and not spec.is_prior and real in Path(os.path.realpath(other.folder)).parents:
            return other.folder
    return None


def _rows_of(one: FoundFolder, found: FoundSet) -> Iterator[CaptionRow]:
    folder = one.folder
    for name, stem in zip(folder.pictures, folder.stems, strict=True):
        file = one.prefix + shown_name(name)
        key = hashlib.blake2b(file.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        picture, background = locate(str(folder.path), name), one.spec.background
        caption = folder.captions.find(stem or normal_stem(name), found.ending)
        location = None if caption is None else locate(str(folder.path), caption)
        listed = None
        if found.metadata is not None:
            lines = found.metadata.find(file[len(found.spec.prefix) :])
            listed = None if lines is None else "\n".join(lines)
        why = ""
        if listed is not None and found.metadata is not None:
            why = f"it stands in {found.metadata.name}, edit that file"
        elif MARK in name:
            why = f"it lies in the archive {folder.path.name}"
        target = None if why else folder.path / (caption or os.path.splitext(name)[0] + found.ending)
        yield CaptionRow(key, file, picture, background, target, location, one.spec.caption_encoding, listed, why)
