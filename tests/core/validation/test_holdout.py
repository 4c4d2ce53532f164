from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer_core.config import ValidationConfig
from trainer_core.data import Item
from trainer_core.draws import Draws
from trainer_core.validation import choose_holdout


def items(count: int, **changes: Any) -> list[Item]:
    return [
        Item(
            file=f"{i}.png", path=Path(f"{i}.png"), content_hash=f"h{i}", upright_size=(64, 64), resized=(64, 64),
            bucket=(64, 64), **changes,
        )
        for i in range(count)
    ]  # fmt: skip


def test_held_out_pictures_are_not_trained() -> None:
    choice = choose_holdout(items(40), ValidationConfig(split=0.1), Draws(3))
    assert choice.held_out
    assert len(choice.measured) == 4
    assert {item.file for item in choice.training} | {item.file for item in choice.measured} == {
        item.file for item in items(40)
    }
    assert not {item.file for item in choice.training} & {item.file for item in choice.measured}
    assert choice.reason == "4 of 40 pictures are held out of training for the validation loss."
    assert choose_holdout(items(40), ValidationConfig(split=0.1), Draws(3, attempt=2)) == choice
    assert choose_holdout(items(40), ValidationConfig(split=0.1), Draws(4)).measured != choice.measured


def test_a_small_set_is_probed_and_it_is_said() -> None:
    choice = choose_holdout(items(4), ValidationConfig(), Draws(3))
    assert not choice.held_out
    assert len(choice.training) == len(choice.measured) == 4
    assert "4 pictures are too few to hold some out" in choice.reason


def test_switched_off() -> None:
    choice = choose_holdout(items(40), ValidationConfig(enabled=False), Draws(3))
    assert (len(choice.training), choice.measured, choice.held_out) == (40, (), False)
    assert choice.reason == "The validation loss is switched off."
