"""The smallest pieces of the report page: escaped text and readable numbers."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def esc(value: Any) -> str:
    """`value` as text that is safe in an element and in a quoted attribute. Control characters become a sign."""
    return html.escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(value)), quote=True)


def number(value: float | None) -> str:
    """Three significant digits, without an exponent where it is short: 0.0812, 123, 1.5e-05; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def duration(seconds: float | None) -> str:
    """Seconds in words: 48 s, 3 min 5 s, 2 h 4 min."""
    if seconds is None or not math.isfinite(seconds):
        return "an unknown time"
    whole = round(seconds)
    if whole < 60:
        return f"{number(seconds)} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(count: float | None) -> str:
    """Bytes in words: 812 bytes, 45 kB, 1.6 MB, 2.3 GB (powers of 1000)."""
    if count is None:
        return "an unknown size"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{number(count / factor)} {unit}"
    return f"{count:.0f} bytes"


def plural(count: int, one: str, many: str | None = None) -> str:
    """`1 step`, `3 steps`."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def listing(words: Sequence[str], most: int = 5) -> str:
    """`a, b and c`; `a, b, c and 7 more`."""
    if not words:
        return ""
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
