"""Caption files: which belongs to which picture, and their text in the encodings people's editors write."""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from .locations import read_location

_MARKS: tuple[tuple[bytes, str], ...] = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16: its mark starts with UTF-16's
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class CaptionError(Exception):
    """A caption file that cannot be read as text; the message names the file and the byte position."""


@dataclass(frozen=True, slots=True)
class CaptionText:
    """Text of a caption file: its non-empty lines, stripped, and what is worth saying about it."""

    lines: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def joined(self) -> str:
        return " ".join(self.lines)


def decode_text(data: bytes, name: str, encoding: str | None) -> tuple[str, tuple[str, ...]]:
    """(text, notes) of `data`: by its byte-order mark, else `encoding`, else UTF-8.

    Raises CaptionError with file name, encoding and byte position where the bytes are no such text.
    """
    by_mark = next((codec for mark, codec in _MARKS if data.startswith(mark)), None)
    codec = by_mark or encoding or "utf-8"
    try:
        text = data.decode(codec)
    except UnicodeDecodeError as error:
        raise CaptionError(
            f"its caption file {name} is not {codec}: byte 0x{data[error.start]:02x} at position {error.start} "
            "cannot be decoded. Save the file as UTF-8, or set caption_encoding (for example gbk or cp1252)"
        ) from error
    except LookupError as error:
        raise CaptionError(f"caption_encoding {codec!r} is no encoding that Python knows") from error
    if "\0" not in text:
        return text.lstrip("\ufeff"), ()
    if text.count("\0") * 4 >= len(text):
        raise CaptionError(
            f"its caption file {name} is full of zero bytes (the first at position {data.find(0)}): it looks "
            "like UTF-16 without a byte-order mark. Save the file as UTF-8, or set "
            "caption_encoding (for example utf-16-le)"
        )
    return text.replace("\0", "").lstrip("\ufeff"), (f"zero bytes in {name} were left out",)


def decode_caption(data: bytes, name: str, encoding: str | None) -> CaptionText:
    """Caption lines of `data`; see `decode_text`."""
    text, notes = decode_text(data, name, encoding)
    return CaptionText(tuple(line.strip() for line in text.splitlines() if line.strip()), notes)


def normal_stem(name: str) -> str:
    """Stem in composed Unicode: macOS stores names decomposed, other systems do not."""
    at = name.rfind(".")
    stem = name[:at] if at > 0 else name
    return stem if stem.isascii() else unicodedata.normalize("NFC", stem)


@dataclass
class CaptionIndex:
    """Caption files of one folder by ending and stem. Endings and, as a second choice, stems compare without case."""

    extensions: Sequence[str]
    _exact: dict[str, dict[str, str]] = field(default_factory=dict)
    _folded: dict[str, dict[str, str]] | None = None

    def __post_init__(self) -> None:
        self.extensions = tuple(ext.lower() if ext.startswith(".") else f".{ext.lower()}" for ext in self.extensions)

    def add(self, name: str, suffix: str, stem: str) -> None:
        """Take in a file name with its lower-case ending and its `normal_stem`."""
        self.adder(suffix)(stem, name)

    def adder(self, suffix: str) -> Callable[[str, str], object]:
        """`add` for files with one ending, called with stem and name: made for many calls."""
        return self._exact.setdefault(suffix, {}).setdefault

    def stems(self, extension: str) -> Mapping[str, str]:
        """File names of the captions with this ending by stem."""
        return self._exact.get(extension, {})

    def find(self, stem: str, extension: str) -> str | None:
        """File name of the caption with this ending for a picture's `normal_stem`, or None."""
        by_stem = self._exact.get(extension)
        if not by_stem:
            return None
        return by_stem.get(stem) or self._folded_names().get(extension, {}).get(stem.casefold())

    def _folded_names(self) -> dict[str, dict[str, str]]:
        if self._folded is None:
            self._folded = {
                extension: {stem.casefold(): name for stem, name in reversed(by_stem.items())}
                for extension, by_stem in self._exact.items()
            }
        return self._folded

    def without(self, stems: Set[str]) -> list[str]:
        """Captions whose stem is none of the pictures' `stems`."""
        found: list[str] = []
        for by_stem in self._exact.values():
            if not by_stem.keys() <= stems:
                found += [name for stem, name in by_stem.items() if stem not in stems]
        return found

    def names(self) -> Iterable[str]:
        for by_stem in self._exact.values():
            yield from by_stem.values()


def read_caption(location: str, name: str, encoding: str | None) -> CaptionText:
    """Text of a caption file. Raises CaptionError, also when the file cannot be opened."""
    try:
        data = read_location(location)
    except OSError as error:
        raise CaptionError(f"its caption file {name} cannot be read: {error.strerror or error}") from error
    return decode_caption(data, name, encoding)
