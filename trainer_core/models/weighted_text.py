r"""Weights in captions as AUTOMATIC1111's web UI writes them, for `dataset.weighted_captions`.

`(word)` weighs 1.1, `[word]` 1 / 1.1, `(word:1.3)` 1.3; nested ones multiply; `\(`, `\)`, `\[`, `\]`, `\\` are plain
characters; what is not closed counts to the end. As in sd-scripts, a token's hidden state of both encoders is
multiplied with its weight, nothing is normalised afterwards, and the pooled vector carries no weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROUND = 1.1
_SQUARE = 1 / 1.1
_CLOSING = {")": ("(", _ROUND), "]": ("[", _SQUARE)}
_WORDS = re.compile(r"\\[()\[\]\\]|:([+-]?(?:\d+\.?\d*|\.\d+))\)|[^\\()\[\]:]+|.", re.DOTALL)


def parse_weights(text: str) -> list[tuple[str, float]]:
    """Pieces of `text` with their weights, in order; neighbours of equal weight are one piece."""
    pieces: list[tuple[str, float]] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}

    def close(kind: str, weight: float) -> None:
        start = opened[kind].pop()
        pieces[start:] = [(piece, own * weight) for piece, own in pieces[start:]]

    for match in _WORDS.finditer(text):
        word, given = match[0], match[1]
        closing = ("(", float(given)) if given else _CLOSING.get(word)
        if word in opened:
            opened[word].append(len(pieces))
        elif closing and opened[closing[0]]:
            close(*closing)
        else:
            escaped = len(word) == 2 and word[0] == "\\"
            pieces.append((word[1:] if escaped else word, 1.0))
    for kind, weight in _CLOSING.values():
        while opened[kind]:
            close(kind, weight)
    return _merged(pieces)


def _merged(pieces: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    merged: list[tuple[str, float]] = []
    for piece, weight in pieces:
        if merged and merged[-1][1] == weight:
            merged[-1] = (merged[-1][0] + piece, weight)
        else:
            merged.append((piece, weight))
    return merged


def weighted_rows(
    tokenizer: PreTrainedTokenizerBase, captions: Sequence[str], length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and weights, both (B, length): start, the pieces' tokens as far as they fit, end, padding."""
    rows, weights = [], []
    begin: Any = tokenizer.bos_token_id
    end: Any = tokenizer.eos_token_id
    pad: Any = tokenizer.pad_token_id
    for caption in captions:
        ids: list[int] = []
        own: list[float] = []
        for piece, weight in parse_weights(caption):
            found: Any = tokenizer(piece, add_special_tokens=False, truncation=False, verbose=False)
            ids += found["input_ids"]
            own += [weight] * len(found["input_ids"])
        ids, own = ids[: length - 2], own[: length - 2]
        spare = length - 2 - len(ids)
        rows.append([begin, *ids, end, *[pad] * spare])
        weights.append([1.0, *own, *[1.0] * (spare + 1)])
    return torch.tensor(rows), torch.tensor(weights)
