"""Scores of the detector benchmark from made-up lines, and its smoke run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.detectors import CODE, FIRST_SEED, all_jobs, key, naive, perform, prepare, read_lines  # noqa: E402
from benchmarks.detectors_score import clopper_pearson, kinds, summary, tables  # noqa: E402
from trainer_core.drill.faults import FAULTS, FROZEN_ENCODERS  # noqa: E402
from trainer_core.drill.run import DrillRun, FirstReading  # noqa: E402
from trainer_core.drill.site import Planted  # noqa: E402

NAIVE = {"norm above 100": False}


def fault(kind: str, seed: int, **values: Any) -> dict[str, Any]:
    line = {
        "what": "fault", "kind": kind, "seed": seed, "onset": 10, "verdict": "STALE", "step": 12, "alarm_in_time": True,
        "right": True, "culprit": True, "naive": NAIVE,
    }  # fmt: skip
    return {**line, **values}


def healthy(seed: int, **values: Any) -> dict[str, Any]:
    line = {"what": "healthy", "kind": "h", "seed": seed, "verdict": None, "end": "finished", "naive": NAIVE}
    return {**line, **values}


def test_scores_of_made_up_runs() -> None:
    lines = [
        fault("a", 0),
        fault("a", 1, verdict=None, step=None, alarm_in_time=False, right=False, culprit=None),
        fault("b", 0, verdict="FROZEN", right=False, step=20),
        fault("b", 1, culprit=False, naive={"norm above 100": True}),
        healthy(0, naive={"norm above 100": True}),
        healthy(1, verdict="STALE"),
        healthy(2, end="failed"),
        healthy(3),
        {"what": "recovery", "kind": "undisturbed", "seed": 0, "loss": 1.0},
        {"what": "recovery", "kind": "a", "seed": 0, "loss": 1.04, "loss_bare": None},
        {"what": "recovery", "kind": "b", "seed": 0, "loss": 1.06, "loss_bare": 1.01},
        {"what": "recovery", "kind": "a", "seed": 4, "loss": 1.0, "loss_bare": 1.0},
    ]
    found = summary(lines)
    assert found["recall_min"] == 0.5
    assert found["label"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["culprit"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["false_alarm"] == 0.5, "a healthy run that did not end well counts"
    assert found["delay_p95_steps"] == 10
    assert found["recovered"] == 0.5, "seed 4 has no undisturbed run to compare with"
    assert found["baselines"]["norm above 100"] == {"recall": 0.25, "false_alarm": 0.25}
    assert found["baselines"]["recovered without protection"] == 0.5
    assert "FROZEN" in tables(lines)
    by_kind = kinds(lines)
    assert by_kind["a"] == {
        "runs": 2, "in_time": 1, "right": 1, "culprit": 1, "bounds": [0.013, 0.987], "said_instead": ["None"],
    }  # fmt: skip
    assert by_kind["h"] == {"runs": 4, "false_alarms": 2}
    assert by_kind["recovery of b"] == {"runs": 1, "recovered": 0, "recovered_bare": 1}


def test_simple_rules_judge_what_a_step_first_showed() -> None:
    """A poisoned picture is left out and the step computed again: the loss that is kept is finite."""
    nan = float("nan")
    readings = [FirstReading(step, nan if step == 4 else 1.0, 1.0, {"a": 1.0}) for step in range(1, 7)]
    run = DrillRun(Planted(), 4, readings=readings)
    assert naive(run, 4, 1)["loss is NaN"]
    assert not naive(run, 5, 9)["loss is NaN"], "it was before the fault"
    assert not naive(run, 4, 1)["norm above 100"]


def test_lines_of_another_code_version_are_no_part_of_a_score(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text(f'{{"code": "old", "seed": 1}}\n{{"code": "{CODE}", "seed": 2}}\n', encoding="utf-8")
    assert [line["seed"] for line in read_lines(lines)] == [2]


def test_planned_runs_are_as_many_as_the_issue_asks_for() -> None:
    jobs = list(all_jobs(20, FIRST_SEED, toy=False))
    counts = Counter((job["what"], job["kind"]) for job in jobs)
    assert {n for (what, _), n in counts.items() if what == "fault"} == {20}
    assert {n for (what, _), n in counts.items() if what == "healthy"} == {40}
    assert min(job["seed"] for job in jobs) > 0, "seed 0 was looked at while the rules were made"
    assert len({key(job) for job in jobs}) == len(jobs)
    assert all(fault.sections == FROZEN_ENCODERS for fault in FAULTS if fault.transient), "as the undisturbed run"


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


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("detectors"), toy=False)


@pytest.mark.parametrize("kind", ["nan-latent", "bit-flip", "nan-weight", "adapter-cast"])
def test_faults_that_are_there_at_once_are_noticed_in_whole_runs(kind: str, place: Path) -> None:
    line = perform({"what": "fault", "kind": kind, "seed": 2000, "model": "micro", "onset": 5}, place)
    shutil.rmtree(place / "runs")
    assert line["right"], f"said {line['verdict']} at step {line['step']}"
    assert line["culprit"] in (True, None)
    assert line["naive"]["loss is NaN"] == (kind in ("nan-latent", "nan-weight")), "the first reading is judged"


def test_a_healthy_run_that_looks_ill_is_left_alone(place: Path) -> None:
    """Captions are dropped: steps without any caption leave encoders and cross-attention without gradients."""
    job = {"what": "healthy", "kind": "captions-dropped", "seed": 2000, "model": "micro", "steps": 12}
    line = perform(job, place)
    shutil.rmtree(place / "runs")
    assert line["verdict"] is None, line["sentence"]
    assert (line["end"], line["steps"]) == ("finished", 12)
    assert line["naive"]["a gradient is zero"]


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
