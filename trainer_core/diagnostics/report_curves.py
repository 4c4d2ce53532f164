"""The curves of the report: which figures are drawn, from which rows, and what each one means."""

from __future__ import annotations

from .report_charts import Chart, Series, chart_html
from .report_data import ReportData, Row
from .report_html import plural

_PART_NAMES = {"unet": "UNet", "te1": "text encoder 1", "te2": "text encoder 2"}


def curves_html(data: ReportData) -> str:
    """All charts that have something to show, as one block; empty before the first step."""
    drawn = "".join(chart_html(chart) for chart in charts(data))
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def charts(data: ReportData) -> list[Chart]:
    """Every chart of a run, in the order of the report; one without points draws as nothing."""
    found = [_loss(data), _validation(data), _grad_norm(data), _learning_rate(data), _loss_scale(data)]
    return [chart for chart in found if chart is not None]


def _points(rows: list[Row], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if row[name] is not None]


def _rejected(data: ReportData) -> tuple[int, ...]:
    return tuple(row["step"] for row in data.steps if row["rejected"])


def _loss(data: ReportData) -> Chart:
    return Chart(
        title="Training loss",
        meaning="Jumps from step to step because every step sees another noise level; the average shows the trend.",
        series=[
            Series(name="each step", points=data.applied_losses, style="faint"),
            Series(name="average", points=_points(data.steps, "loss_avg"), style="c1"),
        ],
        marks=_rejected(data),
        marks_name="rejected step",
        fit_to="average",
    )


def _validation(data: ReportData) -> Chart:
    rows = [row for row in data.validation if row["mean"] is not None]
    count = max((len(row["bands"]) for row in rows), default=0)
    bands = [
        Series(
            name=_band_name(band, count),
            points=_band_points(rows, band),
            style=f"band b{min(7, band * 8 // max(count, 1))}",
            in_legend=band in (0, count - 1),
        )
        for band in range(count)
    ]
    pictures = plural(rows[-1]["pictures"], "picture") if rows else ""
    return Chart(
        title="Validation loss",
        meaning=f"The same {pictures}, noise and noise levels every time, so a change means that the model changed.",
        series=[*(bands if count > 1 else []), Series(name="mean", points=_points(rows, "mean"), style="c1")],
    )


def _band_points(rows: list[Row], band: int) -> list[tuple[float, float]]:
    measured = [row for row in rows if len(row["bands"]) > band]
    return [(row["step"], row["bands"][band]) for row in measured if row["bands"][band] is not None]


def _band_name(band: int, count: int) -> str:
    if band == 0:
        return "least noise"
    return "most noise" if band == count - 1 else f"noise band {band + 1} of {count}"


def _grad_norm(data: ReportData) -> Chart:
    limit = data.setting("gradient.max_norm")
    return Chart(
        title="Gradient norm",
        meaning="Length of the gradient before clipping; steps above the dashed line were scaled down to it.",
        series=[Series(name="gradient norm", points=_points(data.steps, "grad_norm"), style="c2")],
        log_scale=True,
        limit=float(limit) if limit else None,
        limit_name="clipped above",
        marks=_rejected(data),
        marks_name="rejected step",
    )


def _learning_rate(data: ReportData) -> Chart:
    by_part: dict[str, list[tuple[float, float]]] = {}
    for row in data.steps:
        for part, rate in (row["lr"] or {}).items():
            by_part.setdefault(str(part), []).append((row["step"], rate))
    lines = [
        Series(name=_PART_NAMES.get(part, part), points=points, style=f"c{min(index + 1, 4)}")
        for index, (part, points) in enumerate(by_part.items())
    ]
    return Chart(title="Learning rate", meaning="What the optimizer used at each applied step.", series=lines)


def _loss_scale(data: ReportData) -> Chart | None:
    points = _points(data.steps, "loss_scale")
    if all(value == 1.0 for _, value in points):
        return None  # only fp16 has one
    return Chart(
        title="Loss scale",
        meaning="fp16 only: halves after an overflow, doubles after a quiet stretch. Overflows at first are normal.",
        series=[Series(name="loss scale", points=points, style="c3")],
        log_scale=True,
        marks=_rejected(data),
        marks_name="rejected step",
    )
