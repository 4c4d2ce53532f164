"""Weighted captions: the notation, and what a weight does to the encoders' outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer_core.data import TextCache
from trainer_core.models import SDXLModel, encode_captions
from trainer_core.models.weighted_text import parse_weights


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("normal text", [("normal text", 1.0)]),
        ("", []),
        ("an (important) word", [("an ", 1.0), ("important", 1.1), (" word", 1.0)]),
        ("(unbalanced", [("unbalanced", 1.1)]),
        ("[less", [("less", 1 / 1.1)]),
        ("balanced) at] the start:", [("balanced) at] the start:", 1.0)]),
        (r"\(literal\]", [("(literal]", 1.0)]),
        (r"back\\slash and \n", [("back\\slash and \\n", 1.0)]),
        ("(unnecessary)(parens)", [("unnecessaryparens", 1.1)]),
        ("(word:1.2)", [("word", 1.2)]),
        ("(word:.5) and :) at 10:30", [("word", 0.5), (" and :) at 10:30", 1.0)]),
        ("(a:1.2.3)", [("a:1.2.3", 1.1)]),
        ("x:1.2)", [("x:1.2)", 1.0)]),
        (
            "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).",
            [
                ("a ", 1.0),
                ("house", 1.3 * 1.1 * 1.1),
                (" ", 1.1),
                ("on", 1.0),
                (" a ", 1.1),
                ("hill", 0.55),
                (", sun, ", 1.1),
                ("sky", 1.1**4),
                (".", 1.1),
            ],
        ),
    ],
)
def test_notation_of_the_web_ui(text: str, pieces: list[tuple[str, float]]) -> None:
    found = parse_weights(text)
    assert [piece for piece, _ in found] == [piece for piece, _ in pieces]
    assert [weight for _, weight in found] == pytest.approx([weight for _, weight in pieces])


@pytest.mark.parametrize("limit", [75, 150])
def test_a_weight_multiplies_the_states_of_its_tokens(toy: SDXLModel, limit: int) -> None:
    plain = encode_captions(toy, ["a red square", "a blue circle"], max_token_length=limit)
    weighted = encode_captions(toy, ["a (red:1.5) square", "a blue circle"], max_token_length=limit, weighted=True)
    ids = [tokenizer("a red square").input_ids for tokenizer in toy.tokenizers]
    red = [tokenizer("red", add_special_tokens=False).input_ids for tokenizer in toy.tokenizers]
    place = ids[0].index(red[0][0])
    wanted = plain.context_BTD.clone()
    wanted[0, place : place + len(red[0])] *= 1.5
    assert torch.allclose(weighted.context_BTD, wanted, atol=1e-6)
    assert torch.equal(weighted.pooled_BD, plain.pooled_BD)


def test_weights_of_a_second_chunk_and_text_that_is_cut(toy: SDXLModel) -> None:
    words = "a red square " * 60  # more than 150 tokens
    plain = encode_captions(toy, [words], max_token_length=150)
    weighted = encode_captions(toy, [f"({words}:2)"], max_token_length=150, weighted=True)
    assert torch.allclose(weighted.context_BTD[:, 1:151], plain.context_BTD[:, 1:151] * 2, atol=1e-5)
    assert torch.allclose(weighted.context_BTD[:, [0, 151]], plain.context_BTD[:, [0, 151]], atol=1e-6)


def test_kind_caption_brackets_are_plain_text_unless_asked_for(toy: SDXLModel, tmp_path: Path) -> None:
    caption = "a (red:1.5) [square]"
    assert not torch.equal(
        encode_captions(toy, [caption]).context_BTD, encode_captions(toy, [caption], weighted=True).context_BTD
    )
    plain, weighted = TextCache(tmp_path, toy), TextCache(tmp_path, toy, weighted=True)
    assert plain.key(caption) != weighted.key(caption)
    for cache, flag in ((plain, False), (weighted, True)):
        found = cache.encode([caption]).context_BTD
        assert torch.allclose(found, encode_captions(toy, [caption], weighted=flag).context_BTD, atol=1e-6)
