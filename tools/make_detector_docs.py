"""Write the results of `benchmarks/detectors.py` into docs/gradient_health.md, between its two marks.

python tools/make_detector_docs.py [--code HASH] [--lines FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.detectors_score import (  # noqa: E402
    by_kind,
    clopper_pearson,
    is_false_alarm,
    kinds,
    recoveries,
    summary,
)

PAGE = ROOT / "docs" / "gradient_health.md"
BEGIN, END = "<!-- results of detectors.py: begin -->", "<!-- results of detectors.py: end -->"
PLANNED = {"fault": 18 * 20, "healthy": 9 * 40, "recovery": 5 * 6}

Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", help="code version; default: the one with the most runs")
    parser.add_argument("--lines", type=Path, default=ROOT / "benchmarks" / "results" / "detectors.jsonl")
    asked = parser.parse_args()
    lines = [json.loads(line) for line in asked.lines.read_text(encoding="utf-8").splitlines() if line.strip()]
    code = asked.code or Counter(line["code"] for line in lines).most_common(1)[0][0]
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    text = section([line for line in lines if line["code"] == code and line["model"] == "micro"], code)
    toy = [line for line in lines if line["code"] == code and line["model"] == "toy"]
    PAGE.write_text(f"{before}{BEGIN}\n{text}{toy_section(toy)}{END}{after}", encoding="utf-8")


def section(lines: list[Line], code: str) -> str:
    """Results on the micro toy, with how many of the planned runs there are."""
    faults, healthy = (by_what(lines, what) for what in ("fault", "healthy"))
    done = ", ".join(f"{len(by_what(lines, what))} of {of} {what} runs" for what, of in PLANNED.items())
    right, alarms = sum(line["right"] for line in faults), sum(map(is_false_alarm, healthy))
    low, high = clopper_pearson(right, len(faults))
    _, most = clopper_pearson(alarms, len(healthy))
    rows = [
        f"Code version {code}, {done}. Right verdict in time: {right} of {len(faults)} (95 % bounds {low:.3f} to "
        f"{high:.3f}). False alarms: {alarms} of {len(healthy)} (upper bound {most:.3f}).",
        "",
        *fault_table(lines, faults),
        "",
        "| look-alike | runs | false alarms |",
        "|---|---|---|",
        *(
            f"| {members[0]['recipe']} {kind} | {len(members)} | {sum(map(is_false_alarm, members))} |"
            for kind, members in sorted(by_kind(healthy).items(), key=lambda item: item[1][0]["recipe"])
        ),
        "",
        *rule_table(lines),
        "",
        "| transient fault | runs | recovered with protection | without |",
        "|---|---|---|---|",
        *(
            f"| {kind} | {len(members)} | {sum(m['recovered'] for m in members)} | "
            f"{sum(m['recovered_bare'] for m in members)} |"
            for kind, members in sorted(by_kind(recoveries(lines)).items())
        ),
    ]
    return "\n".join(rows) + "\n"


def fault_table(lines: list[Line], faults: list[Line]) -> list[str]:
    told, rows = kinds(lines), ["| fault | runs | in time | right | culprit right | median delay | largest | instead |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for kind, members in sorted(by_kind(faults).items(), key=lambda item: order(item[1][0]["recipe"])):
        found, seen = told[kind], [line for line in members if line["alarm_in_time"]]
        delays = sorted(line["step"] - line["onset"] for line in seen)
        named = sum(line["culprit"] is not None for line in seen)
        middle, last = (delays[len(delays) // 2], delays[-1]) if delays else ("-", "-")
        culprit = f"{found['culprit']} of {named}" if named else "-"
        rows.append(
            f"| {members[0]['recipe']} {kind} | {len(members)} | {found['in_time']} | {found['right']} | {culprit} | "
            f"{middle} | {last} | {', '.join(found['said_instead'])} |"
        )
    return rows


def rule_table(lines: list[Line]) -> list[str]:
    result = summary(lines)
    rows = ["| simple rule | faults noticed in time | alarms on healthy runs |", "|---|---|---|"]
    for rule, shares in result["baselines"].items():
        if isinstance(shares, dict):
            recall, alarm = (f"{100 * shares[field]:.0f} %" for field in ("recall", "false_alarm"))
            rows.append(f"| {rule} | {recall} | {alarm} |")
    faults = by_what(lines, "fault")
    right = 100 * sum(line["right"] for line in faults) / len(faults)
    rows.append(f"| gradient health, right verdict | {right:.0f} % | {100 * result['false_alarm']:.1f} % |")
    return rows


def toy_section(lines: list[Line]) -> str:
    if not lines:
        return "\nThe runs on the trained toy SDXL (`--toy`) have not been made.\n"
    faults, healthy = by_what(lines, "fault"), by_what(lines, "healthy")
    wrong = [f"{line['kind']} ({line['verdict']})" for line in faults if not line["right"]]
    return (
        f"\nOn the trained toy SDXL: {sum(line['right'] for line in faults)} of {len(faults)} right in time"
        f"{', not ' + ', '.join(wrong) if wrong else ''}; {sum(map(is_false_alarm, healthy))} false alarms in "
        f"{len(healthy)} healthy runs.\n"
    )


def by_what(lines: list[Line], what: str) -> list[Line]:
    return [line for line in lines if line["what"] == what]


def order(recipe: str) -> tuple[str, int]:
    return recipe[0], int(recipe[1:])


if __name__ == "__main__":
    main()
