"""The caption pipeline: kohya's golden results, our own rules, and the kind of reports about captions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer_core.data import CaptionMoment, CaptionRules, ScanReport, caption_stream, fixed_captions, process_caption
from trainer_core.data.caption_files import CaptionError, decode_caption
from trainer_core.data.token_count import least_tokens, token_counter
from trainer_core.draws import Draws
from trainer_core.errors import DatasetError

from .test_kind_pictures import png, write

Scan = Callable[..., ScanReport]
GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "fixtures" / "kohya_golden.json").read_text())[
    "captions"
]
NAMES = {
    "shuffle_caption": "shuffle",
    "caption_tag_dropout_rate": "tag_dropout",
    "enable_wildcard": "wildcards",
    "caption_prefix": "prefix",
    "caption_suffix": "suffix",
    "caption_dropout_rate": "dropout",
    "caption_dropout_every_n_epochs": "dropout_every_n_epochs",
    "caption_separator": "separator",
}


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row["out"] or "empty")
def test_golden_captions(row: dict[str, Any]) -> None:
    options = dict(row["opts"])
    moment = CaptionMoment(
        epoch=options.pop("epoch", 0), step=options.pop("step", 0), total_steps=options.pop("mts", 0)
    )
    rules = CaptionRules(compat="kohya", **{NAMES.get(name, name): value for name, value in options.items()})
    assert process_caption(row["caption"], rules, random.Random(row["seed"]), moment) == row["out"]


def test_there_are_16_golden_captions() -> None:
    assert len(GOLDEN) == 16


TAGS = "aaa, bbb, ccc, ddd, eee, fff"


def test_plain_by_default() -> None:
    text = "(word:1.3), [less] {a|b} __x__  \\ ||| ;;; <lora:x:1>"
    assert process_caption(text, CaptionRules(), random.Random(0)) == text


def test_prefix_stays_in_front_when_tags_are_shuffled() -> None:
    rules = CaptionRules(prefix="sks", suffix="end", shuffle=True)
    for seed in range(20):
        words = process_caption(TAGS, rules, random.Random(seed))
        assert words.startswith("sks ")
        assert words.endswith(" end")
        assert sorted(words[4:-4].split(", ")) == TAGS.split(", ")


def test_tags_are_joined_with_the_set_separator() -> None:
    rules = CaptionRules(shuffle=True, separator=";", keep_tokens=1)
    assert process_caption("a; b;; c", rules, random.Random(1)) in ("a; b; c", "a; c; b")


def test_dropout_share_and_every_n_epochs() -> None:
    draws = Draws(3)
    rules = CaptionRules(dropout=0.3)
    texts = [process_caption(TAGS, rules, caption_stream(draws, 0, str(n))) for n in range(1000)]
    assert 240 < texts.count("") < 360
    every = CaptionRules(dropout_every_n_epochs=3)
    found = [process_caption(TAGS, every, random.Random(0), CaptionMoment(epoch=e)) for e in range(6)]
    assert [text == "" for text in found] == [False, False, True, False, False, True]


def test_tag_warm_up_reaches_all_tags() -> None:
    rules = CaptionRules(token_warmup_step=10, token_warmup_min=1)
    counts = [len(process_caption(TAGS, rules, random.Random(0), CaptionMoment(step=s)).split(", ")) for s in range(12)]
    assert counts[0] == 1
    assert counts == sorted(counts)
    assert counts[10:] == [6, 6]


def test_kind_determinism_captions_are_a_function_of_seed_epoch_and_sample() -> None:
    rules = CaptionRules(shuffle=True)
    one = process_caption(TAGS, rules, caption_stream(Draws(1), 2, "key"))
    assert one == process_caption(TAGS, rules, caption_stream(Draws(1), 2, "key"))
    others = {process_caption(TAGS, rules, caption_stream(Draws(1), epoch, "key")) for epoch in range(8)}
    assert len(others) > 4


def test_fixed_captions_lists_what_can_occur() -> None:
    assert fixed_captions("a", CaptionRules(prefix="p")) == ("p a",)
    assert fixed_captions("a", CaptionRules(dropout=0.1)) == ("a", "")
    assert fixed_captions("a", CaptionRules(shuffle=True)) is None


# ------------------------------------------------------------------ files
def test_kind_caption_encodings_by_mark_or_setting() -> None:
    text = "caf\u00e9, \u82b1 \U0001f431"
    for codec in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        assert decode_caption(text.encode(codec), "a.txt", None).joined == text, codec
    assert decode_caption("\u82b1".encode("gbk"), "a.txt", "gbk").joined == "\u82b1"
    # a mark wins over the setting: one such file in a set of GBK files is read right
    assert decode_caption("\u82b1".encode("utf-8-sig"), "a.txt", "gbk").joined == "\u82b1"


def test_kind_caption_wrong_encoding_names_file_and_byte() -> None:
    with pytest.raises(CaptionError, match="cp.txt is not utf-8: byte 0x92 at position 7"):
        decode_caption("the cat\u2019s".encode("cp1252"), "cp.txt", None)
    with pytest.raises(CaptionError, match="looks like UTF-16 without"):
        decode_caption("plain words".encode("utf-16-le"), "u.txt", None)
    with pytest.raises(CaptionError, match="'klingon' is no encoding"):
        decode_caption(b"a", "a.txt", "klingon")


def test_kind_caption_bad_encoding_leaves_the_picture_out_by_name(cases: dict[str, Any], scan: Scan) -> None:
    folder = cases["caption_legacy_encoding"].data
    with pytest.raises(DatasetError, match="gbk.txt is not utf-8: byte 0x.. at position 2"):
        scan(folder)
    report = scan(folder, caption_encoding="cp1252")
    assert {item.file: item.caption for item in report.items}["cp1252.png"] == "the cat\u2019s hat"


def test_kind_caption_second_ending_is_used_when_the_first_has_none(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "a.png", png())
    write(tmp_path, "a.CAPTION", b"words")
    assert scan(tmp_path).items[0].caption == "words"
    write(tmp_path, "b.png", png(64, 64, (1, 1, 1)))
    write(tmp_path, "b.txt", b"others")
    report = scan(tmp_path)
    assert [item.caption for item in report.items] == ["", "others"]
    assert any("a.CAPTION" in warning for warning in report.warnings)


def test_kind_caption_default_for_pictures_without(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "a.png", png())
    report = scan(tmp_path, default_caption="a thing")
    assert report.items[0].caption == "a thing"
    assert "trained with 'a thing'" in report.warnings[0]


def test_kind_caption_names_in_two_unicode_forms(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "caf\u00e9.png", png())  # composed, as Windows and Linux write it
    write(tmp_path, "cafe\u0301.txt", b"coffee")  # decomposed, as macOS does
    assert scan(tmp_path).items[0].caption == "coffee"


def test_kind_caption_stem_in_other_case(tmp_path: Path, scan: Scan) -> None:
    write(tmp_path, "IMG_1.PNG", png())
    write(tmp_path, "img_1.txt", b"words")
    assert scan(tmp_path).items[0].caption == "words"


class Words:
    """A tokenizer with one token a letter."""

    def __call__(self, text: str, **_: Any) -> Any:
        return type("Encoded", (), {"input_ids": list(text)})


def test_kind_caption_long_ones_are_counted_and_named(cases: dict[str, Any], scan: Scan) -> None:
    folder = cases["caption_long"].data
    for limit, count in ((75, 4), (150, 2), (225, 1)):
        report = scan(folder, max_token_length=limit)
        long = [item.file for item in report.items if any("too long" in warning for warning in item.warnings)]
        assert len(long) == count
        line = next(warning for warning in report.warnings if "token" in warning)
        assert all(file in line for file in long)


def test_token_counts_are_exact_with_tokenizers_and_never_too_high_without() -> None:
    count, exact = token_counter([Words()])
    assert (count("abc"), exact) == (3, True)
    assert least_tokens("the cat's hat, 42 times!") == 9
    assert token_counter(None)[1] is False
