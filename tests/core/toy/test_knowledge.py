"""The shipped weights draw what they are asked for: sampled with the product's own loader and sampler."""

from __future__ import annotations

import pytest
import torch

from trainer_core.demo import sample
from trainer_core.models import SDXLModel, load_sdxl
from trainer_core.toy import shapes
from trainer_core.toy.classifier import Classifier, judge, load_classifier


@pytest.fixture(scope="module")
def toy() -> SDXLModel:
    return load_sdxl("toy")


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return load_classifier()


def test_pairs_never_seen_together_come_out_right(toy: SDXLModel, classifier: Classifier) -> None:
    prompts = [shapes.with_article(f"{colour} {shape}") for colour, shape in shapes.HELD_OUT_PAIRS]
    verdicts = judge(classifier, sample(toy, prompts, each=1))
    right = [v.shape == shape for v, (_, shape) in zip(verdicts, shapes.HELD_OUT_PAIRS, strict=True)]
    assert sum(right) >= 7


def test_spare_words_were_never_trained(toy: SDXLModel) -> None:
    """A spare word is as long as a trained one, so the text encoders can tell it apart, but means nothing yet."""
    for tokenizer, encoder in zip(toy.tokenizers, toy.text_encoders, strict=True):
        table = encoder.get_input_embeddings().weight
        known, spare = (tokenizer("a red circle").input_ids[2:4], tokenizer("zorp quib").input_ids[1:3])
        lengths = [float(table[ids].norm(dim=-1).mean()) for ids in (known, spare)]
        assert 0.4 < lengths[1] / lengths[0] < 2.5
        assert not torch.equal(table[spare[0]], table[spare[1]])


@pytest.mark.slow
def test_held_out_shapes_by_sixty_four_samples(toy: SDXLModel, classifier: Classifier) -> None:
    prompts = [shapes.with_article(f"{colour} {shape}") for colour, shape in shapes.HELD_OUT_PAIRS]
    verdicts = judge(classifier, sample(toy, prompts, each=8))
    wanted = [pair for pair in shapes.HELD_OUT_PAIRS for _ in range(8)]
    shape = sum(v.shape == s for v, (_, s) in zip(verdicts, wanted, strict=True)) / len(wanted)
    colour = sum(v.colour == c for v, (c, _) in zip(verdicts, wanted, strict=True)) / len(wanted)
    assert shape >= 0.95
    assert colour >= 0.65


@pytest.mark.slow
def test_the_untaught_shape_is_unknown(toy: SDXLModel, classifier: Classifier) -> None:
    verdicts = judge(classifier, sample(toy, ["a red heart", "a blue zorp", "a green quib"], each=8))
    assert sum(v.shape == shapes.UNTAUGHT_SHAPE for v in verdicts) <= 6
