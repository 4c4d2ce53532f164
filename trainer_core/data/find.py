"""Which files belong to a set: its folders, numbered sub-folders as sets of their own, metadata, masks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import DatasetError
from . import scan_warnings as say
from .caption_files import CaptionIndex, normal_stem
from .folders import Folder, kohya_folders, list_folder, pictures_below, walk
from .locations import shown_name
from .metadata import DEFAULT_NAMES, Metadata, find_metadata, read_metadata
from .sets import SetSpec
from .tar_shards import list_tar


@dataclass
class FoundFolder:
    """One folder with pictures of one set; `prefix` + file name is a picture's name in the report."""

    spec: SetSpec
    folder: Folder
    prefix: str


@dataclass
class FoundSet:
    """A set before anything is decoded. `ending`: the one that its captions have. `missing`: listed but not there."""

    spec: SetSpec
    folders: list[FoundFolder]
    ending: str
    metadata: Metadata | None = None
    masks: MaskFolder | None = None
    missing: list[tuple[str, str]] = field(default_factory=list)

    @property
    def pictures(self) -> int:
        return sum(len(found.folder.pictures) for found in self.folders)


class MaskFolder:
    """Mask files by the path of their picture inside the set, without the ending."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._by_stem: dict[str, str] = {}
        for found in walk(folder, (), recursive=True, problems=[]):
            for name in found.pictures:
                file = found.name_of(name)
                self._by_stem.setdefault(normal_stem(file), str(found.path / name))

    def find(self, file: str) -> str | None:
        """Path of the mask for the picture `file` (its path inside the set), or None."""
        stem = normal_stem(file)
        return self._by_stem.get(stem) or self._by_stem.get(normal_stem(os.path.basename(file)))


def find_set(spec: SetSpec, notes: say.ScanNotes, skip: Path | None) -> FoundSet:
    """Everything that belongs to `spec`; what is passed over goes to `notes`. DatasetError when it cannot be listed."""
    if spec.folder.is_file():
        root = Folder(spec.folder.parent, "", captions=CaptionIndex(spec.caption_extensions), tars=[spec.folder.name])
        spec = replace(spec, folder=spec.folder.parent, numbered=False)
    else:
        root = list_folder(spec.folder, "", spec.caption_extensions)
    if skip is not None:
        real = os.path.realpath(skip)
        root.folders = [name for name in root.folders if os.path.realpath(spec.folder / name) != real]
    folders: list[FoundFolder] = []
    missing: list[tuple[str, str]] = []
    for part in _parts(spec, root, notes):
        for folder in walk(
            part.folder,
            spec.caption_extensions,
            recursive=spec.recursive,
            problems=notes.free,
            skip=skip,
            first=root if part is spec else None,
        ):
            start = part.prefix + (f"{folder.relative}/" if folder.relative else "")
            folders.append(FoundFolder(part, folder, start))
            folders += _tars(part, folder, start, missing)
    found = FoundSet(spec, folders, _caption_ending(folders, spec.caption_extensions), missing=missing)
    _add_metadata(found, notes)
    if spec.mask and spec.mask != "alpha":
        found.masks = MaskFolder(_mask_folder(spec))
    for one in folders:
        _note_others(one, found, notes)
    return found


def _tars(spec: SetSpec, folder: Folder, start: str, problems: list[tuple[str, str]]) -> list[FoundFolder]:
    """The tar shards of a folder, each like a folder of its own."""
    found = []
    for name in folder.tars:
        inside, problem = list_tar(folder.path / name, folder.name_of(name), spec.caption_extensions)
        if problem:
            problems.append((start + name, problem))
        found.append(FoundFolder(spec, inside, f"{start}{name}/"))
    return found


def _parts(spec: SetSpec, root: Folder, notes: say.ScanNotes) -> list[SetSpec]:
    """The set itself, kohya's numbered sub-folders, or both, saying what is left out."""
    if spec.recursive:
        return [spec]
    counts = pictures_below(root)
    numbered: list[SetSpec] = []
    for name, times, tokens in kohya_folders(root) if spec.numbered else ():
        if counts.get(name) and times > 0:
            numbered.append(
                replace(
                    spec,
                    folder=root.path / name,
                    prefix=f"{spec.prefix}{name}/",
                    repeats=times * spec.repeats,
                    class_tokens=tokens,
                )
            )
    taken = {part.folder.name for part in numbered}
    left_out = {name: count for name, count in counts.items() if name not in taken}
    if left_out and (root.pictures or numbered):
        shown = say.names(f"{name} ({count})" for name, count in left_out.items())
        notes.free.append(f"pictures in sub-folders are left out: {shown}. Set recursive = true to use them")
    if numbered and root.pictures:
        notes.free.append(
            f"pictures lie both in the folder itself ({len(root.pictures)}) and in numbered sub-folders; all are used"
        )
        return [spec, *numbered]
    if numbered:
        notes.ignored += [spec.prefix + name for name in (*root.others, *root.captions.names())]
    return numbered or [spec]


