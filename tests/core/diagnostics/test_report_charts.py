from __future__ import annotations

import re

import pytest

from trainer_core.diagnostics.report_charts import Chart, Series, chart_html, thin_out, ticks
from trainer_core.diagnostics.report_html import duration, esc, listing, number, size


def chart(points: list[tuple[float, float]], **changes: object) -> str:
    series = [Series(name="a", points=points, style="c1")]
    return chart_html(Chart(**{"title": "T", "meaning": "m", "series": series, **changes}))  # type: ignore[arg-type]


def heights(made: str) -> list[float]:
    found = re.search(r'points="([^"]+)"', made)
    assert found is not None
    return [float(pair.split(",")[1]) for pair in found.group(1).split()]


def test_higher_values_stand_higher() -> None:
    ys = heights(chart([(1, 0.1), (2, 0.4), (3, 0.2)]))
    assert ys[1] < ys[2] < ys[0]
    assert all(10 <= y <= 206 for y in ys)


def test_log_scale_only_for_wide_ranges() -> None:
    wide = heights(chart([(1, 1.0), (2, 10.0), (3, 100.0)], log_scale=True))
    assert wide[0] - wide[1] == pytest.approx(wide[1] - wide[2], abs=0.2)
    narrow = heights(chart([(1, 1.0), (2, 2.0), (3, 4.0)], log_scale=True))
    assert narrow[1] - narrow[2] == pytest.approx(2 * (narrow[0] - narrow[1]), abs=0.3)


@pytest.mark.parametrize("points", [[(5, 1.0)], [(1, 0.0), (2, 0.0)], [(1, -3.0), (2, -1.0)], [(1, 1e-9), (2, 1e9)]])
@pytest.mark.parametrize("log_scale", [False, True])
def test_awkward_values_are_drawn_inside(points: list[tuple[float, float]], log_scale: bool) -> None:
    made = chart(points, log_scale=log_scale)
    numbers = [float(y) for y in re.findall(r'(?:cy|y1)="([-\d.]+)"', made)]
    if "polyline" in made:
        numbers += heights(made)
    assert numbers
    assert all(0 <= y <= 240 for y in numbers)
    assert "nan" not in made.lower()


def test_no_points_no_chart() -> None:
    assert chart([]) == ""


def test_spikes_survive_thinning() -> None:
    points = [(float(i), 0.0) for i in range(10_000)]
    points[1234] = (1234.0, 5.0)
    points[8765] = (8765.0, -5.0)
    thin = thin_out(points, 100)
    assert len(thin) <= 102
    assert (1234.0, 5.0) in thin
    assert (8765.0, -5.0) in thin
    assert thin == sorted(thin)


def test_an_outlier_does_not_squash_the_average() -> None:
    raw = [(float(i), 1.0 + 0.001 * i) for i in range(300)]
    raw[150] = (150.0, 500.0)
    lines = [Series(name="each step", points=raw, style="faint"), Series(name="average", points=raw[:100], style="c1")]
    made = chart_html(Chart(title="T", meaning="m", series=lines, fit_to="average"))
    assert "1 value lies beyond the picture's edge" in made
    assert "highest 500" in made


def test_table_has_first_and_last_step() -> None:
    made = chart([(float(i), float(i)) for i in range(1, 101)])
    rows = re.findall(r'<th scope="row">(\d+)</th>', made)
    assert rows[0] == "1"
    assert rows[-1] == "100"
    assert len(rows) <= 17


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 60, [0, 20, 40, 60]), (3, 3, [3]), (0.101, 0.109, [0.102, 0.104])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    made = ticks(low, high)
    assert made[: len(expected)] == pytest.approx(expected)
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in made)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.08123, "0.0812"), (0, "0"), (123.4, "123"), (1.5e-5, "1.5e-5"), (65536.0, "65536"), (1e6, "1e6"),
     (None, "–"), (float("nan"), "–"), (-0.5, "-0.5"), (0.9999, "1"), (99999.9, "100000")],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_words() -> None:
    assert [duration(s) for s in (4.26, 48, 185, 7440, None)] == [
        "4.26 s", "48 s", "3 min 5 s", "2 h 4 min", "an unknown time",
    ]  # fmt: skip
    assert [size(n) for n in (812, 45_000, 1_600_000, 2_300_000_000)] == ["812 bytes", "45 kB", "1.6 MB", "2.3 GB"]
    assert listing(["a", "b", "c"]) == "a, b and c"
    assert listing(list("abcdefg"), 3) == "a, b, c and 4 more"
    assert esc('<a b="c">&\x00') == "&lt;a b=&quot;c&quot;&gt;&amp;\N{REPLACEMENT CHARACTER}"
