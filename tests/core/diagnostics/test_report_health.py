"""The report's table of gradient health."""

from __future__ import annotations

from pathlib import Path

from trainer_core.diagnostics.report_health import health_html
from trainer_core.runs.database import RunDatabase


def row(name: str, verdict: str, sentence: str = "") -> dict[str, object]:
    return {
        "name": name, "a_norm": 1e-3, "b_norm": 2e-3, "update_ratio": 0.01, "clip_ratio": 0.25, "rejected_ratio": 0.0,
        "verdict": verdict, "sentence": sentence,
    }  # fmt: skip


def test_the_newest_measurement_is_shown_and_escaped(tmp_path: Path) -> None:
    with RunDatabase(tmp_path / "run.db") as database:
        database.add_health(10, [("mid.ff", row("old", "HEALTHY"))])
        database.add_health(20, [("mid.ff", row("middle", "HEALTHY")), ("te1", row("<te1>", "STALE", "It <stays>."))])
    page = health_html(tmp_path)
    assert "Measured at step 20. 1 of 2 groups are not healthy." in page
    assert "It &lt;stays&gt;." in page
    assert "&lt;te1&gt;" in page
    assert "25%" in page
    assert "old" not in page


def test_a_run_without_figures_has_no_section(tmp_path: Path) -> None:
    with RunDatabase(tmp_path / "run.db"):
        pass
    assert health_html(tmp_path) == ""
    assert health_html(tmp_path / "nothing") == ""
