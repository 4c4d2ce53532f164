"""The report's section on gradient health: the table of the newest full measurement, by module group."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..errors import TrainerError
from ..runs.record import open_readonly
from .report_html import esc, number

_COLUMNS = (
    ("a_norm", "norm A"),
    ("b_norm", "norm B"),
    ("update_ratio", "update / weight"),
    ("rms", "RMS"),
    ("q", "q"),
    ("clip_ratio", "clipped"),
    ("rejected_ratio", "rejected"),
)
_SHARES = ("clip_ratio", "rejected_ratio")

Row = dict[str, Any]


def health_html(folder: Path) -> str:
    """The section; empty where the run measured nothing."""
    try:
        with open_readonly(folder / "run.db") as record:
            rows = record.health()
    except TrainerError:
        return ""  # the rest of the report says what is wrong with the record
    if not rows:
        return ""
    last = rows[-1]["step"]
    groups = [row["data"] for row in rows if row["step"] == last]
    ill = [row for row in groups if row.get("verdict") != "HEALTHY"]
    titles = ("group", *(title for _, title in _COLUMNS), "verdict")
    head = "".join(f'<th scope="col">{esc(title)}</th>' for title in titles)
    body = "".join(_line(row) for row in groups)
    said = dict.fromkeys(str(row["sentence"]) for row in ill if row.get("sentence"))
    words = "".join(f"<li>{esc(text)}</li>" for text in said)
    state = "All groups are healthy." if not ill else f"{len(ill)} of {len(groups)} groups are not healthy."
    return (
        f"<p>Measured at step {last}. {state} Norms are of gradients before clipping; A is lora_down, B lora_up; RMS "
        "is the gradient in units of what the optimizer expects; q compares how much B and A move the layer (powers of "
        "ten); shares are of the epoch.</p>"
        f"{f'<ul>{words}</ul>' if words else ''}"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _line(row: Row) -> str:
    cells = "".join(f"<td>{esc(_value(name, row.get(name)))}</td>" for name, _ in _COLUMNS)
    return f'<tr><th scope="row">{esc(row.get("name", ""))}</th>{cells}<td>{esc(row.get("verdict", ""))}</td></tr>'


def _value(name: str, value: Any) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    return f"{value:.0%}" if name in _SHARES else number(value)
