"""Preview pictures in the report: downsized, embedded, first and last side by side."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from .report_data import ReportData, Row
from .report_html import esc, plural

_SIDE = 448  # longest side of first and last picture, pixels
_SMALL_SIDE = 144  # and of those between
_MOST_PROMPTS = 24
_MOST_BETWEEN = 10

log = logging.getLogger(__name__)


def previews_html(data: ReportData) -> str:
    """One block a prompt: the first picture beside the last, the ones between behind a fold. Empty without previews."""
    by_prompt: dict[int, list[Row]] = {}
    for row in data.previews:
        by_prompt.setdefault(int(row["index"] or 0), []).append(row)
    if not by_prompt:
        return ""
    shown = sorted(by_prompt)[:_MOST_PROMPTS]
    blocks = "".join(_prompt_block(data, by_prompt[index]) for index in shown)
    left = len(by_prompt) - len(shown)
    note = f'<p class="hint">{plural(left, "prompt")} more: see the folder previews/.</p>' if left else ""
    return f'<div class="previews">{blocks}</div>{note}'


def _prompt_block(data: ReportData, rows: Sequence[Row]) -> str:
    rows = sorted(rows, key=lambda row: row["step"])
    prompt = str(rows[-1]["prompt"] or "")
    ends = [rows[0]] if len(rows) == 1 else [rows[0], rows[-1]]
    pictures = "".join(_figure(data, row, _label(row), _SIDE) for row in ends)
    between = _spread(rows[1:-1], _MOST_BETWEEN)
    fold = ""
    if between:
        small = "".join(_figure(data, row, f"step {row['step']}", _SMALL_SIDE) for row in between)
        head = (
            f"{len(between)} of {len(rows) - 2} pictures between"
            if len(between) < len(rows) - 2
            else (plural(len(between), "picture") + " between")
        )
        fold = f'<details><summary>{head}</summary><div class="strip">{small}</div></details>'
    title = esc(prompt) if prompt else "<em>empty prompt</em>"
    return (
        f'<section class="prompt"><h3>{title}</h3><p class="seed">seed {esc(rows[-1]["seed"])}</p>'
        f'<div class="pair">{pictures}</div>{fold}</section>'
    )


def _label(row: Row) -> str:
    return "before training" if row["step"] == 0 else f"after step {row['step']}"


def _spread(rows: Sequence[Row], most: int) -> list[Row]:
    """At most `most` rows, evenly spread."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _figure(data: ReportData, row: Row, label: str, side: int) -> str:
    picture = embedded(data.folder, str(row["file"]), side)
    if picture is None:
        return f'<figure><div class="gone">picture not found</div><figcaption>{esc(label)}</figcaption></figure>'
    address, width, height = picture
    spoken = esc(f"Preview {label}: {row['prompt']}")
    crisp = ' class="crisp"' if max(width, height) <= 128 else ""
    return (
        f'<figure><img{crisp} src="{address}" width="{width}" height="{height}" alt="{spoken}">'
        f"<figcaption>{esc(label)}</figcaption></figure>"
    )


def embedded(folder: Path, name: str, side: int) -> tuple[str, int, int] | None:
    """A picture of the run as a data address with its size, or None when it is missing, damaged or outside the folder.

    Tiny pictures stay PNG and are not enlarged; others become JPEG with a longest side of `side` pixels.
    """
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        log.warning("the report leaves out %s: it lies outside the run folder", name)
        return None
    try:
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
        kind = "png" if max(picture.size) <= 128 else "jpeg"
        picture.thumbnail((side, side), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        picture.save(buffer, format=kind, **({"quality": 88} if kind == "jpeg" else {"optimize": True}))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        log.warning("the report leaves out %s: %s", name, error)
        return None
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}", *picture.size
