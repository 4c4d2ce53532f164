"""Line charts as inline SVG: no script, no external file, colours from the page's style sheet.

A chart is drawn at 480x240 and scaled by the page, so that its text stays readable on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .report_html import esc, number, plural

Point = tuple[float, float]

_WIDTH, _HEIGHT = 480, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 10, 34
_MOST_POINTS = 480
_TABLE_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line: `points` are (step, value) with rising steps and finite values; `style` is its CSS class."""

    name: str
    points: Sequence[Point]
    style: str
    in_legend: bool = True


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What a chart shows. `note` stands under it; `limit` is a dashed line; `marks` are steps marked on the axis."""

    title: str
    meaning: str
    series: Sequence[Series]
    log_scale: bool = False
    limit: float | None = None
    limit_name: str = ""
    marks: Sequence[int] = ()
    marks_name: str = ""
    fit_to: str = ""


def chart_html(chart: Chart) -> str:
    """A figure with caption, legend, the SVG and a table of its values; empty when there is nothing to draw."""
    series = [line for line in chart.series if line.points]
    if not series:
        return ""
    frame = Frame.around(chart, series)
    parts = [*_grid(frame), *_marks(chart, frame), *_limit(chart, frame)]
    parts += [_line(line, frame) for line in series]
    note = _cut_note(series, frame)
    return (
        f'<figure class="chart"><figcaption><h3>{esc(chart.title)}</h3><p>{esc(chart.meaning)}</p></figcaption>'
        f"{_legend(chart, series, frame)}"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{esc(_spoken(chart, series))}">'
        f"{''.join(parts)}</svg>{note}{_table(series)}</figure>"
    )


@dataclass(frozen=True)
class Frame:
    """The value range of a chart and its mapping to the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log_scale: bool

    @classmethod
    def around(cls, chart: Chart, series: Sequence[Series]) -> Frame:
        steps = [x for line in series for x, _ in line.points]
        leading = [line for line in series if line.name == chart.fit_to]
        values = _core_values(series, leading)
        # The limit is drawn only where it is near the values: it must not squash them.
        if chart.limit is not None and chart.limit <= 3 * max(values):
            values.append(chart.limit)
        positive = [value for value in values if value > 0]
        if chart.log_scale and positive and max(positive) / min(positive) >= 20:
            low = 10 ** math.floor(math.log10(min(positive)))
            high = 10 ** math.ceil(math.log10(max(positive)))
            return cls(min(steps), max(steps), low, max(high, low * 10), True)
        low, high = min(values), max(values)
        pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        low = 0.0 if 0 <= low <= (high - low) * 0.5 else low - pad
        return cls(min(steps), max(steps), low, high + pad, False)

    def x(self, step: float) -> float:
        share = 0.5 if self.x_high == self.x_low else (step - self.x_low) / (self.x_high - self.x_low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        if self.log_scale:
            value = max(value, self.y_low / 10)
            share = math.log(value / self.y_low) / math.log(self.y_high / self.y_low)
        else:
            share = (value - self.y_low) / (self.y_high - self.y_low)
        inside = min(max(share, 0.0), 1.0)  # cut values run along the edge, and the note says so
        return _HEIGHT - _BOTTOM - inside * (_HEIGHT - _TOP - _BOTTOM)


def _core_values(series: Sequence[Series], leading: Sequence[Series]) -> list[float]:
    """Values the range is made of: all of the leading lines, and the middle 98 % of the others beside them."""
    values = [y for line in leading or series for _, y in line.points]
    if leading:
        for line in series:
            ordered = sorted(y for _, y in line.points)
            cut = len(ordered) // 100
            values += ordered[cut : len(ordered) - cut]
    return values


def thin_out(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """At most `most` points with the lowest and highest of every stretch kept, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    kept: list[Point] = []
    size = math.ceil(len(points) / (most // 2))
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) inside [low, high], about `count` of them."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _grid(frame: Frame) -> list[str]:
    if frame.log_scale:
        decades = range(round(math.log10(frame.y_low)), round(math.log10(frame.y_high)) + 1)
        stride = max(1, math.ceil(len(decades) / 6))
        values = [10.0**power for power in decades][::stride]
    else:
        values = ticks(frame.y_low, frame.y_high)
    parts = []
    for value in values:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 4.5:.1f}" text-anchor="end">{number(value)}</text>')
    for step in ticks(frame.x_low, frame.x_high):
        if step != round(step):
            continue
        x = frame.x(step)
        anchor = "end" if x > _WIDTH - 40 else "middle"
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 14}" text-anchor="{anchor}">{step:.0f}</text>')
    parts.append(f'<text class="tick" x="4" y="{_HEIGHT - 14}">step</text>')
    return parts


def _line(line: Series, frame: Frame) -> str:
    points = [(frame.x(x), frame.y(y)) for x, y in thin_out(line.points)]
    if len(points) == 1:
        return f'<circle class="dot {line.style}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="4"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="line {line.style}" points="{path}"/>'


def _marks(chart: Chart, frame: Frame) -> list[str]:
    base = _HEIGHT - _BOTTOM
    shown = [step for step in chart.marks if frame.x_low <= step <= frame.x_high]
    return [
        f'<line class="mark" x1="{frame.x(step):.1f}" x2="{frame.x(step):.1f}" y1="{base - 12}" y2="{base}"/>'
        for step in shown[:: max(1, len(shown) // 200)]
    ]


def _limit(chart: Chart, frame: Frame) -> list[str]:
    if chart.limit is None or not frame.y_low <= chart.limit <= frame.y_high:
        return []
    y = frame.y(chart.limit)
    return [f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>']


def _legend(chart: Chart, series: Sequence[Series], frame: Frame) -> str:
    named = [(line.style, line.name) for line in series if line.in_legend]
    if _limit(chart, frame):
        named.append(("limit", chart.limit_name))
    if chart.marks:
        named.append(("mark", chart.marks_name))
    if len(named) < 2:
        return ""
    items = "".join(
        f'<li><span class="swatch {style}" aria-hidden="true"></span>{esc(name)}</li>' for style, name in named
    )
    return f'<ul class="legend">{items}</ul>'


def _spoken(chart: Chart, series: Sequence[Series]) -> str:
    """The chart in one sentence, for readers that see no picture."""
    said = [
        f"{line.name} from {number(line.points[0][1])} at step {line.points[0][0]:.0f} "
        f"to {number(line.points[-1][1])} at step {line.points[-1][0]:.0f}"
        for line in series
    ]
    return f"{chart.title}: {'; '.join(said)}."


def _cut_note(series: Sequence[Series], frame: Frame) -> str:
    slack = 1e-9 * max(abs(frame.y_high), abs(frame.y_low))
    cut = sum(1 for line in series for _, y in line.points if y > frame.y_high + slack or y < frame.y_low - slack)
    if not cut:
        return ""
    highest = max(y for line in series for _, y in line.points)
    said = f"{plural(cut, 'value lies', 'values lie')} beyond the picture's edge (highest {number(highest)})."
    return f'<p class="hint">{said}</p>'


def _table(series: Sequence[Series]) -> str:
    """Up to 16 steps of every line as a table, behind a fold."""
    steps = sorted({x for line in series for x, _ in line.points})
    stride = max(1, math.ceil(len(steps) / _TABLE_ROWS))
    chosen = [*steps[::stride], *steps[-1:]] if (len(steps) - 1) % stride else steps[::stride]
    columns = [dict(line.points) for line in series]
    head = "".join(f'<th scope="col">{esc(line.name)}</th>' for line in series)
    rows = []
    for step in chosen:
        cells = "".join(f"<td>{number(column[step]) if step in column else '–'}</td>" for column in columns)
        rows.append(f'<tr><th scope="row">{step:.0f}</th>{cells}</tr>')
    return (
        '<details><summary>Values</summary><div class="scroll"><table class="values">'
        f'<thead><tr><th scope="col">step</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div></details>'
    )
