"""The report's section on memory: the estimate by part, what was used, and adapter sizes by rank."""

from __future__ import annotations

import json
import logging
from typing import Any

from .report_data import ReportData
from .report_html import esc, number, plural, size

log = logging.getLogger(__name__)


def memory_html(data: ReportData) -> str:
    """The section, empty where the run left no estimate (`memory/run_estimate.py`)."""
    try:
        facts = json.loads((data.folder / "memory.json").read_text(encoding="utf-8"))
        return f"{_parts(facts, data)}{_ranks(facts)}{_states(data)}"
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        log.warning("the memory estimate of the run cannot be shown: %s", error)
        return f"<p>The memory estimate of this run cannot be read: {esc(error)}</p>"


def memory_sentence(data: ReportData) -> str:
    """The estimate by part in one sentence; empty where the run left none that can be read."""
    try:
        rows = _rows(json.loads((data.folder / "memory.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    parts = ", ".join(f"{name} {size(count)}" for name, count in rows)
    return f"Memory: {parts}; together {size(sum(count for _, count in rows))}."


def _rows(facts: dict[str, Any]) -> list[tuple[str, float]]:
    rows = [(str(name), float(count)) for name, count in facts["parts"]]
    counted = facts.get("counted")
    if counted is not None and facts["activations"] != "estimated":
        rows.append(("activations of one forward (counted)", float(counted["bytes"])))
    return rows


def _parts(facts: dict[str, Any], data: ReportData) -> str:
    rows, counted, largest = _rows(facts), facts.get("counted"), facts["largest"]
    total = sum(count for _, count in rows)
    lines = "".join(f'<tr><th scope="row">{esc(name)}</th><td>{size(count)}</td></tr>' for name, count in rows)
    lines += f'<tr><th scope="row">together</th><td>{size(total)}</td></tr>'
    batch = plural(int(largest["pictures"]), "picture")
    said = [f"The largest batch has {batch} of {largest['width']} x {largest['height']}."]
    if facts["capacity"]:
        said.append(f"The device has {size(facts['capacity'])}.")
    if counted is not None and facts["activations"] == "estimated":
        said.append(f"The first forward kept {size(counted['bytes'])} of activations.")
    peaks = [row["vram_gib"] for row in data.steps if row["vram_gib"] is not None]
    if peaks:
        where = "allocated on the device" if facts["capacity"] else "resident in the process, libraries included"
        said.append(f"Most that was {where}: {number(max(peaks))} GiB.")
    return f'<p>{esc(" ".join(said))}</p><div class="scroll"><table><tbody>{lines}</tbody></table></div>'


def _ranks(facts: dict[str, Any]) -> str:
    head = "".join(f'<th scope="col">rank {rank}</th>' for rank in facts["columns"])
    rows = []
    for name, layers, per_rank in facts["ranks"]:
        cells = "".join(
            f"<td>{number(per_rank * rank / 1e6)} M ({100 * per_rank * rank / facts['unet']:.2f} %)</td>"
            for rank in facts["columns"]
        )
        rows.append(f'<tr><th scope="row">{esc(name)}, {int(layers)} layers</th>{cells}</tr>')
    return (
        f"<h3>Adapter numbers by rank</h3><p>In millions, and as a share of the UNet's {int(facts['unet']):,}; "
        f"this run trains {int(facts['trained']):,}. Each takes 16 bytes: weight, gradient and two moments.</p>"
        f'<div class="scroll"><table><thead><tr><th scope="col">trained layers</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _states(data: ReportData) -> str:
    """What the guard and the out-of-memory ladder saw and did."""
    if not data.memory:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{event["step"]}</th><td>{size(state["peak_allocated"])}</td>'
        f"<td>{size(state['current_reserved'])}</td><td>{int(state['evictable_tensors'])} "
        f"({size(state['evictable_bytes'])})</td><td>{esc(state['detail'])}</td></tr>"
        for event in data.memory
        for state in (event["data"],)
    )
    titles = ("step", "peak allocated", "reserved", "activations that could go", "what happened")
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
