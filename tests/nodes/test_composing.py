"""From inputs to a config: recipes, what wins, and all problems at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

INPUTS: dict[str, Any] = {
    "purpose": "character", "vram": "12 GB", "output_name": "me", "steps": 0, "learning_rate": 0.0, "train_seed": 3,
    "preview_prompts": "", "preview_every": 100, "save_every": 50,
}  # fmt: skip


@pytest.fixture
def compose(part: Any, tmp_path: Path) -> Any:
    handles, composing, targets = part("handles"), part("composing"), part("targets")
    (tmp_path / "pictures").mkdir()
    model = handles.ModelHandle("toy", 64, {"model.path": "toy"})
    data = handles.DatasetHandle(
        "pictures", 20, "d", ("one", "two", "three"), {"dataset.path": str(tmp_path / "pictures")}
    )

    def call(layers: dict[str, Any] | None = None, **inputs: Any) -> tuple[Any, list[str]]:
        wanted = {"rank": 0, "alpha": 0.0, "layers": "default", "unet_rate": -1.0, "text_encoder_1_rate": 0.0,
                  "text_encoder_2_rate": 0.0, **(layers or {})}  # fmt: skip
        handle = handles.TargetsHandle("t", targets.target_settings(wanted))
        return composing.compose({**INPUTS, **inputs}, model, data, handle, None)

    return call


def test_purpose_and_memory_fill_in_what_was_left_open(compose: Any) -> None:
    config, notes = compose()
    assert (config.run.max_train_steps, config.lora.rank, config.optimizer.learning_rate) == (1600, 32, 1e-4)
    assert (config.dataset.batch_size, config.precision.gradient_checkpointing) == (1, True)
    assert "run.max_train_steps = 1600" in notes[0]


@pytest.mark.parametrize(("pictures", "steps"), [(1, 800), (20, 1600), (1000, 3000)])
def test_steps_grow_with_the_pictures_within_limits(core: Any, pictures: int, steps: int) -> None:
    assert core.purpose_settings("character", pictures)["run.max_train_steps"] == steps


def test_what_was_given_wins_over_recipes(compose: Any) -> None:
    config, _ = compose({"rank": 8}, steps=7, learning_rate=5e-4, batch_size=3, schedule="linear")
    assert (config.run.max_train_steps, config.lora.rank, config.optimizer.learning_rate) == (7, 8, 5e-4)
    assert (config.dataset.batch_size, config.schedule.type) == (3, "linear")


def test_extra_lines_win_over_everything(compose: Any) -> None:
    config, _ = compose(steps=7, more_settings="run.max_train_steps = 9\n# a remark\n\nobjective.loss = huber")
    assert (config.run.max_train_steps, config.objective.loss) == (9, "huber")


def test_all_problems_come_at_once(compose: Any, core: Any) -> None:
    with pytest.raises(core.ConfigError) as caught:
        compose(
            purpose="own settings", vram="own settings", more_settings="lora.rnk = 4\njust words\noptimizer.beta1 = x"
        )
    text = str(caught.value)
    assert "Did you mean lora.rank?" in text
    assert "just words" in text
    assert "optimizer.beta1" in text
    assert "max_train_steps" in text


@pytest.mark.parametrize(
    ("written", "prompts"),
    [("", ("one", "two")), ("none", ()), (" NONE ", ()), ("a cat\n\n b dog --d 3 ", ("a cat", "b dog --d 3"))],
)
def test_preview_prompts(compose: Any, written: str, prompts: tuple[str, ...]) -> None:
    assert compose(preview_prompts=written)[0].preview.prompts == prompts


def test_parts_follow_the_main_rate_or_are_off(compose: Any) -> None:
    config, _ = compose({"text_encoder_1_rate": -1.0, "unet_rate": 2e-4})
    assert (config.optimizer.unet_lr, config.optimizer.te1_lr, config.optimizer.te2_lr) == (2e-4, None, 0.0)


def test_a_small_card_trains_smaller_pictures_but_a_toy_keeps_its_own(core: Any) -> None:
    assert core.memory_settings("8 GB", 1024)["dataset.resolution"] == (768, 768)
    assert "dataset.resolution" not in core.memory_settings("8 GB", 64)
    assert core.memory_settings("own settings", 1024) == {}


def test_minimal_metadata(compose: Any) -> None:
    assert compose(metadata="minimal")[0].metadata.minimal
    assert not compose()[0].metadata.minimal


def test_the_monitor_takes_words_and_thresholds(part: Any, core: Any) -> None:
    node = part("monitor").SafeScalerGradientMonitor()
    (handle,) = node.execute(
        "12",
        "health.spike_z = 9\nsafety.max_rollbacks = 1",
        max_grad_norm=0.5,
        stop_on="TE1-DEAD, COLLAPSING",
        ignore="",
    )
    assert handle.node_id == "12"
    assert handle.settings["health.stop_on"] == ("TE1-DEAD", "COLLAPSING")
    assert (handle.settings["health.spike_z"], handle.settings["safety.max_rollbacks"]) == (9.0, 1)
    with pytest.raises(core.ConfigError, match="lora.rank.*more_settings of Train"):
        node.execute("12", "lora.rank = 4")
