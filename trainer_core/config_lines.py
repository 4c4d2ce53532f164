"""Settings written as lines of text, `section.field = value`, with values as on the command line."""

from __future__ import annotations

from typing import Any

from .config_fields import FIELDS, BadValue, coerce, did_you_mean
from .errors import Problem


def read_lines(text: str) -> tuple[dict[str, Any], list[Problem]]:
    """Settings by `section.field`, and everything that is wrong. Empty lines and comments (#) are passed over."""
    settings: dict[str, Any] = {}
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals or key not in FIELDS:
            fix = did_you_mean(key, FIELDS, "Write section.field = value; docs/configuration.md has all names.")
            why = "there is no such setting" if equals else "is no setting"
            problems.append(Problem(f"line {number}", line, why, fix))
            continue
        try:
            settings[key] = coerce(FIELDS[key], value.strip("\"'"), text=True)
        except BadValue as bad:
            problems.append(Problem(key, value, bad.why, bad.fix))
    return settings, problems
