"""Scores of the detector benchmark from made-up lines, and its smoke run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.detectors_score import clopper_pearson, summary, tables  # noqa: E402

NAIVE = {"norm above 100": False}


def fault(kind: str, seed: int, **values: Any) -> dict[str, Any]:
    line = {
        "what": "fault", "kind": kind, "seed": seed, "onset": 10, "verdict": "STALE", "step": 12, "alarm_in_time": True,
        "right": True, "culprit": True, "naive": NAIVE,
    }  # fmt: skip
    return {**line, **values}


def test_scores_of_made_up_runs() -> None:
    lines = [
        fault("a", 0),
        fault("a", 1, verdict=None, step=None, alarm_in_time=False, right=False, culprit=None),
        fault("b", 0, verdict="FROZEN", right=False, step=20),
        fault("b", 1, culprit=False, naive={"norm above 100": True}),
        {"what": "healthy", "kind": "h", "seed": 0, "verdict": None, "naive": {"norm above 100": True}},
        {"what": "healthy", "kind": "h", "seed": 1, "verdict": "STALE", "naive": NAIVE},
        {"what": "recovery", "kind": "a", "seed": 0, "recovered": True, "recovered_bare": False},
    ]
    found = summary(lines)
    assert found["recall_min"] == 0.5
    assert found["label"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["culprit"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["false_alarm"] == 0.5
    assert found["delay_p95_steps"] == 10
    assert found["recovered"] == 1.0
    assert found["baselines"]["norm above 100"] == {"recall": 0.25, "false_alarm": 0.5}
    assert found["baselines"]["recovered without protection"] == 0.0
    assert "FROZEN" in tables(lines)


def test_nothing_measured_is_null_and_not_perfect() -> None:
    found = summary([])
    assert found["recall_min"] is None
    assert found["false_alarm"] is None


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"), [(0, 300, 0.0, 0.0122), (100, 104, 0.9044, 0.9894), (8, 8, 0.6306, 1.0)]
)
def test_bounds_of_a_share(hits: int, of: int, low: float, high: float) -> None:
    """The reference gives 1.2 % for 0 of 300, and 90 to 99 % for 100 of 104."""
    assert clopper_pearson(hits, of) == pytest.approx((low, high), abs=1e-3)


@pytest.mark.slow
def test_smoke() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/detectors.py", "--smoke"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["recall_min"] == 1.0
    assert result["label"] == 1.0
    assert result["false_alarm"] == 0.0
