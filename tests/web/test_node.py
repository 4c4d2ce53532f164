"""The panel's logic, tested by `node --test` (20 or newer); skipped where there is none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NODE = shutil.which("node")


def node_version() -> int:
    if NODE is None:
        return 0
    text = subprocess.run([NODE, "--version"], capture_output=True, text=True).stdout
    return int(text.strip().lstrip("v").split(".")[0] or 0)


@pytest.mark.skipif(node_version() < 20, reason="needs Node.js 20 or newer (apt-get install nodejs)")
def test_the_panel_logic() -> None:
    files = sorted(HERE.glob("*.test.js"))
    assert len(files) >= 5
    assert NODE is not None
    done = subprocess.run([NODE, "--test", *map(str, files)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "# fail 0" in done.stdout
    print([line for line in done.stdout.splitlines() if "frame logic" in line])
