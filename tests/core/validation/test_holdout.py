from __future__ import annotations

from dataclasses import dataclass

from trainer_core.config import ValidationConfig
from trainer_core.draws import Draws
from trainer_core.validation import choose_holdout


@dataclass(frozen=True)
class Picture:
    file: str
    content_hash: str
    caption: str = ""


def pictures(count: int) -> list[Picture]:
    return [Picture(f"{i}.png", f"h{i}") for i in range(count)]


def test_held_out_pictures_are_not_trained() -> None:
    choice = choose_holdout(pictures(40), ValidationConfig(split=0.1), Draws(3))
    assert choice.held_out
    assert len(choice.measured) == 4
    assert {*choice.training, *choice.measured} == set(pictures(40))
    assert not {*choice.training} & {*choice.measured}
    assert choice.reason == "4 of 40 pictures are held out of training for the validation loss."


def test_the_choice_hangs_on_seed_and_pictures_alone() -> None:
    config = ValidationConfig(split=0.1)
    choice = choose_holdout(pictures(40), config, Draws(3))
    assert choose_holdout(pictures(40), config, Draws(3, attempt=2)) == choice
    assert set(choose_holdout(pictures(40)[::-1], config, Draws(3)).measured) == set(choice.measured)
    assert choose_holdout(pictures(40), config, Draws(4)).measured != choice.measured


def test_copies_of_a_picture_stay_on_one_side() -> None:
    doubled = [*pictures(40), *(Picture(f"copy/{i}.png", f"h{i}") for i in range(40))]
    choice = choose_holdout(doubled, ValidationConfig(split=0.2), Draws(3))
    held = {picture.content_hash for picture in choice.measured}
    assert len(choice.measured) == len(held) == 8
    assert len(choice.training) == 80 - 16
    assert not held & {picture.content_hash for picture in choice.training}


def test_no_more_than_wanted_are_held_out() -> None:
    choice = choose_holdout(pictures(1000), ValidationConfig(split=0.5, max_pictures=16), Draws(3))
    assert (len(choice.measured), len(choice.training)) == (16, 984)


def test_a_small_set_is_probed_and_it_is_said() -> None:
    choice = choose_holdout(pictures(4), ValidationConfig(), Draws(3))
    assert not choice.held_out
    assert set(choice.training) == set(choice.measured) == set(pictures(4))
    assert "4 pictures are too few to hold some out" in choice.reason


def test_nothing_held_out_when_the_share_is_zero() -> None:
    choice = choose_holdout(pictures(100), ValidationConfig(split=0.0), Draws(3))
    assert (len(choice.training), len(choice.measured), choice.held_out) == (100, 16, False)
    assert "none is to be held out" in choice.reason


def test_switched_off() -> None:
    choice = choose_holdout(pictures(40), ValidationConfig(enabled=False), Draws(3))
    assert (len(choice.training), choice.measured, choice.held_out) == (40, (), False)
    assert choice.reason == "The validation loss is switched off."
