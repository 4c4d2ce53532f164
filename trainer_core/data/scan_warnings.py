"""The sentences of a scan report: each kind of thing once, with the files it concerns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NAMES_SHOWN = 10


def names(files: Iterable[str], shown: int = NAMES_SHOWN) -> str:
    """The first file names, and how many more there are."""
    files = list(files)
    rest = len(files) - shown
    return ", ".join(files[:shown]) + (f" and {rest} more" if rest > 0 else "")


def counted(count: int, one: str, many: str | None = None) -> str:
    """`1 picture`, `2 pictures`."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def missing_captions(without: Sequence[str], empty: Sequence[str], used_instead: str) -> str:
    parts = []
    if without:
        parts.append(f"no caption file: {names(without)}")
    if empty:
        parts.append(f"caption file is empty: {names(empty)}")
    total = counted(len(without) + len(empty), "picture")
    return f"{total} without caption text ({'; '.join(parts)}); {used_instead}"


def other_endings(by_picture: Sequence[tuple[str, str]], used: str) -> str:
    files = names(caption for _, caption in by_picture)
    return (
        f"{counted(len(by_picture), 'caption file')} with another ending not used, because this data set's captions "
        f"are in {used} files: {files}. Rename them or set caption_extensions"
    )


def long_captions(long: Sequence[tuple[str, int]], limit: int, *, exact: bool) -> str:
    shown = names(f"{file} ({'' if exact else 'at least '}{count})" for file, count in long)
    more = "" if limit >= 225 else " Raise max_token_length (150 or 225) to use more of them."
    head = f"{counted(len(long), 'caption')} longer than the text window of {limit} tokens"
    return f"{head}; the rest is cut off: {shown}.{more}"


def upscaled(files: Sequence[tuple[str, float]]) -> str:
    shown = names(f"{file} ({factor:.1f}x)" for file, factor in files)
    return f"{counted(len(files), 'picture')} smaller than the training size and upscaled, which blurs: {shown}"


def same_content(groups: Sequence[Sequence[str]]) -> str:
    shown = names(" = ".join(group) for group in groups)
    return f"{counted(len(groups), 'picture')} present more than once (duplicate content): {shown}"


def same_stem(groups: Sequence[Sequence[str]]) -> str:
    shown = names(" and ".join(group) for group in groups)
    return f"pictures that share the same name and so the same caption: {shown}"
