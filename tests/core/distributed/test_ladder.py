"""The escalation ladder with two processes over gloo: the same rung at the same step in both, as in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_setup import Recorder, small_config, write_pictures

from trainer_core.build import start_run
from trainer_core.config import TrainConfig
from trainer_core.config_io import to_dict
from trainer_core.runs.record import open_readonly
from trainer_core.trainer import Trainer

from .ladder_run import Trace, break_steps

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its processes")

ROOT = Path(__file__).resolve().parents[3]


def test_every_process_takes_the_same_rungs(micro_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are NaN in the second process alone. Restored state, new draws, skipped window, halved rate and the end
    are those of one process that fails alike; the report is written once, weights are the same bits in both."""
    pictures = write_pictures(tmp_path / "pictures", 6, sizes=((32, 32),))

    def config(name: str) -> TrainConfig:
        return small_config(
            micro_model,
            pictures,
            tmp_path / name,
            lora={"rank": 2, "preset": "attention"},
            optimizer={"te1_lr": 0.0, "te2_lr": 0.0},
            health={"audit": "off"},
            safety={"diagnose": False},
            checkpoint={"every_steps": 2},
            dataset={"cache_dir": str(tmp_path / "cache")},
            run={"max_train_steps": 20},
        )

    (tmp_path / "config.json").write_text(json.dumps(to_dict(config("both"))), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.distributed.ladder_run", "2", str(tmp_path / "config.json")],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=500,
    )  # fmt: skip
    ranks = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda facts: facts["rank"])
    assert [facts["rank"] for facts in ranks] == [0, 1], done.stderr[-3000:]
    first, second = ranks
    assert first["trace"] == second["trace"]
    assert first["weights"] == second["weights"]

    trace: Trace = []
    for name in ("loss", "train_step"):
        monkeypatch.setattr(Trainer, name, getattr(Trainer, name))  # puts both back afterwards
    break_steps(trace, here=True)
    recorder = Recorder()
    alone = start_run(config("alone"), sink=recorder)
    assert first["trace"] == json.loads(json.dumps(trace))
    assert first["told"] == [data["action"] for data in recorder.of("Intervention")]
    assert [row[:2] for row in trace if row[:2] == [3, row[1]]] == [[3, 0], [3, 1], [3, 2]], "two rungs, back to step 2"
    assert trace[-1][5] == 0.5, "the second halved the rates"

    assert alone.status == "failed"
    assert "There is no rung left on the ladder" in first["message"]
    assert "There is no rung left on the ladder" in second["message"]
    (run_dir,) = (tmp_path / "both" / "safe_scaler").glob("*-*")
    assert len(list(run_dir.rglob("stop_report.md"))) == 1
    with open_readonly(run_dir / "run.db") as one, open_readonly(alone.run_dir / "run.db") as other:
        assert [row["loss"] for row in one.steps()] == pytest.approx([row["loss"] for row in other.steps()], rel=1e-5)
