"""Cuts the places of this machine out of what goes to browsers: of an absolute path only its last part stays.

Messages quote files as the person at the machine needs them; a page that is shared, recorded or reached from elsewhere
must not tell how folders are called here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, cast

_SPOKEN = ("prompt", "caption")
"""Keys whose values are people's own words."""

_FILES = ("file", "lora")
"""Keys whose values are one path each, blanks and all."""

_ROOT = r"(?:[A-Za-z]:[\\/]|\\\\|/)"
_QUOTED = re.compile(rf"'({_ROOT}[^'\n]*)'|\"({_ROOT}[^\"\n]*)\"")
"""A path between marks may hold blanks."""
_PLAIN = re.compile(r"(?<![\w.:/\\])(?:[A-Za-z]:|\\)?(?:[\\/][^\\/\s:*?\"'<>|,;]+){2,}[\\/]?")


def hide_places(value: Any, folders: Iterable[Path | str] = ()) -> Any:
    """`value` (JSON data) with every absolute path in its texts cut down to its last part.

    What lies below one of `folders` keeps its path inside that folder.
    """
    known = sorted({str(folder) for folder in folders if str(folder) not in ("", ".", "/", "\\")}, key=len)[::-1]
    return _hide(value, known)


def bare_text(text: str, folders: Iterable[Path | str] = ()) -> str:
    """`hide_places` of one text."""
    return cast("str", hide_places(text, folders))


def bare_name(file: str) -> str:
    """The last part of a path of either system."""
    return PureWindowsPath(PurePosixPath(file).name).name


def _hide(value: Any, known: list[str]) -> Any:
    if isinstance(value, str):
        return _text(value, known) if "/" in value or "\\" in value else value
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return {key: item if key in _SPOKEN else _one(key, item, known) for key, item in table.items()}
    if isinstance(value, list | tuple):
        return [_hide(item, known) for item in cast("list[Any]", value)]
    return value


def _one(key: str, item: Any, known: list[str]) -> Any:
    if key in _FILES and isinstance(item, str) and re.match(_ROOT, item):
        return bare_name(item)
    return _hide(item, known)


def _text(text: str, known: list[str]) -> str:
    for folder in known:
        text = text.replace(f"{folder}/", "").replace(f"{folder}\\", "").replace(folder, bare_name(folder))
    text = _QUOTED.sub(lambda found: f"'{bare_name((found[1] or found[2]).rstrip('/' + chr(92)))}'", text)
    return _PLAIN.sub(lambda found: bare_name(found[0].rstrip("/\\")), text)
