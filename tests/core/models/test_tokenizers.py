"""CLIP's tokenizer from the shipped merges."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from trainer_core.errors import ModelFileError
from trainer_core.models import SDXLModel, count_tokens, tokenizers
from trainer_core.models.configs import SHIPPED


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return tokenizers.load_tokenizers(None, None, (49_408, 49_408))


def test_known_ids(pair: tuple[Any, Any]) -> None:
    for tokenizer in pair:
        assert len(tokenizer) == 49_408
        assert tokenizer("a photo of a cat")["input_ids"] == [49406, 320, 1125, 539, 320, 2368, 49407]
        assert tokenizer.model_max_length == 77
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (49406, 49407)
    assert (pair[0].pad_token_id, pair[1].pad_token_id) == (49407, 0)


def test_text_is_plain_lower_case_and_whole(pair: tuple[Any, Any]) -> None:
    """Brackets, weights and wild cards are characters like others (case B50)."""
    text = "(cat:1.2), [dog] {a|b} __x__ <lora:y:1> \\n"
    assert pair[0].decode(pair[0](text, add_special_tokens=False)["input_ids"]).replace(" ", "") == text.replace(
        " ", ""
    )
    assert pair[0]("CAT")["input_ids"] == pair[0]("cat")["input_ids"]
    assert count_tokens(pair[0], "cat " * 200) == 200
    assert count_tokens(pair[0], "") == 0


def test_data_file_is_complete() -> None:
    merges = tokenizers.sdxl_merges()
    vocabulary = tokenizers.vocabulary_of(merges)
    assert (len(merges), len(vocabulary)) == (48_894, 49_408)
    assert (vocabulary["!"], vocabulary["i"], vocabulary["in"], vocabulary["<|endoftext|>"]) == (0, 72, 512, 49407)


def test_toy_has_its_own(toy: SDXLModel) -> None:
    first, second = toy.tokenizers
    assert len(first) == len(second) == toy.configs["te1"]["vocab_size"]
    assert first.eos_token_id == len(first) - 1
    assert second.pad_token_id == 0


def test_vocabulary_that_nothing_fits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="No tokenizer for a text encoder with 1000 tokens.*config_dir"):
        tokenizers.load_tokenizers(None, None, (1000, 1000))
    folder = Path(shutil.copytree(SHIPPED["toy"] / "tokenizer", tmp_path / "tokenizer"))
    shutil.copytree(SHIPPED["toy"] / "tokenizer_2", tmp_path / "tokenizer_2")
    size = len(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))
    assert len(tokenizers.load_tokenizers(tmp_path, None, (size, size))[0]) == size
    with pytest.raises(ModelFileError, match=f"has {size} tokens, its text encoder {size - 1}"):
        tokenizers.load_tokenizers(tmp_path, None, (size - 1, size))


def test_emptied_tokenizer_folder_is_refused(tmp_path: Path) -> None:
    """transformers makes a 2-token tokenizer of such a folder without a word."""
    for name in ("tokenizer", "tokenizer_2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelFileError, match="has no vocabulary: vocab.json"):
        tokenizers.load_tokenizers(tmp_path, None, (49_408, 49_408))
