"""`report.html` of a run: one self-contained page that says how it went.

No script, no external file or address; everything that came from outside (captions, file names, messages) is escaped,
and a content policy in the page forbids loading anything.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..runs.folder import RunFolder
from ..runs.platform import DurableIO
from .report_coverage import coverage_html
from .report_curves import curves_html
from .report_data import ReportData, Setting, read_run
from .report_health import health_html
from .report_html import duration, esc, number, plural, size
from .report_memory import memory_html
from .report_pictures import previews_html
from .report_text import (
    ProblemGroup,
    final_lora,
    loss_ends,
    problem_groups,
    shown_lines,
    status_word,
    summary_sentences,
)

_STYLE = Path(__file__).resolve().parents[1] / "assets" / "report" / "report.css"
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(run_folder: str | Path) -> Path:
    """Write `report.html` into the run folder from its record, whole or not at all, and return its path.

    Works for finished, failed and running runs, and again later.

    Raises:
        CheckpointError: there is no readable run.db.
        ConfigError: there is no readable config.json.
    """
    folder = RunFolder(run_folder)
    page = render(read_run(folder.path))
    DurableIO().replace_file(folder.report_path, page.encode("utf-8", "replace"))
    return folder.report_path


def render(data: ReportData) -> str:
    """The page as text."""
    style = _STYLE.read_text(encoding="utf-8")
    title = f"{data.name}: training report"
    sections = [
        _section("Before and after", previews_html(data), anchor="previews"),
        _section("Curves", curves_html(data), anchor="curves", css="wide"),
        _section("What learns", coverage_html(data.folder), anchor="coverage"),
        _section("Gradient health", health_html(data.folder), anchor="health", css="wide"),
        _section("Problems", _problems(data), anchor="problems"),
        _section("Memory", memory_html(data), anchor="memory"),
        _section("The LoRA file and its proof", _files(data), anchor="files"),
        _section("Settings", _settings(data), anchor="settings"),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{esc(title)}</title><style>{style}</style></head><body>"
        f"{_header(data)}<main>{''.join(sections)}</main>{_footer(data)}</body></html>\n"
    )


def _section(title: str, content: str, *, anchor: str, css: str = "") -> str:
    if not content:
        return ""
    return f'<section id="{anchor}" class="part {css}"><h2>{esc(title)}</h2>{content}</section>'


def _header(data: ReportData) -> str:
    status = status_word(data)
    *sentences, last = summary_sentences(data)
    some = "" if last.startswith("Nothing") else " some"
    css = status.lower().replace(" ", "-")
    return (
        f'<header><h1>{esc(data.name)} <span class="status {css}">{status}</span></h1>'
        f'<p class="summary">{esc(" ".join(sentences))}</p><p class="attention{some}">{esc(last)}</p>'
        f"{_tiles(data)}</header>"
    )


def _tiles(data: ReportData) -> str:
    """The figures that people look for first."""
    run, tiles = data.summary, []
    if data.score is not None:
        before, after = float(data.score.get("score_before") or 0), float(data.score["score_after"])
        tiles.append(("new word drawn right", f"{100 * before:.0f} % → {100 * after:.0f} %"))
    total = run["total_steps"]
    tiles.append(("steps", f"{run['step']} of {total}" if total and total != run["step"] else str(run["step"])))
    if run["seconds"] is not None:
        tiles.append(("time", duration(run["seconds"])))
    ends = loss_ends(data)
    if ends is not None:
        tiles.append(("training loss", f"{number(ends[0])} → {number(ends[1])}"))
    losses = [row["mean"] for row in data.validation if row["mean"] is not None]
    if losses:
        tiles.append(("validation loss", f"{number(losses[0])} → {number(losses[-1])}"))
    tiles.append(("rejected steps", str(run["rejected"] or 0)))
    scales = [row["loss_scale"] for row in data.steps if row["loss_scale"] not in (None, 1.0)]
    if scales:
        lately = data.steps[-100:]
        share = sum(row["rejected"] for row in lately) / len(lately)
        tiles.append(("loss scale", f"{number(scales[-1])}, {100 * share:.0f} % rejected lately"))
    memory = [row["vram_gib"] for row in data.steps if row["vram_gib"] is not None]
    if memory:
        tiles.append(("peak memory", f"{number(max(memory))} GiB"))
    cells = "".join(f"<div><dt>{esc(name)}</dt><dd>{esc(value)}</dd></div>" for name, value in tiles)
    return f'<dl class="tiles">{cells}</dl>'


def _problems(data: ReportData) -> str:
    groups = problem_groups(data)
    if not groups:
        return "<p>None.</p>"
    return "".join(_problem(group) for group in groups)


def _problem(group: ProblemGroup) -> str:
    lines, left = shown_lines(group)
    items = "".join(f"<li>{esc(line)}</li>" for line in lines)
    if left:
        rest = "".join(f"<li>{esc(line)}</li>" for line in group.lines[len(lines) :])
        items += f"<li><details><summary>{left} more</summary><ul>{rest}</ul></details></li>"
    advice = f'<p class="hint">{esc(group.advice)}</p>' if group.advice else ""
    word = {"error": "Error", "warning": "Warning", "note": "Note"}[group.severity]
    return (
        f'<section class="problem {group.severity}"><h3><span class="tag">{word}</span> {esc(group.title)}</h3>'
        f"<ul>{items}</ul>{advice}</section>"
    )


def _files(data: ReportData) -> str:
    final = final_lora(data)
    parts = []
    if final is not None:
        details = final["data"]
        parts.append(
            f"<p><strong>{esc(details['file'])}</strong> ({size(details['bytes'])}, step {final['step']})</p>"
            f'<p class="proof">{esc(details["proof"])}</p>'
        )
    others = [event for event in data.loras if event is not final]
    if others:
        rows = "".join(
            f"<tr><th scope='row'>{event['step']}</th><td>{esc(event['data']['file'])}</td>"
            f"<td>{size(event['data']['bytes'])}</td><td>{esc(event['data']['proof'])}</td></tr>"
            for event in others
        )
        head = "".join(f"<th scope='col'>{name}</th>" for name in ("step", "file", "size", "proof"))
        table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        count = plural(len(others), "other exported file")
        parts.append(table if final is None else f"<details><summary>{count}</summary>{table}</details>")
    kept = [row for row in data.checkpoints if row["state"] != "deleted"]
    if kept:
        names = ", ".join(esc(row["name"]) for row in kept)
        parts.append(f'<p class="hint">Checkpoints to go on from: {names}.</p>')
    return "".join(parts) or "<p>No LoRA file was written.</p>"


def _settings(data: ReportData) -> str:
    changed = [setting for setting in data.settings if setting.changed]
    same = [setting for setting in data.settings if not setting.changed]
    first = _settings_table(changed, with_default=True) if changed else "<p>All settings are the defaults.</p>"
    count = plural(len(same), "setting")
    rest = f"<details><summary>{count} at their default</summary>{_settings_table(same, with_default=False)}</details>"
    return f"<h3>Different from the defaults</h3>{first}{rest if same else ''}"


def _settings_table(settings: list[Setting], *, with_default: bool) -> str:
    names = ["setting", "value", *(["default"] if with_default else []), "meaning"]
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = []
    for setting in settings:
        default = f"<td>{_value(setting.default)}</td>" if with_default else ""
        rows.append(
            f'<tr><th scope="row">{_breakable(setting.key)}</th><td>{_value(setting.value)}</td>{default}'
            f"<td>{esc(setting.help)}</td></tr>"
        )
    return (
        f'<div class="scroll"><table class="settings"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _breakable(key: str) -> str:
    """A setting's name that may wrap after a dot or an underscore."""
    return esc(key).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _value(value: Any) -> str:
    if value is None:
        return '<span class="unset">unset</span>'
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return esc(f"{value:g}")
    if isinstance(value, list | tuple):
        joint = "<br>" if any(isinstance(item, str) for item in value) else ", "
        return joint.join(esc(item) for item in value) if value else '<span class="unset">none</span>'
    return esc(value) if value != "" else '<span class="unset">empty</span>'


def _footer(data: ReportData) -> str:
    started = data.summary["started"]
    when = "" if started is None else f"{datetime.fromtimestamp(started, timezone.utc):%Y-%m-%d %H:%M} UTC, "
    return (
        f"<footer>Run {esc(data.run_id)}, {when}Safe-Scaler {esc(data.pack_version)}. "
        "Everything here comes from run.db and config.json in the run's folder; run.log has the details.</footer>"
    )
