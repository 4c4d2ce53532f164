"""The coverage report as a picture: prompt -> text encoders -> cross-attention -> UNet blocks."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .coverage import BlockCoverage, CoverageReport

_COLOURS = {
    "none": ("#e5e7eb", "#6b7280"),
    "unknown": ("#dbeafe", "#1e3a8a"),
    "reached": ("#bbf7d0", "#14532d"),
    "unused": ("#fef3c7", "#78350f"),
    "broken": ("#fca5a5", "#7f1d1d"),
}
_LEGEND = {
    "reached": "learns",
    "unused": "not used by SDXL",
    "none": "no adapters",
    "unknown": "not probed",
    "broken": "broken: no gradient",
}
_WIDTH, _HEIGHT = 880, 290
_BOX = 40


@dataclass(frozen=True)
class _Box:
    x: int
    y: int
    width: int
    height: int
    label: str
    state: str
    title: str

    def svg(self) -> str:
        fill, ink = _COLOURS[self.state]
        lines = self.label.split("\n")
        middle = self.y + self.height / 2 - 7 * (len(lines) - 1)
        texts = "".join(
            f'<text x="{self.x + self.width / 2}" y="{middle + 14 * i + 4}" fill="{ink}" text-anchor="middle">'
            f"{escape(line)}</text>"
            for i, line in enumerate(lines)
        )
        return (
            f'<g class="{self.state}"><title>{escape(self.title)}</title><rect x="{self.x}" y="{self.y}" rx="4" '
            f'width="{self.width}" height="{self.height}" fill="{fill}" stroke="{ink}"/>{texts}</g>'
        )


def coverage_svg(report: CoverageReport) -> str:
    """A self-contained SVG; every box has a tooltip with its numbers."""
    blocks = {block.block: block for block in report.part("unet")}
    boxes = [_Box(10, 130, 70, 44, "prompt", "none", "the caption")]
    boxes += [_encoder_box(report, "te1", 110, 80), _encoder_box(report, "te2", 110, 180)]
    cross = _cross_state(report)
    boxes.append(_Box(270, 130, 90, 44, "cross-\nattention", cross, "where the prompt enters the UNet"))
    # The UNet lies on its side: input blocks left to right, the middle, output blocks back from right to left.
    for i in range(9):
        boxes.append(_unet_box(blocks.get(f"IN{i:02d}"), f"IN{i:02d}", _unet_x(i), 70))
        boxes.append(_unet_box(blocks.get(f"OUT{i:02d}"), f"OUT{i:02d}", _unet_x(8 - i), 190))
    boxes.append(_unet_box(blocks.get("MID"), "MID", _unet_x(9), 130))
    arrows = [
        _arrow(80, 152, 110, 104, _worst(report, "te1")),
        _arrow(80, 152, 110, 202, _worst(report, "te2")),
        _arrow(230, 104, 270, 146, _worst(report, "te1")),
        _arrow(230, 202, 270, 158, _worst(report, "te2")),
        _arrow(360, 152, _unet_x(9), 152, cross),
        _arrow(_unet_x(8) + _BOX, 90, _unet_x(9) + 20, 130, blocks["MID"].state if "MID" in blocks else "none"),
        _arrow(_unet_x(9) + 20, 172, _unet_x(8) + _BOX, 210, blocks["OUT00"].state if "OUT00" in blocks else "none"),
    ]
    return _document("".join(arrows) + "".join(box.svg() for box in boxes) + _legend())


def _unet_x(column: int) -> int:
    return 400 + 46 * column


def _encoder_box(report: CoverageReport, part: str, x: int, y: int) -> _Box:
    rows = report.part(part)
    adapters, layers = sum(row.adapters for row in rows), sum(row.layers for row in rows)
    name = {"te1": "text encoder 1", "te2": "text encoder 2"}[part]
    title = "; ".join(f"{row.block}: {_numbers(row)}" for row in rows if row.adapters) or "no adapters"
    return _Box(x, y, 120, 44, f"{name}\n{adapters} of {layers}", _worst(report, part), title)


def _unet_box(block: BlockCoverage | None, label: str, x: int, y: int) -> _Box:
    if block is None:
        return _Box(x, y, _BOX, _BOX, label, "none", f"{label}: no layer that could carry an adapter")
    return _Box(x, y, _BOX, _BOX, f"{label}\n{block.adapters}", block.state, f"{label}: {_numbers(block)}")


def _numbers(block: BlockCoverage) -> str:
    reached = "" if block.reached is None else f", gradient in {block.reached}"
    reason = f" ({block.reason})" if block.reason else ""
    return f"{block.adapters} of {block.layers} layers{reached}{reason}"


def _worst(report: CoverageReport, part: str) -> str:
    """State of a whole part: broken if any block is, else learning if any block is."""
    states = {row.state for row in report.part(part) if row.state != "none"}
    return next((state for state in ("broken", "reached", "unknown", "unused") if state in states), "none")


def _cross_state(report: CoverageReport) -> str:
    """The way into the UNet is broken when a text encoder with adapters is cut off as a whole."""
    cut = [
        part
        for part in ("te1", "te2")
        if any(row.adapters for row in report.part(part))
        and all(row.reached == 0 for row in report.part(part) if row.adapters)
    ]
    return "broken" if cut else _worst(report, "unet")


def _arrow(x1: int, y1: int, x2: int, y2: int, state: str) -> str:
    ink = "#dc2626" if state == "broken" else "#6b7280"
    dash = ' stroke-dasharray="5 4"' if state == "broken" else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{ink}" stroke-width="2"{dash}/>'


def _legend() -> str:
    parts = []
    for i, (state, words) in enumerate(_LEGEND.items()):
        fill, ink = _COLOURS[state]
        x = 10 + 150 * i
        parts.append(
            f'<rect x="{x}" y="{_HEIGHT - 24}" width="12" height="12" fill="{fill}" stroke="{ink}"/>'
            f'<text x="{x + 18}" y="{_HEIGHT - 14}" fill="#374151">{words}</text>'
        )
    return "".join(parts)


def _document(content: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="11" role="img">'
        "<title>Which parts of the model learn</title>"
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>{content}</svg>'
    )
