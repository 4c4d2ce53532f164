from __future__ import annotations

import numpy as np
import pytest

from trainer_core.toy import shapes


def test_a_picture_depends_on_its_key_only() -> None:
    first = shapes.training_picture(3, 17)
    np.random.default_rng(0).random(10)
    again = shapes.training_picture(3, 17)
    other = shapes.training_picture(4, 17)
    assert np.array_equal(first.pixels_HWC, again.pixels_HWC)
    assert first.caption == again.caption
    assert not np.array_equal(first.pixels_HWC, other.pixels_HWC)


@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_shape_lies_inside_and_has_its_colour(shape: str) -> None:
    for index, size in enumerate(shapes.SIZES):
        pixels = shapes.draw(shapes.keyed_generator(1, "test", index), shape, "blue", size).astype(int)
        assert pixels.shape == (*size, 3)
        is_blue = (pixels[..., 2] - pixels[..., 0]) > 90
        assert 0.05 < is_blue.mean() < 0.5
        border = np.concatenate([is_blue[0], is_blue[-1], is_blue[:, 0], is_blue[:, -1]])
        assert not border.any(), "a shape must not touch the border"


def test_ring_has_a_hole_and_circle_has_none() -> None:
    for shape, hole in (("ring", True), ("circle", False)):
        pixels = shapes.draw(shapes.keyed_generator(2, "test"), shape, "black")
        dark = pixels.max(axis=2) < 100
        ys, xs = np.nonzero(dark)
        centre = pixels[round(ys.mean()), round(xs.mean())]
        assert (centre.min() > 150) == hole


def test_the_training_set_leaves_out_what_is_to_be_taught() -> None:
    pictures = [shapes.training_picture(0, i, (16, 16)) for i in range(200)]
    seen = {(p.colour, p.shape) for p in pictures}
    assert seen == set(shapes.known_pairs())
    assert not seen & set(shapes.HELD_OUT_PAIRS)
    text = " ".join(p.caption for p in pictures)
    assert shapes.UNTAUGHT_SHAPE not in text
    assert shapes.UNTAUGHT_COLOUR not in text
    assert {c for c, _ in seen} == set(shapes.KNOWN_COLOURS)
    assert {s for _, s in seen} == set(shapes.KNOWN_SHAPES)
    every = [shapes.any_picture(0, i, (16, 16)) for i in range(400)]
    assert {p.shape for p in every} == set(shapes.SHAPES)
    assert {p.colour for p in every} == set(shapes.COLOURS)


def test_held_out_pairs_cover_every_known_colour_and_shape() -> None:
    assert {c for c, _ in shapes.HELD_OUT_PAIRS} == set(shapes.KNOWN_COLOURS)
    assert {s for _, s in shapes.HELD_OUT_PAIRS} == set(shapes.KNOWN_SHAPES)


def test_unknown_shape_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="red hexagon.*circle"):
        shapes.draw(shapes.keyed_generator(0, "test"), "hexagon", "red")


def test_article() -> None:
    assert shapes.with_article("orange ring") == "an orange ring"
    assert shapes.with_article("red ring") == "a red ring"
