"""Finding pictures: the folder as people type it, kohya's `N_name` folders, sub-folders, links without loops."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DatasetError
from .caption_files import CaptionIndex
from .decode import ENDINGS, UNREADABLE_ENDINGS

_SYSTEM_FOLDERS = {"__macosx", "@eadir", "$recycle.bin", "system volume information", "#recycle", "lost+found"}
_SYSTEM_FILES = {"thumbs.db", "desktop.ini", "ehthumbs.db"}
_KOHYA_FOLDER = re.compile(r"^(\d+)_(.*)$")
_QUOTES = {'"': '"', "'": "'", "\u201c": "\u201d", "\u2018": "\u2019", "`": "`", "\u00ab": "\u00bb"}


def clean_folder(typed: str) -> Path:
    """The folder meant by what somebody typed or pasted: blanks, quotes, line ends and a trailing slash do not matter.

    A folder that really has such a name wins. Raises DatasetError with the path between marks.
    """
    if not typed.strip():
        raise DatasetError("No folder of pictures was given. Set dataset.path to a folder with pictures and captions.")
    for candidate in (typed, _unquoted(typed)):
        path = Path(candidate).expanduser()
        try:
            if path.is_dir():
                return path
            if path.exists():
                raise DatasetError(
                    f"The data set must be a folder, but '{candidate}' is a file. "
                    "Give the folder that holds the pictures.",
                    path,
                )
        except (OSError, ValueError) as error:
            raise DatasetError(f"The folder '{candidate}' cannot be looked at: {error}.", path) from error
    shown = _unquoted(typed)
    parent = Path(shown).expanduser().absolute().parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    raise DatasetError(f"The folder '{shown}' does not exist. The nearest folder that does is '{parent}'.", shown)


def _unquoted(typed: str) -> str:
    text = typed.strip().strip("\ufeff\u200b\u202a\u200e").strip()
    while len(text) > 1 and _QUOTES.get(text[0]) == text[-1]:
        text = text[1:-1].strip()
    if text.lower().startswith("file://"):
        from urllib.parse import unquote, urlparse

        text = unquote(urlparse(text).path)
    bare = text.rstrip("/\\")
    return bare if bare and not bare.endswith(":") else text


@dataclass
class Folder:
    """What lies directly in one folder. `relative`: its POSIX path inside the data set, '' for the set's own folder."""

    path: Path
    relative: str
    pictures: list[str] = field(default_factory=list)
    captions: CaptionIndex = field(default_factory=lambda: CaptionIndex(()))
    others: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)

    def name_of(self, file: str) -> str:
        """POSIX path of `file` inside the data set."""
        return f"{self.relative}/{file}" if self.relative else file


def is_passed_over(name: str) -> bool:
    """Hidden files, system files and half downloads: never trained, never an error."""
    lower = name.lower()
    return (name.startswith(".") and not name.startswith("...")) or lower in _SYSTEM_FILES


def list_folder(path: Path, relative: str, caption_extensions: Sequence[str]) -> Folder:
    """The files and folders of one folder, sorted by name. DatasetError when it cannot be listed."""
    folder = Folder(path, relative, captions=CaptionIndex(caption_extensions))
    try:
        with os.scandir(path) as entries:
            found = sorted(((entry.name, _is_folder(entry)) for entry in entries), key=_name_bytes)
    except OSError as error:
        raise DatasetError(f"The folder '{path}' cannot be listed: {error.strerror or error}.", path) from error
    for name, is_folder in found:
        if is_folder:
            if not is_passed_over(name) and name.lower() not in _SYSTEM_FOLDERS:
                folder.folders.append(name)
        elif is_passed_over(name):
            folder.others.append(name)
        else:
            _sort_in(folder, name)
    return folder


def _name_bytes(entry: tuple[str, bool]) -> bytes:
    return os.fsencode(entry[0])


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that points at itself
        return False


def _sort_in(folder: Folder, name: str) -> None:
    suffix = os.path.splitext(name)[1].lower()
    if suffix in ENDINGS:
        folder.pictures.append(name)
    elif folder.captions.add(name, suffix):
        return
    else:
        folder.others.append(name)
        if suffix in UNREADABLE_ENDINGS:
            folder.unreadable.append(name)


def walk(
    root: Path,
    caption_extensions: Sequence[str],
    *,
    recursive: bool,
    problems: list[str],
    skip: Path | None = None,
) -> Iterator[Folder]:
    """The folder and, when `recursive`, all below it, parents first, in name order. A folder is visited once.

    Links are followed; one that leads back up is not entered again, nor is `skip`. Sub-folders that cannot be listed go
    to `problems`.
    """
    seen: set[str] = set() if skip is None else {os.path.realpath(skip)}
    waiting = [(root, "")]
    while waiting:
        path, relative = waiting.pop()
        real = os.path.realpath(path)
        if real in seen:
            continue
        seen.add(real)
        try:
            folder = list_folder(path, relative, caption_extensions)
        except DatasetError as error:
            if path == root:
                raise
            problems.append(str(error))
            continue
        yield folder
        if recursive:
            below = [(path / name, folder.name_of(name)) for name in folder.folders]
            waiting.extend(reversed(below))


def kohya_folders(root: Folder) -> list[tuple[str, int, str]]:
    """(folder name, repeats, class tokens) of the sub-folders named as kohya's trainers want them, `N_class tokens`."""
    found = []
    for name in root.folders:
        match = _KOHYA_FOLDER.match(name)
        if match:
            found.append((name, int(match.group(1)), match.group(2).strip()))
    return found


def pictures_below(root: Folder, *, skip: Sequence[str] = (), limit: int = 100_000) -> dict[str, int]:
    """Number of pictures in each sub-folder of `root` (all levels below it), where there are any."""
    counts: dict[str, int] = {}
    for name in root.folders:
        if name in skip:
            continue
        count = 0
        for folder in walk(root.path / name, (), recursive=True, problems=[]):
            count += len(folder.pictures)
            if count >= limit:
                break
        if count:
            counts[name] = count
    return counts
