"""A fault put into a whole run of the micro toy: what is said, and what is left of it on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainer_core.cli import main
from trainer_core.config import trained_parts
from trainer_core.drill.faults import FAULTS, LOOKALIKES, find_fault
from trainer_core.drill.run import _modules, drill_config, horizon_ok, run_with, with_sections
from trainer_core.health.ring import read_ring
from trainer_core.runs.record import open_readonly


def test_a_cut_adapter_is_named_in_a_run(micro_model: Path, pictures: Path, tmp_path: Path) -> None:
    fault = find_fault("F1")
    assert fault is not None
    assert find_fault("cut-adapter") is fault
    config = with_sections(drill_config(micro_model, pictures, tmp_path, steps=11, seed=5), fault.sections)
    config = replace(config, checkpoint=replace(config.checkpoint, every_steps=6))
    run = run_with(config, fault.inject, seed=5, onset=1)
    alarm = run.first()
    assert alarm is not None
    assert (alarm.kind, alarm.step) == ("DISCONNECTED", 8)
    assert horizon_ok(run, fault.verdicts, fault.horizon)
    assert run.named_right()
    assert "Likely cause: the tensor between the two is detached. Try:" in alarm.sentence
    (folder,) = (ring.parent for ring in tmp_path.glob("safe_scaler/*/health.ring"))
    assert [record.step for record in read_ring(folder / "health.ring")] == list(range(1, 12))
    with open_readonly(folder / "run.db") as record:
        rows = record.health()
    assert {1, 10, 11} <= {row["step"] for row in rows}, "the first, every tenth, and each after the verdict"
    ill = {row["data"]["verdict"] for row in rows if row["step"] == 11}
    assert ill == {"HEALTHY", "DISCONNECTED"}


def test_faults_and_lookalikes_cover_the_documents_lists() -> None:
    assert {f"F{n}" for n in range(1, 13)} <= {fault.recipe for fault in FAULTS}
    assert len(FAULTS) >= 16
    assert len(LOOKALIKES) >= 9
    assert {f"H{n}" for n in range(1, 7)} <= {one.recipe for one in LOOKALIKES}


def test_places_are_read_from_a_verdict() -> None:
    where = "lora_te1_layers_2_q (text encoder 1, layer 2), lora_unet_x_to_k.lora_up.weight, middle"
    assert _modules(where) == {"lora_te1_layers_2_q", "lora_unet_x_to_k"}


def test_runs_train_the_encoders_that_their_fault_or_look_is_about() -> None:
    """F4, H3 and H4 say nothing when the encoders are frozen, as they are by default."""
    for one in (*FAULTS, *LOOKALIKES):
        if one.recipe in ("F4", "H3", "H4"):
            config = with_sections(drill_config(Path("m"), Path("p"), Path("o"), steps=1, seed=0), one.sections)
            assert set(trained_parts(config)) == {"unet", "te1", "te2"}, one.name


def test_an_unknown_fault_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "cut-adaptor"]) == 2
    assert "Did you mean cut-adapter?" in capsys.readouterr().err
    assert main(["drill", "--list"]) == 0
    assert "F12  bit-flip" in capsys.readouterr().out


def test_health_of_a_run_that_measured_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", str(tmp_path)]) == 1
    assert "no run record" in capsys.readouterr().err
