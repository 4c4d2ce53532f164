"""Reading JSON and TOML that others wrote.

Two faults of such files are no error to Python's own readers, or one of a kind that nobody expects: an object that
names a key twice loses one of its values without a word, and brackets nested a thousand deep raise `RecursionError`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. ValueError when it is none, is nested too deeply, or names a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text. ValueError when it is none or is nested too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set[str]()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice!r} stands in it twice")
    return found
