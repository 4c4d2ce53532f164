"""One sheet of many pictures, with words over the columns and beside the rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_GAP, _HEAD, _LETTERS = 6, 30, 60
_PAPER, _INK = "#ffffff", "#30343b"
_SIDE = 320


def contact_sheet(files: Sequence[Path], *, columns: Sequence[str], rows: Sequence[str]) -> Any:
    """`files`: column after column, rows in order. Pictures larger than 320 pixels are made smaller."""
    from PIL import Image, ImageDraw, ImageFont

    pictures: list[Any] = []
    for file in files:
        with Image.open(file) as opened:
            picture = opened.convert("RGB")
            picture.thumbnail((_SIDE, _SIDE))
            pictures.append(picture)
    wide = max(160, *(picture.width for picture in pictures))
    high = max(picture.height for picture in pictures)
    sheet = Image.new(
        "RGB", (len(columns) * (wide + _GAP) + _GAP, _HEAD + len(rows) * (high + _HEAD + _GAP) + _GAP), _PAPER
    )
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for c, label in enumerate(columns):
        pen.text((_GAP + c * (wide + _GAP), 8), label, fill=_INK, font=font)
        for r in range(len(rows)):
            place = (_GAP + c * (wide + _GAP), _HEAD + r * (high + _HEAD + _GAP))
            sheet.paste(pictures[c * len(rows) + r], place)
    for r, row in enumerate(rows):
        short = row if len(row) <= _LETTERS else row[: _LETTERS - 1] + "…"
        pen.text((_GAP, _HEAD + r * (high + _HEAD + _GAP) + high + 6), short, fill=_INK, font=font)
    return sheet
