"""Commands that are pointed at a folder that cannot serve: each says so itself, without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_core.cli import main


def test_scan_of_a_folder_without_pictures_says_that_there_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scan", str(tmp_path)]) == 1
    assert f"No pictures found in '{tmp_path}'" in capsys.readouterr().out


def test_doctor_is_not_ready_where_the_output_folder_is_a_file(tmp_path: Path) -> None:
    from trainer_core.doctor import _disk

    missing: list[str] = []
    taken = tmp_path / "output"
    taken.write_bytes(b"")
    assert _disk(taken / "runs", missing, [])["writable"] is False
    assert missing == [f"{taken} is a file. Give a folder (--output_dir)"]


def test_demo_refuses_an_output_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "output"
    taken.write_bytes(b"")
    assert main(["demo", "--output_dir", str(taken)]) == 1
    assert f"The output folder {taken} cannot be written" in capsys.readouterr().err
