"""Scores of `detectors.py`: recall, labels, culprits, false alarms, with Clopper-Pearson bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Line = dict[str, Any]


def summary(lines: list[Line]) -> dict[str, Any]:
    """The contract line. Figures of kinds without a run are null.

    `recall_min`: lowest share of runs of a kind with an alarm in time; `label`: share of these with the right verdict.
    A healthy run that did not finish counts as a false alarm.
    """
    faults = [line for line in lines if line["what"] == "fault"]
    healthy = [line for line in lines if line["what"] == "healthy"]
    recovered = recoveries(lines)
    detected = [line for line in faults if line["alarm_in_time"]]
    named = [line for line in detected if line["culprit"] is not None]
    delays = sorted(line["step"] - line["onset"] for line in detected)
    return {
        "recall_min": min((share(members, "alarm_in_time") for members in by_kind(faults).values()), default=None),
        "label": ratio(detected, lambda line: line["right"]),
        "culprit": ratio(named, lambda line: line["culprit"]),
        "false_alarm": ratio(healthy, is_false_alarm),
        "delay_p95_steps": delays[min(len(delays) - 1, math.ceil(0.95 * len(delays)) - 1)] if delays else None,
        "recovered": ratio(recovered, lambda line: line["recovered"]),
        "baselines": {
            **{
                rule: {
                    "recall": ratio(faults, lambda line, rule=rule: line["naive"][rule]),
                    "false_alarm": ratio(healthy, lambda line, rule=rule: line["naive"][rule]),
                }
                for rule in (faults or healthy or [{"naive": {}}])[0]["naive"]
            },
            "recovered without protection": ratio(recovered, lambda line: line["recovered_bare"]),
        },
    }


def kinds(lines: list[Line]) -> dict[str, dict[str, Any]]:
    """Of each kind how many runs there are, and what came of them; with 95 % bounds of the recall."""
    found: dict[str, dict[str, Any]] = {}
    for kind, members in by_kind([line for line in lines if line["what"] == "fault"]).items():
        seen = [line for line in members if line["alarm_in_time"]]
        low, high = clopper_pearson(len(seen), len(members))
        named = [line for line in seen if line["culprit"] is not None]
        found[kind] = {
            "runs": len(members),
            "in_time": len(seen),
            "right": sum(line["right"] for line in members),
            "culprit": sum(line["culprit"] for line in named) if named else None,
            "bounds": [round(low, 3), round(high, 3)],
            "said_instead": sorted({str(line["verdict"]) for line in members if not line["right"]}),
        }
    for kind, members in by_kind([line for line in lines if line["what"] == "healthy"]).items():
        found[kind] = {"runs": len(members), "false_alarms": sum(map(is_false_alarm, members))}
    for kind, members in by_kind(recoveries(lines)).items():
        good, bare = sum(m["recovered"] for m in members), sum(m["recovered_bare"] for m in members)
        found[f"recovery of {kind}"] = {"runs": len(members), "recovered": good, "recovered_bare": bare}
    return found


def is_false_alarm(line: Line) -> bool:
    return line["verdict"] is not None or line["end"] != "finished"


def recoveries(lines: list[Line]) -> list[Line]:
    """Runs with a transient fault whose undisturbed run is there, with whether they end within 5 % of it."""
    runs = [line for line in lines if line["what"] == "recovery"]
    plain = {line["seed"]: line["loss"] for line in runs if line["kind"] == "undisturbed"}
    return [
        {
            **line,
            "recovered": near(line["loss"], plain[line["seed"]]),
            "recovered_bare": near(line["loss_bare"], plain[line["seed"]]),
        }
        for line in runs
        if line["kind"] != "undisturbed" and plain.get(line["seed"]) is not None
    ]


def near(loss: float | None, plain: float) -> bool:
    return loss is not None and loss <= 1.05 * plain


def tables(lines: list[Line]) -> str:
    """What happened by kind, with 95 % bounds."""
    out = ["fault                    runs  in time  right  culprit  median delay  said instead"]
    faults = by_kind([line for line in lines if line["what"] == "fault"])
    for kind, members in faults.items():
        seen = [line for line in members if line["alarm_in_time"]]
        delays = sorted(line["step"] - line["onset"] for line in seen)
        named = [line for line in seen if line["culprit"] is not None]
        wrong = sorted({str(line["verdict"]) for line in members if not line["right"]})
        out.append(
            f"{kind:<24} {len(members):>4} {len(seen):>8} {sum(line['right'] for line in members):>6} "
            f"{(str(sum(line['culprit'] for line in named)) + '/' + str(len(named))) if named else '-':>8} "
            f"{delays[len(delays) // 2] if delays else '-':>13}  {', '.join(wrong)}"
        )
    out.append("healthy                  runs  alarms  said")
    for kind, members in by_kind([line for line in lines if line["what"] == "healthy"]).items():
        alarms = [line for line in members if is_false_alarm(line)]
        said = sorted({alarm["verdict"] or alarm["end"] for alarm in alarms})
        out.append(f"{kind:<24} {len(members):>4} {len(alarms):>7}  {', '.join(said)}")
    healthy = [line for line in lines if line["what"] == "healthy"]
    alarms = sum(map(is_false_alarm, healthy))
    low, high = clopper_pearson(alarms, len(healthy))
    out.append(f"false alarms: {alarms} of {len(healthy)} (95 % bounds {low:.3f} to {high:.3f})")
    everything = [line for line in lines if line["what"] == "fault"]
    right = sum(line["right"] for line in everything)
    low, high = clopper_pearson(right, len(everything))
    out.append(f"right label in time: {right} of {len(everything)} (95 % bounds {low:.3f} to {high:.3f})")
    for kind, members in by_kind(recoveries(lines)).items():
        good, bare = sum(m["recovered"] for m in members), sum(m["recovered_bare"] for m in members)
        out.append(f"recovery {kind:<20} {good} of {len(members)} with protection, {bare} without")
    return "\n".join(out)


def by_kind(lines: list[Line]) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line["kind"], []).append(line)
    return found


def share(lines: list[Line], field: str) -> float:
    return sum(bool(line[field]) for line in lines) / len(lines)


def ratio(lines: list[Line], holds: Callable[[Line], Any]) -> float | None:
    return round(sum(bool(holds(line)) for line in lines) / len(lines), 4) if lines else None


def clopper_pearson(hits: int, of: int, level: float = 0.95) -> tuple[float, float]:
    """Exact bounds of a share (Clopper & Pearson 1934), by bisection on the binomial tail."""
    if of == 0:
        return 0.0, 1.0
    tail = (1 - level) / 2

    def above(p: float) -> float:
        return sum(_binomial(of, k, p) for k in range(hits, of + 1))

    def below(p: float) -> float:
        return sum(_binomial(of, k, p) for k in range(hits + 1))

    low = 0.0 if hits == 0 else _solve(above, tail, rising=True)
    high = 1.0 if hits == of else _solve(below, tail, rising=False)
    return low, high


def _binomial(of: int, hits: int, p: float) -> float:
    return math.comb(of, hits) * p**hits * (1 - p) ** (of - hits)


def _solve(function: Callable[[float], float], value: float, *, rising: bool) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if (function(middle) < value) == rising:
            low = middle
        else:
            high = middle
    return (low + high) / 2
