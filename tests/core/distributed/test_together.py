"""Whole runs under torchrun and accelerate launch on the CPU: the result of one process, written once, resumed with
another number of processes, and taken up again after processes were killed and stalled."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_setup import Recorder, small_config
from safetensors.torch import load_file

from trainer_core.build import resume_run, start_run
from trainer_core.networks.file_check import body_hash
from trainer_core.runs.record import open_readonly

ROOT = Path(__file__).resolve().parents[3]
SETTINGS: dict[str, dict[str, Any]] = {
    "dataset": {"batch_size": 3},
    "gradient": {"accumulation": 2},
    "lora": {"dropout": 0.1},
    "optimizer": {"te2_lr": 0.0},
    "checkpoint": {"every_steps": 1},
    "validation": {"enabled": True, "split": 0.0, "every_steps": 2, "bands": 2},
}


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc_per_node={}"],
    # Without --multi_gpu it starts a single process where it sees no two GPUs, and that is refused.
    "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes={}", "--main_process_port=0"],
}


def launch(
    launcher: str, count: int, config: Path, *flags: str, module: str = "trainer_core", **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [part.format(count) for part in LAUNCHERS[launcher]]
    return subprocess.run(
        [sys.executable, "-m", *command, *flags, "-m", module, "train", str(config)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=1800,
    )


def losses_of(run_dir: Path) -> list[float]:
    with open_readonly(run_dir / "run.db") as record:
        return [row["loss"] for row in record.steps()]


def write_settings(path: Path, config: Any) -> Path:
    from trainer_core.config_io import to_dict

    path.write_text(json.dumps(to_dict(config)), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("launcher", "count"), [("accelerate", 2), ("torchrun", 3)])
def test_kind_ddp_equal_to_one_process_and_resumed_with_one(
    launcher: str, count: int, micro_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """B59, with text encoder 1, whose last layer never has a gradient: 2 steps in `count` processes, 2 more in one."""
    whole = start_run(small_config(micro_model, pictures, tmp_path / "whole", **SETTINGS))
    sections = {**SETTINGS, "run": {"max_train_steps": 2}}
    config = small_config(micro_model, pictures, tmp_path / "together", **sections)
    done = launch(launcher, count, write_settings(tmp_path / "config.json", config))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("LoRA:") == 1, "one process speaks"
    (run_dir,) = (tmp_path / "together" / "safe_scaler").glob("*-*")
    assert losses_of(run_dir) == pytest.approx(losses_of(whole.run_dir)[:2], rel=1e-6)

    recorder = Recorder()
    from dataclasses import replace

    result = resume_run(run_dir, lambda c: replace(c, run=replace(c.run, max_train_steps=4)), sink=recorder)
    assert result.status == "finished", result.message
    notes = recorder.of("Resumed")[0]["differences"]
    assert f"processes: {count} in the checkpoint, 1 now (exact draws, rounding differs)" in notes
    assert losses_of(run_dir) == pytest.approx(losses_of(whole.run_dir), rel=1e-6)
    assert whole.lora is not None
    assert result.lora is not None
    found, wanted = load_file(result.lora), load_file(whole.lora)
    # The third of a batch is summed in another order, and AdamW makes more of that where a gradient is next to nothing:
    # single weights near zero are apart by more than 1e-6, as a whole they are not (benchmarks/processes.py: 3.4e-6).
    apart, norm = (
        math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
        for tensors in ([found[name] - value for name, value in wanted.items()], wanted.values())
    )
    assert apart < 1e-5 * norm, f"{apart / norm:.2g} of the adapter's norm"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_and_stalled_processes_are_restarted_and_the_run_goes_on(
    micro_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """A rank killed, the first one killed, one that hangs longer than a collective waits: torchrun --max-restarts goes
    on with the same run; adapter and record are the undisturbed run's, bit for bit."""
    sections: dict[str, dict[str, Any]] = {
        "lora": {"rank": 2, "preset": "attention", "dropout": 0.1},
        "optimizer": {"te1_lr": 0.0, "te2_lr": 0.0},
        "checkpoint": {"every_steps": 1},
        "run": {"max_train_steps": 5, "process_timeout": 1.0},
    }
    results: dict[str, tuple[Path, Path]] = {}
    faults = [["kill", 1, 1, 0], ["kill", 0, 3, 0], ["stall", 1, 4, 95]]
    for name, planned in (("whole", []), ("disturbed", faults)):
        config = small_config(micro_model, pictures, tmp_path / name, **sections)
        done = launch(
            "torchrun",
            2,
            write_settings(tmp_path / f"{name}.json", config),
            f"--max-restarts={len(planned)}",
            module="tests.core.distributed.faulty_run",
            FAULTS=json.dumps(planned),
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("restarted by the launcher") == len(planned), done.stdout
        (run_dir,) = (tmp_path / name / "safe_scaler").glob("*-*")
        results[name] = run_dir, tmp_path / name / "test.safetensors"
    (whole, lora), (disturbed, other) = results["whole"], results["disturbed"]
    assert losses_of(disturbed) == losses_of(whole)
    assert body_hash(other) == body_hash(lora)
