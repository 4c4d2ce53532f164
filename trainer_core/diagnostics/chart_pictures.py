"""The charts of a report as pixels, for places that show pictures and no SVG (a graph's IMAGE sockets)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from .report_charts import Chart, Frame, Series, thin_out, ticks
from .report_curves import charts
from .report_data import ReportData
from .report_html import number

_SCALE = 2
_WIDTH, _HEIGHT, _HEAD = 480, 240, 26
_LEFT, _RIGHT, _BASE = 62, 466, 206

_PAPER, _INK, _GRID, _MARK = "#ffffff", "#30343b", "#e3e6ea", "#c0392b"
_COLOURS = ("#2563a8", "#c2571a", "#2a8a57", "#8443a8", "#7a6a1b", "#4a7f8c")
_FAINT = "#b9c6d6"


def chart_pictures(data: ReportData) -> list[Image.Image]:
    """Every chart of a run that has points, 960 x 532 pixels each; loss first."""
    return [_draw(chart) for chart in charts(data) if any(line.points for line in chart.series)]


def _draw(chart: Chart) -> Image.Image:
    picture = Image.new("RGB", (_WIDTH * _SCALE, (_HEIGHT + _HEAD) * _SCALE), _PAPER)
    pen = ImageDraw.Draw(picture)
    series = [line for line in chart.series if line.points]
    frame = Frame.around(chart, series)
    _text(pen, (8, 6 - _HEAD), chart.title, 13)
    _grid(pen, frame)
    for step in chart.marks:
        if frame.x_low <= step <= frame.x_high:
            pen.line(_at((frame.x(step), _BASE - 12), (frame.x(step), _BASE)), fill=_MARK, width=2 * _SCALE)
    colours = _colours(series)
    for line in series:
        _line(pen, line, frame, colours[line.name])
    _legend(pen, series, colours)
    return picture


def _colours(series: Sequence[Series]) -> dict[str, str]:
    strong = [line.name for line in series if line.style != "faint"]
    chosen = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(strong)}
    return {line.name: chosen.get(line.name, _FAINT) for line in series}


def _grid(pen: Any, frame: Frame) -> None:
    values = [frame.y_low, frame.y_high] if frame.log_scale else ticks(frame.y_low, frame.y_high)
    for value in values:
        y = frame.y(value)
        pen.line(_at((_LEFT, y), (_RIGHT, y)), fill=_GRID, width=_SCALE)
        _text(pen, (4, y - 6), number(value), 10)
    for step in ticks(frame.x_low, frame.x_high):
        if step == round(step):
            _text(pen, (frame.x(step) - 8, _HEIGHT - 24), f"{step:.0f}", 10)


def _line(pen: Any, line: Series, frame: Frame, colour: str) -> None:
    points = [(frame.x(x), frame.y(y)) for x, y in thin_out(line.points)]
    if len(points) == 1:
        (x, y) = points[0]
        pen.ellipse(_at((x - 3, y - 3), (x + 3, y + 3)), fill=colour)
        return
    pen.line(_at(*points), fill=colour, width=2 * _SCALE if colour != _FAINT else _SCALE, joint="curve")


def _legend(pen: Any, series: Sequence[Series], colours: dict[str, str]) -> None:
    x = 190.0
    for line in series:
        if line.in_legend and x < _RIGHT - 30:
            pen.line(_at((x, 14 - _HEAD), (x + 14, 14 - _HEAD)), fill=colours[line.name], width=3 * _SCALE)
            _text(pen, (x + 18, 7 - _HEAD), line.name, 10)
            x += 28 + 6 * len(line.name)


def _at(*points: tuple[float, float]) -> list[tuple[float, float]]:
    """Chart coordinates in pixels: scaled, and below the heading (which has y from -26 to 0)."""
    return [(x * _SCALE, (y + _HEAD) * _SCALE) for x, y in points]


def _text(pen: Any, place: tuple[float, float], text: str, size: int) -> None:
    pen.text(_at(place)[0], text, fill=_INK, font=ImageFont.load_default(size * _SCALE))
