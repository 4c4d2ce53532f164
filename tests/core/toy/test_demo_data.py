from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from trainer_core.toy import shapes
from trainer_core.toy.demo_data import describe_teaching_set, write_teaching_set


def test_pictures_have_captions_and_the_new_word_stands_for_the_new_shape_only(tmp_path: Path) -> None:
    teaching = write_teaching_set(tmp_path, word="quib", concept_pictures=9, prior_pictures=13)
    concept = sorted(teaching.concept_folder.glob("*.png"))
    prior = sorted(teaching.prior_folder.glob("*.png"))
    assert len(concept) == 9
    assert len(prior) == 13
    captions = [path.with_suffix(".txt").read_text(encoding="utf-8").strip() for path in concept]
    assert all(caption.endswith(" quib") for caption in captions)
    assert {caption.split()[1] for caption in captions} == set(shapes.KNOWN_COLOURS)
    for path in prior:
        caption = path.with_suffix(".txt").read_text(encoding="utf-8").strip()
        colour, shape = caption.split()[-2:]
        assert (colour, shape) in shapes.known_pairs()
    with Image.open(concept[0]) as image:
        assert image.size == (64, 64)
        assert image.mode == "RGB"
    assert describe_teaching_set(tmp_path, word="quib") == teaching
    assert len(teaching.concept_prompts) == 8
    assert len(teaching.known_prompts) == len(teaching.known_shapes) == 8
    assert set(teaching.known_shapes) == set(shapes.KNOWN_SHAPES)


def test_same_arguments_write_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_teaching_set(tmp_path / name, concept_pictures=2, prior_pictures=2, seed=seed)

    def content(name: str) -> dict[str, bytes]:
        root = tmp_path / name
        return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}

    assert content("a") == content("b")
    assert content("a") != content("c")


def test_a_word_the_toy_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'circle'.*zorp"):
        write_teaching_set(tmp_path, word="circle")
    with pytest.raises(ValueError, match="0 concept"):
        write_teaching_set(tmp_path, concept_pictures=0)
    assert not list(tmp_path.iterdir())
