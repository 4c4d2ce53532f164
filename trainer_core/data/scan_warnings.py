"""The sentences of a scan report: each kind of thing once, with the files it concerns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

NAMES_SHOWN = 10


@dataclass
class Told:
    """A count and the first few files it stands for: a list of a million names helps nobody."""

    count: int = 0
    files: list[str] = field(default_factory=list)

    def add(self, file: str) -> None:
        self.count += 1
        if len(self.files) < NAMES_SHOWN:
            self.files.append(file)

    def __str__(self) -> str:
        rest = self.count - len(self.files)
        return ", ".join(self.files) + (f" and {rest} more" if rest > 0 else "")


@dataclass
class ScanNotes:
    """What the warnings of a report are made from. `free`: sentences as they are."""

    free: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    stems: list[tuple[str, str]] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    without: Told = field(default_factory=Told)
    empty: Told = field(default_factory=Told)
    long: Told = field(default_factory=Told)
    other_endings: Told = field(default_factory=Told)
    unmasked: Told = field(default_factory=Told)
    decoded: dict[str, Told] = field(default_factory=dict)
    fallback: set[str] = field(default_factory=set)
    endings: set[str] = field(default_factory=set)


def names(files: Iterable[str], shown: int = NAMES_SHOWN) -> str:
    """The first file names, and how many more there are."""
    files = list(files)
    rest = len(files) - shown
    return ", ".join(files[:shown]) + (f" and {rest} more" if rest > 0 else "")


def counted(count: int, one: str, many: str | None = None) -> str:
    """`1 picture`, `2 pictures`."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def missing_captions(notes: ScanNotes) -> str:
    parts = []
    if notes.without.count:
        parts.append(f"no caption file: {notes.without}")
    if notes.empty.count:
        parts.append(f"caption file is empty: {notes.empty}")
    total = counted(notes.without.count + notes.empty.count, "picture")
    texts = sorted(text for text in notes.fallback if text)
    instead = f"trained with {names(repr(text) for text in texts)}" if texts else "trained with an empty caption"
    return f"{total} without caption text ({'; '.join(parts)}); {instead}"


def other_endings(notes: ScanNotes) -> str:
    return (
        f"{counted(notes.other_endings.count, 'caption file')} with another ending not used, because this data set's "
        f"captions are in {' and '.join(sorted(notes.endings))} files: {notes.other_endings}. Rename them or set "
        "caption_extensions"
    )


def long_captions(notes: ScanNotes, limit: int) -> str:
    more = "" if limit >= 225 else " Raise max_token_length (150 or 225) to use more of them."
    head = f"{counted(notes.long.count, 'caption')} longer than the text window of {limit} tokens"
    return f"{head}; the rest is cut off: {notes.long}.{more}"


def scan_sentences(notes: ScanNotes, token_limit: int) -> list[str]:
    """The warnings that follow from the notes alone."""
    found = list(notes.free)
    if notes.without.count or notes.empty.count:
        found.append(missing_captions(notes))
    if notes.other_endings.count:
        found.append(other_endings(notes))
    if notes.long.count:
        found.append(long_captions(notes, token_limit))
    if notes.unmasked.count:
        found.append(f"{counted(notes.unmasked.count, 'picture')} without a mask, trained as a whole: {notes.unmasked}")
    found += [f"{note}: {told}" for note, told in notes.decoded.items()]
    if notes.stems:
        found.append(same_stem(notes.stems))
    if notes.unreadable:
        found.append(f"pictures in formats that are not read: {names(notes.unreadable)}. Save them as PNG or JPEG")
    return found


def upscaled(count: int, first: Sequence[tuple[str, float]]) -> str:
    rest = count - len(first)
    shown = ", ".join(f"{file} ({factor:.1f}x)" for file, factor in first) + (f" and {rest} more" if rest > 0 else "")
    return f"{counted(count, 'picture')} smaller than the training size and upscaled, which blurs: {shown}"


def same_content(count: int, groups: Sequence[Sequence[str]]) -> str:
    rest = count - len(groups)
    shown = names(" = ".join(group) for group in groups) + (f" and {rest} more" if rest > 0 else "")
    return f"{counted(count, 'picture')} present more than once (duplicate content): {shown}"


def same_stem(groups: Sequence[Sequence[str]]) -> str:
    shown = names(" and ".join(group) for group in groups)
    return f"pictures that share the same name and so the same caption: {shown}"
