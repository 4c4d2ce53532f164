"""The coverage of a network as pixels: a box for each block, on the way from prompt to picture."""

from __future__ import annotations

from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ..networks.coverage import BlockCoverage, CoverageReport
from ..networks.targets import PART_LABELS, PART_ORDER

_BOX_W, _BOX_H, _GAP, _MARGIN, _TITLE = 92, 46, 8, 16, 24
_IN_A_ROW = 9
_PAPER, _INK = "#ffffff", "#30343b"
_FILLS = {"none": "#eceff2", "unknown": "#bcd7f0", "reached": "#b9e2c4", "unused": "#f4e3b2", "broken": "#f0b8b0"}
_WORDS = {
    "none": "no adapters",
    "unknown": "adapters",
    "reached": "learns",
    "unused": "not used by SDXL",
    "broken": "gets no gradient",
}


def coverage_picture(report: CoverageReport) -> Image.Image:
    """Boxes "block, adapters of layers" by part, coloured and labelled by state."""
    rows = [(part, _shown(report.part(part))) for part in PART_ORDER]
    height = _MARGIN * 2 + sum(_TITLE + _GAP + _lines_of(len(blocks)) * (_BOX_H + _GAP) for _, blocks in rows)
    picture = Image.new("RGB", (_MARGIN * 2 + _IN_A_ROW * (_BOX_W + _GAP), height), _PAPER)
    pen, y = ImageDraw.Draw(picture), _MARGIN
    for part, blocks in rows:
        total = sum(block.adapters for block in blocks)
        said = f"{total} adapters on {sum(block.layers for block in blocks)} layers" if total else "not trained"
        pen.text((_MARGIN, y), f"{PART_LABELS[part]}: {said}", fill=_INK, font=ImageFont.load_default(16))
        y += _TITLE
        for index, block in enumerate(blocks):
            column, line = index % _IN_A_ROW, index // _IN_A_ROW
            _box(pen, block, _MARGIN + column * (_BOX_W + _GAP), y + line * (_BOX_H + _GAP))
        y += _lines_of(len(blocks)) * (_BOX_H + _GAP) + _GAP
    return picture


def _shown(blocks: list[BlockCoverage]) -> list[BlockCoverage]:
    """A part without adapters needs no boxes."""
    return blocks if any(block.adapters for block in blocks) else []


def _lines_of(count: int) -> int:
    return -(-count // _IN_A_ROW)


def _box(pen: Any, block: BlockCoverage, x: int, y: int) -> None:
    pen.rounded_rectangle((x, y, x + _BOX_W, y + _BOX_H), 6, fill=_FILLS[block.state], outline="#9aa3ad")
    small, large = ImageFont.load_default(11), ImageFont.load_default(13)
    pen.text((x + 7, y + 4), block.block, fill=_INK, font=large)
    count = f"{block.adapters} of {block.layers}" if block.adapters else "none"
    pen.text((x + 7, y + 19), count, fill=_INK, font=small)
    if block.adapters:
        pen.text((x + 7, y + 31), _WORDS[block.state], fill=_INK, font=small)
