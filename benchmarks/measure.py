"""What every benchmark needs: peak memory of a stretch of code, and a place for its result."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass
class Peak:
    """Resident memory (anonymous plus touched file pages) in bytes: before, and the highest since."""

    before: int = 0
    highest: int = 0

    @property
    def added(self) -> int:
        return self.highest - self.before


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure this process. Linux: the kernel's high-water mark, reset at the start; elsewhere sampled every 5 ms."""
    process = psutil.Process()
    peak = Peak(before=process.memory_info().rss)
    exact = _reset_high_water()
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.005):
            peak.highest = max(peak.highest, process.memory_info().rss)

    thread = threading.Thread(target=sample, daemon=True)
    if not exact:
        thread.start()
    try:
        yield peak
    finally:
        stop.set()
        peak.highest = max(peak.highest, process.memory_info().rss, _high_water() if exact else 0)


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _high_water() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def store_result(name: str, result: dict[str, Any]) -> Path:
    """Write the result with commit, date and command under benchmarks/results/, and print it as the last line."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent, check=False
    )
    record = {
        **result,
        "commit": commit.stdout.strip() or None,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path
