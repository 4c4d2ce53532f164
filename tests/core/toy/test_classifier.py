from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer_core.toy import classifier, shapes


@pytest.fixture(scope="module")
def judge() -> classifier.Classifier:
    return classifier.load_classifier()


def _images(pictures: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255


@pytest.mark.parametrize("size", shapes.SIZES + ((96, 128),))
def test_it_knows_every_shape_and_colour(judge: classifier.Classifier, size: tuple[int, int]) -> None:
    pairs = [(c, s) for c in shapes.COLOURS for s in shapes.SHAPES]
    drawn = [shapes.draw(shapes.keyed_generator(77, "test", i), s, c, size) for i, (c, s) in enumerate(pairs)]
    verdicts = classifier.judge(judge, _images(drawn))
    right = [v.shape == s and v.colour == c for v, (c, s) in zip(verdicts, pairs, strict=True)]
    assert np.mean(right) >= 0.95


def test_an_empty_picture_and_noise_are_no_shape(judge: classifier.Classifier) -> None:
    grounds = [shapes.background(shapes.keyed_generator(8, "test", i), (64, 64)).astype(np.uint8) for i in range(8)]
    noise = [shapes.keyed_generator(9, "test", i).integers(0, 256, (64, 64, 3), dtype=np.uint8) for i in range(8)]
    verdicts = classifier.judge(judge, _images(grounds + noise))
    assert [v.shape for v in verdicts] == [classifier.NOTHING] * 16


def test_share_counts_the_wanted_shape(judge: classifier.Classifier) -> None:
    wanted = ["heart", "ring", "star", "cross"]
    drawn = [shapes.draw(shapes.keyed_generator(5, "test", i), s, "green") for i, s in enumerate(wanted)]
    assert classifier.shape_share(judge, _images(drawn), wanted) == 1.0
    assert classifier.shape_share(judge, _images(drawn), ["heart"] * 4) == 0.25
    with pytest.raises(ValueError, match="4 pictures but 1"):
        classifier.shape_share(judge, _images(drawn), ["heart"])


def test_a_missing_classifier_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="classifier"):
        classifier.load_classifier(tmp_path)
