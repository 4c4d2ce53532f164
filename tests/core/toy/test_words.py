from __future__ import annotations

from pathlib import Path

import pytest
from transformers import CLIPTokenizer

from trainer_core.toy import TOY_FOLDER, shapes, words


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[CLIPTokenizer, CLIPTokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    words.write_tokenizer(folder / "1", pad_token=words.END)
    words.write_tokenizer(folder / "2", pad_token="!")
    return CLIPTokenizer.from_pretrained(folder / "1"), CLIPTokenizer.from_pretrained(folder / "2")


def test_ids_are_in_clips_order() -> None:
    vocabulary = words.build_vocabulary()
    assert vocabulary["!"] == 0
    assert vocabulary["a"] == ord("a") - ord("!")
    assert vocabulary["!</w>"] == 256
    assert vocabulary[words.BEGIN] == len(vocabulary) - 2
    assert vocabulary[words.END] == len(vocabulary) - 1
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))


def test_every_listed_word_is_one_token(tokenizers: tuple[CLIPTokenizer, CLIPTokenizer]) -> None:
    for word in (*shapes.COLOURS, *shapes.SHAPES, *words.PLAIN_WORDS, *words.SPARE_WORDS, "a"):
        for tokenizer in tokenizers:
            assert len(tokenizer(word).input_ids) == 3, word


def test_spare_words_are_in_no_caption() -> None:
    templates = " ".join(template for template, _ in shapes.TEMPLATES).split()
    taken = {*shapes.COLOURS, *shapes.SHAPES, *words.PLAIN_WORDS, *templates}
    assert not taken & set(words.SPARE_WORDS)


def test_padding_and_length(tokenizers: tuple[CLIPTokenizer, CLIPTokenizer]) -> None:
    vocabulary = words.build_vocabulary()
    for tokenizer, pad in zip(tokenizers, (vocabulary[words.END], 0), strict=True):
        assert tokenizer.model_max_length == 77
        assert len(tokenizer) == len(vocabulary)
        row = tokenizer("A red\n  Heart", padding="max_length", truncation=True, max_length=77).input_ids
        expected = [words.BEGIN, "a</w>", "red</w>", "heart</w>", words.END]
        assert row[:5] == [vocabulary[token] for token in expected]
        assert len(row) == 77
        assert set(row[5:]) == {pad}


def test_any_text_has_ids(tokenizers: tuple[CLIPTokenizer, CLIPTokenizer]) -> None:
    text = "unseen wörds 42 ☃ don't!"
    for tokenizer in tokenizers:
        ids = tokenizer(text).input_ids
        assert max(ids[1:-1]) < len(tokenizer) - 2, "no symbol may fall back to a special token"


def test_shipped_tokenizers_are_these(tmp_path: Path) -> None:
    for name, pad in (("tokenizer", words.END), ("tokenizer_2", "!")):
        words.write_tokenizer(tmp_path / name, pad_token=pad)
        for path in (tmp_path / name).iterdir():
            assert (TOY_FOLDER / name / path.name).read_bytes() == path.read_bytes()
