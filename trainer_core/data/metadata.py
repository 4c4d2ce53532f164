"""Captions of many pictures in one file: `metadata.jsonl` and `metadata.json`, in the layouts people have.

Read are lines or a list of objects with the picture under `file_name`, `image_path`, `image`, `file` or `path` and the
words under `caption`, `text` or `prompt` (Hugging Face's and sd-scripts' names), and sd-scripts' object of
`{path: {caption, tags}}`. Tags follow the caption after a comma, as sd-scripts joins them. Sizes noted there are not
trusted: every picture is decoded anyway.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import DatasetError
from ..plain_text import parse_json
from .caption_files import CaptionError, decode_text

DEFAULT_NAMES = ("metadata.jsonl", "metadata.json")
_FILE_KEYS = ("file_name", "image_path", "image", "file", "path", "filename")
_TEXT_KEYS = ("caption", "text", "prompt")


@dataclass
class Metadata:
    """Captions by POSIX path inside the set. `problems` are sentences that name the file and the line."""

    name: str
    captions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _stems: dict[str, str | None] | None = None

    def find(self, file: str) -> tuple[str, ...] | None:
        """Caption lines of a picture: by its path, else by its path without the ending when that is unique."""
        file = unicodedata.normalize("NFC", file)
        if file in self.captions:
            return self.captions[file]
        if self._stems is None:
            self._stems = {}
            for known in self.captions:
                if not PurePosixPath(known).suffix:
                    self._stems[known] = known
        known = self._stems.get(str(PurePosixPath(file).with_suffix("")))
        return None if known is None else self.captions[known]


def find_metadata(folder: Path, chosen: str | None) -> Path | None:
    """The metadata file of a set: the chosen one, or one with a usual name in the folder, or None.

    Raises DatasetError when the chosen one is not there.
    """
    if chosen:
        for path in (folder / chosen, Path(chosen).expanduser()):
            if path.is_file():
                return path
        raise DatasetError(f"The metadata file '{chosen}' is neither in '{folder}' nor a path that exists.", chosen)
    return next((folder / name for name in DEFAULT_NAMES if (folder / name).is_file()), None)


def read_metadata(path: Path, folder: Path, encoding: str | None = None) -> Metadata:
    """Read a metadata file of the set in `folder`. A bad line is a problem, not the end.

    Raises DatasetError when the file cannot be read as text or, for `.json`, is no JSON.
    """
    found = Metadata(path.name)
    try:
        text = decode_text(path.read_bytes(), path.name, encoding)[0]
    except OSError as error:
        raise DatasetError(f"The metadata file '{path}' cannot be read: {error.strerror or error}.", path) from error
    except CaptionError as error:
        raise DatasetError(str(error).replace("its caption file", "The metadata file") + ".", path) from error
    rows = _json_rows(path, text) if path.suffix.lower() == ".json" else _line_rows(path, text, found.problems)
    for where, row in rows:
        _take_row(found, where, row, path.parent, folder)
    return found


def _line_rows(path: Path, text: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path.name} line {number}", parse_json(line)
        except ValueError as error:
            problems.append(f"{path.name} line {number} is no JSON: {error}")


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        content = parse_json(text)
    except ValueError as error:
        raise DatasetError(f"The metadata file '{path}' is no JSON: {error}.", path) from error
    if isinstance(content, dict):
        for name, row in content.items():
            row = {"caption": row} if isinstance(row, str) else row
            yield f"{path.name} entry {name!r}", {"file_name": name, **row} if isinstance(row, dict) else row
    elif isinstance(content, list):
        for number, row in enumerate(content, start=1):
            yield f"{path.name} entry {number}", row
    else:
        raise DatasetError(f"The metadata file '{path}' holds neither a list nor an object of pictures.", path)


def _take_row(found: Metadata, where: str, row: Any, base: Path, folder: Path) -> None:
    name = (
        next((row[key] for key in _FILE_KEYS if isinstance(row.get(key), str)), None) if isinstance(row, dict) else None
    )
    if name is None:
        found.problems.append(f"{where} names no picture ({' or '.join(_FILE_KEYS[:3])})")
        return
    file = _inside(name, base, folder)
    if file is None:
        found.problems.append(f"{where} names '{name}', which is outside of the data set's folder")
        return
    if file in found.captions:
        found.problems.append(f"{where} names {file} again; the later entry counts")
    found.captions[file] = _words(row)


def _words(row: dict[str, Any]) -> tuple[str, ...]:
    """Caption lines of an entry: its text (a list gives one line each) with its tags."""
    text = next((row[key] for key in _TEXT_KEYS if row.get(key)), "")
    lines = [str(part) for part in text] if isinstance(text, list) else str(text).splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    tags = row.get("tags")
    if tags:
        joined = ", ".join(str(tag) for tag in tags) if isinstance(tags, list) else str(tags)
        lines = [f"{line}, {joined}" for line in lines] or [joined]
    return tuple(lines)


def _inside(name: str, base: Path, folder: Path) -> str | None:
    """POSIX path of a named picture inside `folder`, or None when it lies elsewhere."""
    path = Path(name.replace("\\", "/"))
    whole = path if path.is_absolute() else base / path
    parts: list[str] = []
    for part in whole.absolute().parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    try:
        relative = Path(*parts).relative_to(folder.absolute())
    except ValueError:
        return None
    return unicodedata.normalize("NFC", relative.as_posix())
