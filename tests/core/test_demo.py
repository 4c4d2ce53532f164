"""The demo's lesson: a short smoke by default, the promised scores on three seeds under -m slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_setup import Recorder

from trainer_core import cli
from trainer_core.build import start_run
from trainer_core.config_rules import problems
from trainer_core.demo import demo_config
from trainer_core.toy.demo_data import write_teaching_set


def test_demo_settings_hold_every_rule(tmp_path: Path) -> None:
    lesson = write_teaching_set(tmp_path / "pictures")
    assert problems(demo_config(lesson, tmp_path / "out", 0)) == []


def test_demo_lesson_starts_from_what_the_toy_knows(tmp_path: Path) -> None:
    """Three steps of the real lesson on the shipped toy: the known world has a far lower loss than noise (1.0)."""
    from dataclasses import replace

    lesson = write_teaching_set(tmp_path / "pictures", concept_pictures=8, prior_pictures=8)
    config = demo_config(lesson, tmp_path / "out", 0)
    config = replace(
        config,
        run=replace(config.run, max_train_steps=3),
        schedule=replace(config.schedule, warmup_steps=0),
        preview=replace(config.preview, prompts=()),
        validation=replace(config.validation, enabled=False),
    )
    recorder = Recorder()
    result = start_run(config, sink=recorder)
    assert result.status == "finished", result.message
    assert max(recorder.losses) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_demo_teaches_a_word_and_keeps_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    assert cli.main(["demo", "--json", "--seed", str(seed), "--output_dir", str(tmp_path)]) == 0
    scores = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert set(scores) == {"score_before", "score_after", "kept", "lora", "run", "wall_s"}
    assert scores["score_before"] <= 0.25, scores
    assert scores["score_after"] >= 0.8, scores
    assert scores["kept"] >= 0.8, scores
    page = (Path(scores["run"]) / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert f"{scores['score_after']:.0%}".rstrip("%") in page
