"""Target rules: one line of words that says which layers, and what is different for them.

    IN07-IN08 cross rank=32 alpha=16        cross-attention of two blocks gets another rank
    te1 lr=0.5                              text encoder 1 learns at half its rate
    path:*.attn2.to_k,*.attn2.to_v dropout=0.1
    re:up_blocks\\.0\\..* rank=0             no adapters there

A rule is a list of selectors, which must all hold (alternatives after a comma), and settings `rank= alpha= dropout=
lr=`. Selectors: a part (unet, te1, te2), a block (IN04, MID, OUT00, a range IN04-IN08, `block:7` as kohya counts,
`layer:3` of a text encoder), a kind (see `layer_kinds.KINDS`), `path:GLOB` or `re:REGEX` on module paths or on names in
files. `*` selects everything. Where several rules hold for a layer, later settings win.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..errors import ConfigError, Problem
from .layer_kinds import KINDS, Place
from .targets import PART_ORDER

Matcher = Callable[[Place], bool]
SETTINGS = ("rank", "alpha", "dropout", "lr")
BLOCKS = (*(f"IN{i:02d}" for i in range(9)), "MID", *(f"OUT{i:02d}" for i in range(9)), "base")
_WORDS = ("*", *PART_ORDER, *KINDS, *BLOCKS)


@dataclass(frozen=True)
class Selector:
    """One selector of a rule as it was written, and its test."""

    text: str
    matches: Matcher


@dataclass(frozen=True)
class TargetRule:
    """A parsed rule. Settings that the rule leaves alone are None."""

    text: str
    selectors: tuple[Selector, ...]
    rank: int | None = None
    alpha: float | None = None
    dropout: float | None = None
    lr: float | None = None

    def matches(self, place: Place) -> bool:
        return all(selector.matches(place) for selector in self.selectors)


def parse_rules(lines: Sequence[str], field: str = "lora.targets") -> tuple[TargetRule, ...]:
    """Parse all rules.

    Raises:
        ConfigError: with every word nobody knows, and the nearest one that is known.
    """
    rules, problems = [], []
    for line in lines:
        try:
            rules.append(_parse(line))
        except _BadRuleError as error:
            problems.append(Problem(field, line, error.why, error.fix))
    if problems:
        raise ConfigError(problems)
    return tuple(rules)


class _BadRuleError(ValueError):
    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.why, self.fix = why, fix


def _parse(line: str) -> TargetRule:
    selectors: list[Selector] = []
    settings: dict[str, float] = {}
    for word in line.split():
        key, equals, value = word.partition("=")
        if equals and not word.startswith(("path:", "re:")):
            settings[key] = _number(key, value)
        else:
            selectors.append(_selector(word))
    if not selectors:
        raise _BadRuleError("it selects nothing", "Begin with a selector, such as '*' for everything.")
    rank = settings.get("rank")
    return TargetRule(
        line,
        tuple(selectors),
        rank=None if rank is None else int(rank),
        alpha=settings.get("alpha"),
        dropout=settings.get("dropout"),
        lr=settings.get("lr"),
    )


def _number(key: str, value: str) -> float:
    if key not in SETTINGS:
        raise _BadRuleError(f"'{key}' is no setting", _nearest(key, SETTINGS))
    try:
        number = float(value)
    except ValueError:
        raise _BadRuleError(f"'{value}' is no number", f"Write {key}=NUMBER.") from None
    whole = key != "rank" or number == int(number)
    if not (0 <= number < float("inf")) or not whole or (key == "dropout" and number >= 1):
        limits = {"rank": "a whole number from 0", "dropout": "from 0 to below 1"}.get(key, "0 or more")
        raise _BadRuleError(f"{key}={value} is not allowed", f"{key} must be {limits}.")
    return number


def _selector(word: str) -> Selector:
    if word.startswith("re:"):
        try:
            pattern = re.compile(word.removeprefix("re:"))
        except re.error as error:
            raise _BadRuleError(f"'{word}' is no regular expression ({error})", "Correct the expression.") from None
        return Selector(word, lambda place: any(pattern.search(text) for text in _texts(place)))
    if word.startswith("path:"):
        globs = word.removeprefix("path:").split(",")
        return Selector(word, lambda place: any(fnmatchcase(text, glob) for text in _texts(place) for glob in globs))
    tests = [_word(part) for part in word.split(",")]
    return Selector(word, lambda place: any(test(place) for test in tests))


def _texts(place: Place) -> tuple[str, str]:
    return place.target.path, place.target.name


def _word(word: str) -> Matcher:
    if word == "*":
        return lambda place: True
    if word in PART_ORDER:
        return lambda place: place.target.part == word
    if word in KINDS:
        return lambda place: word in place.kinds
    if match := re.fullmatch(r"(block|layer):(\d+)", word):
        return _numbered(match[1], int(match[2]))
    blocks = _block_range(word)
    return lambda place: place.target.part == "unet" and place.block in blocks


def _numbered(kind: str, number: int) -> Matcher:
    if kind == "layer":
        return lambda place: place.block == f"layer {number}"
    return lambda place: place.block_index == number


def _block_range(word: str) -> frozenset[str]:
    first, _, last = word.partition("-")
    ends = [_block(end) for end in (first, last or first)]
    low, high = sorted(BLOCKS.index(end) for end in ends)
    return frozenset(BLOCKS[low : high + 1])


def _block(word: str) -> str:
    upper = word.upper()
    if match := re.fullmatch(r"(IN|OUT)(\d)", upper):
        upper = f"{match[1]}0{match[2]}"
    found = "base" if upper == "BASE" else upper
    if found not in BLOCKS:
        raise _BadRuleError(f"'{word}' is no part, block or kind of layer", _nearest(word, _WORDS))
    return found


def _nearest(word: str, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, allowed, n=2, cutoff=0.4)
    hint = f"Did you mean {' or '.join(repr(name) for name in near)}? " if near else ""
    return f"{hint}Allowed: {', '.join(allowed)}."
