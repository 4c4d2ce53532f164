"""The flight recorder: what it held when its process was killed can be read."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from health_records import fast, network

from trainer_core.errors import CheckpointError
from trainer_core.health.ring import RingWriter, read_ring

TENSORS = network(3)
NAMES = list(TENSORS)

WRITER = """
import sys
sys.path[:0] = {paths!r}
from health_records import fast, network
from trainer_core.health.ring import RingWriter
tensors = network(3)
ring = RingWriter({path!r}, list(tensors), slots=256)
step = 0
while True:
    step += 1
    if step == 20:
        print("ready", flush=True)
    ring.write(fast(tensors, step, norms=dict.fromkeys(tensors, float(step)), grad_norm=float(step)))
"""


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "ring", NAMES, slots=8, losses=2)
    norms = {name: float(number) for number, name in enumerate(NAMES[:-1])}
    ring.write(fast(TENSORS, 1, norms=norms, losses=(1.0, 2.0, 3.0)))
    ring.write(fast(TENSORS, 2, outcome="OVERFLOW", norms={NAMES[0]: math.nan}, grad_norm=math.inf, clip=0.25))
    ring.close()
    first, second = read_ring(tmp_path / "ring")
    assert (first.step, first.outcome, first.losses, dict(first.norms)) == (1, "applied", (1.0, 2.0), norms)
    assert NAMES[-1] not in first.norms, "no gradient is not a gradient of 0"
    assert (second.outcome, second.grad_norm, second.clip) == ("OVERFLOW", math.inf, 0.25)
    assert math.isnan(second.norms[NAMES[0]])


def test_it_keeps_the_newest_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    for first in (1, 7):
        ring = RingWriter(tmp_path / "ring", NAMES, slots=8)
        for step in range(first, first + 6):
            ring.write(fast(TENSORS, step))
        ring.close()
    assert [record.step for record in read_ring(tmp_path / "ring")] == list(range(5, 13))
    other = RingWriter(tmp_path / "ring", NAMES[:2], slots=8)
    other.write(fast(TENSORS, 1))
    other.close()
    assert [record.step for record in read_ring(tmp_path / "ring")] == [1], "other tensors begin a new one"


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_it_is_readable_after_sigkill(tmp_path: Path) -> None:
    here = Path(__file__).resolve()
    for kill in range(3):
        path = tmp_path / f"ring{kill}"
        script = WRITER.format(paths=[str(here.parents[3]), str(here.parents[1])], path=str(path))
        writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline().strip() == b"ready"
        time.sleep(0.2)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        records = read_ring(path)
        assert len(records) >= 19, "what was written before the kill is there"
        steps = np.array([record.step for record in records])
        assert (np.diff(steps) == 1).all(), "only whole records, in order"
        for record in records:
            assert set(record.norms.values()) == {float(record.step)}, "no slot is torn"


def test_what_is_no_ring_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_ring(tmp_path / "nothing")
    (tmp_path / "text").write_text("x" * 100, encoding="utf-8")
    with pytest.raises(CheckpointError, match="is no flight recorder"):
        read_ring(tmp_path / "text")
