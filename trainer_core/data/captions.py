"""From the caption in the file to the caption that is trained: prefix, dropout, wildcards, shuffle, tag dropout.

Plain text by default: with every option off the caption reaches the tokenizer as it was written. All random choices
come from one `random.Random` that the caller seeds for the sample (`caption_stream`), so a caption is a pure function
of seed, epoch and sample. `compat="kohya"` follows sd-scripts' pipeline to the letter (facts: sd-scripts
`library/train_util.py`, `BaseDataset.process_caption`); the default pipeline differs where that one surprises:
prefix and suffix stay in place, tags are joined with the set separator, and all lines are used.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from ..config import DatasetConfig
from ..draws import Draws

COMPAT_MODES = ("none", "kohya")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionRules:
    """Options of the caption pipeline; one value is shared by all pictures of a data set.

    `token_warmup_step` below 1 is a share of the run. `dropout_every_n_epochs` counts epochs from 1; 0 = off.
    """

    prefix: str = ""
    suffix: str = ""
    dropout: float = 0.0
    dropout_every_n_epochs: int = 0
    wildcards: bool = False
    shuffle: bool = False
    keep_tokens: int = 0
    keep_tokens_separator: str = ""
    separator: str = ","
    secondary_separator: str = ""
    tag_dropout: float = 0.0
    token_warmup_min: int = 1
    token_warmup_step: float = 0.0
    compat: str = "none"

    @classmethod
    def from_config(cls, dataset: DatasetConfig) -> CaptionRules:
        """The rules of a data set's section."""
        return cls(
            prefix=dataset.caption_prefix,
            suffix=dataset.caption_suffix,
            dropout=dataset.caption_dropout,
            dropout_every_n_epochs=dataset.caption_dropout_every_n_epochs,
            wildcards=dataset.wildcards,
            shuffle=dataset.shuffle_caption,
            keep_tokens=dataset.keep_tokens,
            keep_tokens_separator=dataset.keep_tokens_separator,
            separator=dataset.caption_separator,
            secondary_separator=dataset.secondary_separator,
            tag_dropout=dataset.tag_dropout,
            token_warmup_min=dataset.token_warmup_min,
            token_warmup_step=dataset.token_warmup_step,
            compat=dataset.compat,
        )

    @property
    def keeps_lines(self) -> bool:
        """Whether line ends of a caption file carry meaning (kohya's first line, a wildcard's choice of lines)."""
        return self.wildcards or self.compat == "kohya"

    @property
    def open_ended(self) -> bool:
        """Whether a caption has too many variants to encode all of them beforehand."""
        return self.wildcards or self.shuffle or self.tag_dropout > 0 or self.token_warmup_step > 0

    @property
    def untouched(self) -> bool:
        """Whether a caption that is not dropped is trained as it stands."""
        changed = self.prefix or self.suffix or self.secondary_separator or self.compat != "none"
        return not changed and not self.open_ended

    @property
    def may_be_empty(self) -> bool:
        """Whether the empty caption can occur by dropout."""
        return self.dropout > 0 or self.dropout_every_n_epochs > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionMoment:
    """Where in the run a caption is made: epoch from 0, applied step from 0, planned steps (for token warm-up)."""

    epoch: int = 0
    step: int = 0
    total_steps: int = 0


def caption_stream(draws: Draws, epoch: int, sample: str) -> random.Random:
    """The stream of all random choices of one sample's caption in one epoch."""
    return random.Random(int(draws.generator(epoch, sample, "caption").integers(0, 2**63)))


def process_caption(
    caption: str, rules: CaptionRules, stream: random.Random, moment: CaptionMoment = CaptionMoment()
) -> str:
    """The caption as it is trained. `stream` is used only by options that are on."""
    if rules.compat == "kohya":
        return _process_kohya(caption, rules, stream, moment)
    if _dropped(rules, stream, moment.epoch + 1):
        return ""
    if rules.wildcards:
        caption = expand_wildcards(_choose_line(caption, stream), stream)
    if rules.open_ended and _wants_tags(rules):
        caption = _join_tags(_rearranged(caption, rules, stream, moment, kept_empty=False), rules)
    if rules.secondary_separator:
        caption = caption.replace(rules.secondary_separator, rules.separator)
    return " ".join(part for part in (rules.prefix, caption, rules.suffix) if part)


