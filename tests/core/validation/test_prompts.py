from __future__ import annotations

from pathlib import Path

import pytest

from trainer_core.config import PreviewConfig
from trainer_core.errors import ConfigError
from trainer_core.validation import SizeRule, parse_prompt_line, prompt_problems, read_prompts
from trainer_core.validation.prompts import SAMPLER_NAMES

SDXL = SizeRule(native=1024, multiple=32)
CONFIG = PreviewConfig(sampler="euler", steps=25, guidance=6.0, negative="blurry", seed=10)


def parse(line: str, index: int = 0, rule: SizeRule = SDXL):  # noqa: ANN201
    return parse_prompt_line(line, CONFIG, rule, index=index)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a cat", {"text": "a cat", "negative": "blurry", "width": 1024, "height": 1024, "steps": 25, "seed": 10}),
        ("a cat --n bad --w 512 --h 768", {"text": "a cat", "negative": "bad", "width": 512, "height": 768}),
        ("a cat --W 512 --S 3 --L 2.5 --D 7", {"width": 512, "steps": 3, "guidance": 2.5, "seed": 7}),
        ("a cat --ss k_euler_a", {"sampler": "euler_a"}),
        ("a cat --ss DPM++ 2M", {"sampler": "dpmpp_2m"}),
        ("a cat --SS DDIM --s 1000", {"sampler": "ddim", "steps": 1000}),
        ("a well--known cat-like thing", {"text": "a well--known cat-like thing"}),
        ("--n only negative", {"text": "", "negative": "only negative"}),
        ("a cat --n ", {"negative": ""}),
        ("  a cat   --d   5  ", {"text": "a cat", "seed": 5}),
        ("a cat --l 0", {"guidance": 0.0}),
        ("猫 が いる --n だめ", {"text": "猫 が いる", "negative": "だめ"}),
    ],
)
def test_lines(line: str, expected: dict[str, object]) -> None:
    prompt, warnings = parse(line)
    assert {key: getattr(prompt, key) for key in expected} == expected
    assert warnings == []


def test_prompts_without_a_seed_get_fixed_different_ones() -> None:
    assert [parse("a cat", index)[0].seed for index in (0, 1, 2)] == [10, 11, 12]


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("a cat --w 1000 --h 1023", (992, 992)),
        ("a cat --w 8 --h 64", (32, 64)),
        ("a cat --w 520", (512, 1024)),
    ],
)
def test_sizes_are_rounded_down_with_a_warning(line: str, made: tuple[int, int]) -> None:
    prompt, warnings = parse(line)
    assert (prompt.width, prompt.height) == made
    assert len(warnings) == 1
    assert f"{made[0]}x{made[1]} instead of" in warnings[0]
    assert "multiples of 32" in warnings[0]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a cat --x 3", "'--x' is no preview flag"),
        ("a cat --width 3", "'--width' is no preview flag"),
        ("a cat --w wide", "the width must be a whole number from 8 to 8192"),
        ("a cat --w", "the width must be"),
        ("a cat --s 0", "the number of sampling steps must be a whole number from 1 to 1000"),
        ("a cat --s 1001", "sampling steps"),
        ("a cat --l nan", "the guidance scale must be a number from 0"),
        ("a cat --l inf", "guidance"),
        ("a cat --d -1", "the seed must be"),
        ("a cat --ss heun", "the sampler 'heun' is not supported"),
        ("a cat --g 3.5", "has no meaning for SDXL"),
        ("a cat --cn control.png", "has no meaning for SDXL"),
        ("a cat --s 3 --s 4", "given twice"),
        ("a cat -- 3", "is no preview flag"),
    ],
)
def test_bad_flags_are_named(line: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(line)
    assert len(caught.value.problems) == 1
    assert why in caught.value.problems[0].why
    assert caught.value.problems[0].fix


def test_a_misspelt_flag_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean --w"):
        parse("a cat --width 512")


def test_all_problems_of_all_lines_come_at_once(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a dog --ss nothing\n", encoding="utf-8")
    config = PreviewConfig(prompts=("a cat --x 1 --w no", "fine", "a cat --s 0"), prompt_file=str(file))
    problems = prompt_problems(config)
    assert [problem.field for problem in problems] == ["preview.prompts"] * 3 + ["preview.prompt_file"]
    assert prompt_problems(PreviewConfig(prompts=("a cat --w 30",))) == []


def test_prompt_file_with_comments_blank_lines_and_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeff# first\na cat\n\n  # second\na dog --d 3\r\n".encode())
    prompts, warnings = read_prompts(PreviewConfig(prompts=("# no", "a bird"), prompt_file=str(file)), SDXL)
    assert [prompt.text for prompt in prompts] == ["a bird", "a cat", "a dog"]
    assert [prompt.seed for prompt in prompts] == [0, 1, 3]
    assert warnings == []


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("missing.txt", None, "cannot be read"),
        ("latin.txt", b"caf\xe9", "not UTF-8"),
        ("prompts.json", b"[]", "are not read"),
    ],
)
def test_unusable_prompt_files_are_named(tmp_path: Path, name: str, content: bytes | None, why: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    problems = prompt_problems(PreviewConfig(prompt_file=str(tmp_path / name)))
    assert [problem.field for problem in problems] == ["preview.prompt_file"]
    assert why in problems[0].why


def test_every_sampler_of_the_config_is_understood() -> None:
    from dataclasses import fields

    choices = next(f for f in fields(PreviewConfig) if f.name == "sampler").metadata["choices"]
    assert set(choices) == set(SAMPLER_NAMES.values())
