"""Finding pictures: the folder as people type it, kohya's `N_name` folders, sub-folders, links without loops."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DatasetError
from .caption_files import CaptionIndex, normal_stem
from .decode import ENDINGS, UNREADABLE_ENDINGS

_SYSTEM_FOLDERS = {"__macosx", "@eadir", "$recycle.bin", "system volume information", "#recycle", "lost+found"}
_SYSTEM_FILES = {"thumbs.db", "desktop.ini", "ehthumbs.db"}
_KOHYA_FOLDER = re.compile(r"^(\d+)_(.*)$")
_ENDINGS = frozenset(ENDINGS)
_QUOTES = {'"': '"', "'": "'", "\u201c": "\u201d", "\u2018": "\u2019", "`": "`", "\u00ab": "\u00bb"}


def clean_folder(typed: str) -> Path:
    """The folder (or tar file) meant by what somebody typed or pasted: blanks, quotes, line ends, a trailing slash
    do not matter. A folder that really has such a name wins. Raises DatasetError with the path between marks.
    """
    if not typed.strip():
        raise DatasetError("No folder of pictures was given. Set dataset.path to a folder with pictures and captions.")
    for candidate in (typed, _unquoted(typed)):
        path = Path(candidate).expanduser()
        try:
            if path.is_dir():
                return path
            if path.suffix.lower() == ".tar" and path.is_file():
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
    """What lies directly in one folder. `relative`: its POSIX path inside the data set, '' for the set's own folder.

    `stems`: the `normal_stem` of each picture; change both through `set_pictures`.
    """

    path: Path
    relative: str
    pictures: list[str] = field(default_factory=list)
    captions: CaptionIndex = field(default_factory=lambda: CaptionIndex(()))
    others: list[str] = field(default_factory=list)
    stems: list[str] = field(default_factory=list)
    tars: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)

    def set_pictures(self, names: Iterable[str]) -> None:
        """Make `names`, sorted, the folder's pictures."""
        self.pictures = sorted(names)
        self.stems = [normal_stem(name) for name in self.pictures]

    def name_of(self, file: str) -> str:
        """POSIX path of `file` inside the data set."""
        return f"{self.relative}/{file}" if self.relative else file


def is_passed_over(name: str) -> bool:
    """Hidden files, system files and half downloads: never trained, never an error."""
    return (name.startswith(".") and not name.startswith("...")) or name.lower() in _SYSTEM_FILES


def list_folder(path: Path, relative: str, caption_extensions: Sequence[str]) -> Folder:
    """The files and folders of one folder, sorted by name. DatasetError when it cannot be listed."""
    folder = Folder(path, relative, captions=CaptionIndex(caption_extensions))
    files: list[str] = []
    folders: list[str] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    is_folder = entry.is_dir()
                except OSError:  # a link that points at itself
                    is_folder = False
                (folders if is_folder else files).append(entry.name)
    except OSError as error:
        raise DatasetError(f"The folder '{path}' cannot be listed: {error.strerror or error}.", path) from error
    files.sort()
    if files:
        # made anew in sorted order, names lie side by side in memory: whatever walks through them is a quarter faster
        files = "/".join(files).split("/")
    folder.folders = sorted(
        name for name in folders if not is_passed_over(name) and name.lower() not in _SYSTEM_FOLDERS
    )
    _sort_in(folder, files)
    return folder


def _sort_in(folder: Folder, files: Sequence[str]) -> None:
    """Pictures, captions and others. Called for every file of a set: a few operations each."""
    takers: dict[str, Callable[[str, str], object] | None] = {}  # by ending as written; None: a picture
    add_picture, add_stem = folder.pictures.append, folder.stems.append
    for name in files:
        stem, _, ending = name.rpartition(".")
        if not stem or name[0] == ".":
            _sort_in_odd(folder, name, f".{ending.lower()}" if stem else "")
            continue
        if ending not in takers:
            takers[ending] = _taker(folder, f".{ending.lower()}")
        take = takers[ending]
        if not stem.isascii():
            stem = normal_stem(name)
        if take is None:
            add_picture(name)
            add_stem(stem)
        else:
            take(stem, name)


def _taker(folder: Folder, suffix: str) -> Callable[[str, str], object] | None:
    """What takes in the stem and the name of files with this ending, None for pictures."""
    if suffix in _ENDINGS:
        return None
    if suffix in folder.captions.extensions:
        return folder.captions.adder(suffix)
    if suffix == ".tar":
        return lambda _, name: folder.tars.append(name)
    return lambda _, name: _pass_over(folder, name)


def _sort_in_odd(folder: Folder, name: str, suffix: str) -> None:
    """A name without an ending, or one that starts with a dot: hidden, except for a picture's three dots."""
    if suffix in _ENDINGS and not is_passed_over(name):
        folder.pictures.append(name)
        folder.stems.append(normal_stem(name))
    else:
        _pass_over(folder, name)


def _pass_over(folder: Folder, name: str) -> None:
    folder.others.append(name)
    if name.lower().endswith(UNREADABLE_ENDINGS) and not is_passed_over(name):
        folder.unreadable.append(name)


def walk(
    root: Path,
    caption_extensions: Sequence[str],
    *,
    recursive: bool,
    problems: list[str],
    skip: Path | None = None,
    first: Folder | None = None,
) -> Iterator[Folder]:
    """The folder and, when `recursive`, all below it, parents first, in name order. A folder is visited once.

    Links are followed; one that leads back up is not entered again, nor is `skip`. Sub-folders that cannot be listed go
    to `problems`. `first`: the root's listing when it is there already.
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
            known = first if first is not None and path == root else None
            folder = known or list_folder(path, relative, caption_extensions)
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
        for folder in walk(root.path / name, (), recursive=True, problems=[], skip=root.path):
            count += len(folder.pictures) + len(folder.tars)
            if count >= limit:
                break
        if count:
            counts[name] = count
    return counts