def fixed_captions(caption: str, rules: CaptionRules) -> tuple[str, ...] | None:
    """All captions that can come of this one, or None when they are too many to list (`rules.open_ended`)."""
    if rules.open_ended:
        return None
    if rules.untouched:
        return (caption, "") if rules.may_be_empty and caption else (caption,)
    plain = CaptionRules(
        prefix=rules.prefix,
        suffix=rules.suffix,
        separator=rules.separator,
        secondary_separator=rules.secondary_separator,
        compat=rules.compat,
    )
    text = process_caption(caption, plain, random.Random(0))
    return (text, "") if rules.may_be_empty and text else (text,)


def _process_kohya(caption: str, rules: CaptionRules, stream: random.Random, moment: CaptionMoment) -> str:
    """sd-scripts' order; `moment.epoch` is its epoch number as it stands (0 before the first collate)."""
    if rules.prefix:
        caption = f"{rules.prefix} {caption}"
    if rules.suffix:
        caption = f"{caption} {rules.suffix}"
    if _dropped(rules, stream, moment.epoch):
        return ""
    chosen = _choose_line(caption, stream) if rules.wildcards else caption.split("\n")[0]
    caption = expand_wildcards(chosen, stream) if rules.wildcards else chosen
    if _wants_tags(rules):
        # always a comma, whatever the separator is: sd-scripts joins this way and its golden numbers say so
        caption = ", ".join(_rearranged(caption, rules, stream, moment, kept_empty=True))
    if rules.secondary_separator:
        caption = caption.replace(rules.secondary_separator, rules.separator)
    return caption


def _dropped(rules: CaptionRules, stream: random.Random, epoch_number: int) -> bool:
    by_chance = rules.dropout > 0 and stream.random() < rules.dropout
    every = rules.dropout_every_n_epochs
    return by_chance or (every > 0 and epoch_number % every == 0)


def _wants_tags(rules: CaptionRules) -> bool:
    return rules.shuffle or rules.tag_dropout > 0 or rules.token_warmup_step > 0


def _choose_line(caption: str, stream: random.Random) -> str:
    lines = caption.split("\n")
    return stream.choice(lines) if len(lines) > 1 else lines[0]


_CHOICE = re.compile(r"\{([^{}]+)\}")
_OPEN, _CLOSE = "\ue000", "\ue001"  # private-use characters stand for escaped braces while choices are made


def expand_wildcards(text: str, stream: random.Random) -> str:
    """`{a|b|c}` becomes one of its words; `{{` and `}}` are plain braces."""
    text = text.replace("{{", _OPEN).replace("}}", _CLOSE)
    text = _CHOICE.sub(lambda match: stream.choice(match.group(1).split("|")), text)
    return text.replace(_OPEN, "{").replace(_CLOSE, "}")


def _tags(text: str, separator: str) -> list[str]:
    return [tag.strip() for tag in text.strip().split(separator)]


def _split_fixed(caption: str, rules: CaptionRules, *, kept_empty: bool) -> tuple[list[str], list[str], list[str]]:
    """(front that stays, tags that move, end that stays)."""
    mark = rules.keep_tokens_separator
    if mark and mark in caption:
        parts = caption.split(mark, 2) + ["", ""]
        front, flexible, end = ([tag for tag in _tags(part, rules.separator) if tag] for part in parts[:3])
        return front, flexible, end
    tags = _tags(caption, rules.separator)
    if not kept_empty:
        tags = [tag for tag in tags if tag]
    return tags[: rules.keep_tokens], tags[rules.keep_tokens :], []


def _rearranged(
    caption: str, rules: CaptionRules, stream: random.Random, moment: CaptionMoment, *, kept_empty: bool
) -> list[str]:
    """Tags after token warm-up, shuffle and tag dropout, in that order."""
    front, flexible, end = _split_fixed(caption, rules, kept_empty=kept_empty)
    warm = rules.token_warmup_step
    warm_steps = math.floor(warm * moment.total_steps) if 0 < warm < 1 else warm
    if warm_steps > 0 and moment.step < warm_steps:
        grown = moment.step * (len(flexible) - rules.token_warmup_min) / warm_steps
        flexible = flexible[: math.floor(grown) + rules.token_warmup_min]
    if rules.shuffle:
        stream.shuffle(flexible)
    if rules.tag_dropout > 0:
        flexible = [tag for tag in flexible if stream.random() >= rules.tag_dropout]
    return front + flexible + end


def _join_tags(tags: list[str], rules: CaptionRules) -> str:
    separator = rules.separator
    return (separator if separator.isspace() or not separator else f"{separator} ").join(tags)
