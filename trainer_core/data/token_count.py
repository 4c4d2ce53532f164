"""How many tokens a caption has: exactly with the model's tokenizers, as a lower bound without."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

_WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)|[^\W\d_]+|\d|(?:[^\w\s]|_)+", re.IGNORECASE)

TokenCounter = Callable[[str], int]


def least_tokens(caption: str) -> int:
    """Lower bound of CLIP tokens: its pre-tokenizer never joins words, digits and signs."""
    return len(_WORDS.findall(caption))


def token_counter(tokenizers: Sequence[Any] | None) -> tuple[TokenCounter, bool]:
    """(counter of tokens without start and end mark, whether it is exact). Several tokenizers: the larger count."""
    if not tokenizers:
        return least_tokens, False

    def count(caption: str) -> int:
        return max(
            len(tokenizer(caption, truncation=False, add_special_tokens=False, verbose=False).input_ids)
            for tokenizer in tokenizers
        )

    return count, True
