"""Known pictures are taken a page at a time: whatever lies in a page, the outcome is that of reading everything."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trainer_core.config import BucketConfig, DatasetConfig
from trainer_core.data import ScanReport, scan_dataset, scan_pictures
from trainer_core.data import memo as memo_module
from trainer_core.data.folders import list_folder
from trainer_core.data.memo import stamp_of, stamps_in
from trainer_core.data.table import ItemTable

from .test_kind_pictures import png, write


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo_module, "_FRESH_NS", 0)
    monkeypatch.setattr(scan_pictures, "_PAGE", 4)


def look(folder: Path, cache: Path | None) -> ScanReport:
    return scan_dataset(DatasetConfig(path=str(folder), workers=0), BucketConfig(), 64, cache_dir=cache)


def many(folder: Path) -> None:
    """17 good pictures of three shapes with captions, and one of each kind that needs a closer look."""
    for index in range(17):
        shape = ((64, 64), (128, 64), (64, 128))[index % 3]
        write(folder, f"n{index:02}.png", png(*shape, (index, 0, 0)))
        write(folder, f"n{index:02}.txt", f"words {index}".encode())
    for name, text in (("n03a", b""), ("n05a", b"two\nlines"), ("n07a", b"word " * 90), ("\u30cd", "\u8a9e".encode())):
        write(folder, f"{name}.png", png(64, 64, (0, len(name), 1)))
        write(folder, f"{name}.txt", text)
    write(folder, "n04a.png", png(64, 64, (0, 0, 99)))
    write(folder, "n09a.png", png(1024, 64))
    write(folder, "n09a.txt", b"far too wide")
    write(folder, "n11a.png", b"<html>")


def gone(folder: Path) -> None:
    for name in ("n00.png", "n00.txt", "n06.png", "n06.txt", "n07.png", "n16.txt"):
        (folder / name).unlink()


def come(folder: Path) -> None:
    for name in ("a", "n08a", "z"):
        write(folder, f"{name}.png", png(64, 64, (7, 7, len(name))))
        write(folder, f"{name}.txt", b"new")


def changed(folder: Path) -> None:
    write(folder, "n02.png", png(64, 64, (5, 5, 5)))
    write(folder, "n10.txt", b"other words")


def other_caption(folder: Path) -> None:
    (folder / "n12.txt").rename(folder / "n12.TXT")
    write(folder, "n13.TXT", b"comes first by name")


CHANGES: list[Callable[[Path], None]] = [lambda _: None, gone, come, changed, other_caption]


@pytest.mark.parametrize("change", CHANGES, ids=["nothing", "gone", "come", "changed", "other caption"])
def test_outcome_is_that_of_reading_everything(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = tmp_path / "set"
    many(folder)
    before = look(folder, tmp_path / "cache")
    change(folder)
    known, read = look(folder, tmp_path / "cache"), look(folder, None)
    assert known.to_json() == read.to_json()
    assert known.decoded == {come: 3, changed: 1}.get(change, 0)
    assert (before.to_json() == read.to_json()) == (change is CHANGES[0])
    tables = [report.items for report in (known, read)]
    assert all(isinstance(table, ItemTable) for table in tables)
    assert tables[0].buckets == tables[1].buckets  # type: ignore[attr-defined]
    for ours, theirs in zip(*(table.plan_columns() for table in tables), strict=True):  # type: ignore[attr-defined]
        assert np.array_equal(ours, theirs)


@pytest.mark.skipif(sys.platform != "linux", reason="names are Unicode elsewhere")
def test_names_that_are_no_text_are_read_every_time(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    many(folder)
    for name in (b"n01\xff.png", b"\xffa.png", b"n16\xff.png"):
        (folder / os.fsdecode(name)).write_bytes(png(64, 64, (9, len(name), name[0])))
    look(folder, tmp_path / "cache")
    known, read = look(folder, tmp_path / "cache"), look(folder, None)
    assert known.decoded == 3
    assert known.to_json() == read.to_json()


def test_stamps_of_many_files_are_those_of_each(tmp_path: Path) -> None:
    names = [f"{index}.png" for index in range(5)]
    for name in names:
        write(tmp_path, name, name.encode())
    assert stamps_in(str(tmp_path), names) == [stamp_of(str(tmp_path / name)) for name in names]
    (tmp_path / "3.png").unlink()
    found = stamps_in(str(tmp_path), names)
    assert [stamp is None for stamp in found] == [False, False, False, True, False]
    assert found[4] == stamp_of(str(tmp_path / "4.png"))


def test_files_are_told_apart_by_their_names(tmp_path: Path) -> None:
    names = (
        "A.PNG",
        "a.b.jpg",
        "...x.png",
        "....png",
        ".hidden.png",
        "..png",
        ".txt",
        "bare",
        "end.",
        "q.TXT",
        "q.txt",
    )
    for name in (*names, "s.tar", "note.pdf", "thumbs.db"):
        write(tmp_path, name, b"")
    (tmp_path / "folder.png").mkdir()
    found = list_folder(tmp_path, "", ("txt",))
    assert found.pictures == ["....png", "...x.png", "A.PNG", "a.b.jpg"]
    assert found.stems == ["...", "...x", "A", "a.b"]
    assert dict(found.captions.stems(".txt")) == {"q": "q.TXT"}
    assert found.others == ["..png", ".hidden.png", ".txt", "bare", "end.", "note.pdf", "thumbs.db"]
    assert (found.tars, found.folders) == (["s.tar"], ["folder.png"])