def _caption_ending(folders: Sequence[FoundFolder], extensions: Sequence[str]) -> str:
    """The ending of this set's captions: the first of the list that any picture has. One set, one ending.

    So a set of .txt captions is not mixed with stray .caption files of another tool; those are named.
    """
    for extension in folders[0].folder.captions.extensions:
        for found in folders:
            captions = found.folder.captions
            if captions.stems(extension) and any(captions.find(stem, extension) for stem in found.folder.stems):
                return extension
    return extensions[0] if extensions else ".txt"


def _add_metadata(found: FoundSet, notes: say.ScanNotes) -> None:
    """Read the set's metadata file. A picture listed there counts wherever in the set it lies."""
    spec = found.spec
    path = find_metadata(spec.folder, spec.metadata_file)
    if path is None:
        return
    found.metadata = read_metadata(path, spec.folder, spec.caption_encoding)
    notes.free += found.metadata.problems
    there = {
        f"{one.prefix}{shown_name(name)}"[len(spec.prefix) :] for one in found.folders for name in one.folder.pictures
    }
    known = {os.path.splitext(file)[0] for file in there}
    for file in found.metadata.captions:
        if file in there or file in known:
            continue
        if (spec.folder / file).is_file():
            _add_listed(found, file)
        else:
            found.missing.append((spec.prefix + file, f"listed in {found.metadata.name} but not found"))


def _add_listed(found: FoundSet, file: str) -> None:
    """Take in a picture of a sub-folder that only the metadata names."""
    below, _, name = file.rpartition("/")
    prefix = f"{found.spec.prefix}{below}/"
    for one in found.folders:
        if one.prefix == prefix:
            one.folder.set_pictures([*one.folder.pictures, name])
            return
    folder = list_folder(found.spec.folder / below, below, found.spec.caption_extensions)
    folder.set_pictures([name])
    folder.others = []
    found.folders.append(FoundFolder(found.spec, folder, prefix))


def _mask_folder(spec: SetSpec) -> Path:
    for path in (spec.folder / str(spec.mask), Path(str(spec.mask)).expanduser()):
        if path.is_dir():
            return path
    raise DatasetError(f"The folder of masks '{spec.mask}' does not exist. Give a folder, or 'alpha'.", spec.mask)


def _note_others(one: FoundFolder, found: FoundSet, notes: say.ScanNotes) -> None:
    """Files that are passed over, pictures that share a name, and captions without a picture."""
    folder = one.folder
    stems = folder.stems
    seen = set(stems)
    if len(seen) < len(stems):
        first: dict[str, str] = {}
        for stem, name in zip(stems, folder.pictures, strict=True):
            if stem in first:
                notes.stems.append((one.prefix + shown_name(first[stem]), one.prefix + shown_name(name)))
            first.setdefault(stem, name)
    orphans = folder.captions.without(seen)
    if orphans:
        folded = {stem.casefold() for stem in seen}
        orphans = [name for name in orphans if normal_stem(name).casefold() not in folded]
    others = [name for name in folder.others if found.metadata is None or name not in DEFAULT_NAMES]
    notes.ignored += [one.prefix + name for name in (*others, *map(shown_name, orphans))]
    notes.unreadable += [one.prefix + name for name in folder.unreadable]
    if orphans and folder.pictures:
        shown = say.names(one.prefix + shown_name(name) for name in orphans)
        notes.free.append(f"{say.counted(len(orphans), 'caption file')} without a picture of that name: {shown}")
