"""The linters of the project find nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_ruff(command: list[str]) -> None:
    ran = subprocess.run([sys.executable, "-m", "ruff", *command, "--no-cache", "."], cwd=ROOT, capture_output=True)
    assert ran.returncode == 0, ran.stdout.decode("utf-8", "replace")[-4000:]


@pytest.mark.slow
def test_pyright() -> None:
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert ran.returncode == 0, ran.stdout.decode("utf-8", "replace")[-4000:]
