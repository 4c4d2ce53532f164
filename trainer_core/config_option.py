"""One config field: its default and what a person needs to know about it."""

from __future__ import annotations

from dataclasses import field
from typing import Any

STEPS_OR_SHARE = "steps or share"
"""Unit of fields that count steps, take a share below 1 of the run, or per cent as text ("10%")."""


def option(
    default: Any,
    help: str,  # noqa: A002 - the word that argparse and node schemas use too
    *,
    min: float | None = None,  # noqa: A002
    max: float | None = None,  # noqa: A002
    choices: tuple[Any, ...] = (),
    unit: str = "",
    advanced: bool = False,
) -> Any:
    """A field with its default and what a person needs to know about it."""
    metadata = {"help": help, "min": min, "max": max, "choices": choices, "unit": unit, "advanced": advanced}
    return field(default=default, metadata=metadata)
