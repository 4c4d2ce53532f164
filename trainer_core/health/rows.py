"""What the record, the panel and the report hold of a full measurement: one row a module group."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .alerts import Alerts
from .dynamic_range import GroupRange, ranges
from .groups import Tensor, group_words
from .records import SlowRecord, TensorSample
from .rules_slow import group_rms
from .sentences import sentence

HEALTHY = "HEALTHY"

Row = dict[str, Any]


def health_rows(
    record: SlowRecord, tensors: Mapping[str, Tensor], alerts: Alerts, clip_ratio: float, rejected_ratio: float
) -> list[tuple[str, Row]]:
    """(group, figures) of a measurement. `norm`: gradient norm of the group; `update_ratio`: update over weight.

    `a_...` and `b_...` are of lora_down and lora_up. Ratios are of the epoch so far.
    """
    rms = group_rms(record, tensors)
    members: dict[str, list[tuple[Tensor, TensorSample]]] = {}
    for name, sample in record.tensors.items():
        if name in tensors:
            members.setdefault(tensors[name].group, []).append((tensors[name], sample))
    quotients: dict[str, list[float]] = {}
    for module, quotient in record.quotients.items():
        tensor = tensors.get(f"{module}.lora_down.weight")
        if tensor is not None and not math.isnan(quotient):
            quotients.setdefault(tensor.group, []).append(quotient)
    found_ranges = {one.group: one for one in ranges(record, tensors)}
    rows: list[tuple[str, Row]] = []
    for group, found in sorted(members.items()):
        verdict = alerts.of_group(group)
        rows.append(
            (
                group,
                {
                    **_norms([sample for _, sample in found]),
                    "clip_ratio": clip_ratio,
                    **_known(
                        zero_share=_mean(s.zero for _, s in found),
                        changed_share=_mean(s.changed for _, s in found),
                        rms=rms.get(group, math.nan),
                        consistency=_mean(s.consistency for _, s in found),
                        q=statistics.median(quotients[group]) if group in quotients else math.nan,
                    ),
                    **_role("a", [s for t, s in found if t.role == "A"]),
                    **_role("b", [s for t, s in found if t.role == "B"]),
                    "rejected_ratio": rejected_ratio,
                    **_range(found_ranges.get(group)),
                    "tensors": len(found),
                    "name": group_words(group),
                    "verdict": HEALTHY if verdict is None else verdict.kind,
                    "sentence": "" if verdict is None else sentence(verdict),
                },
            )
        )
    return rows


def table_text(rows: Sequence[tuple[str, Row]]) -> str:
    """The health table for a terminal."""
    lines = [f"{'group':<38} {'norm A':>9} {'norm B':>9} {'update/w':>9} {'clipped':>8} {'rejected':>8}  verdict"]
    for _, row in rows:
        lines.append(
            f"{row['name']:<38} {_short(row.get('a_norm'))} {_short(row.get('b_norm'))} {_short(row['update_ratio'])} "
            f"{row['clip_ratio']:>8.0%} {row['rejected_ratio']:>8.0%}  {row['verdict']}"
        )
    told = dict.fromkeys(row["sentence"] for _, row in rows if row["sentence"])
    return "\n".join([*lines, *told])


def _short(value: float | None) -> str:
    return f"{'-':>9}" if value is None else f"{value:>9.2e}"


def _norms(samples: Sequence[TensorSample]) -> Row:
    weight, update = _total(s.weight for s in samples), _total(s.update for s in samples)
    return {"norm": _total(s.grad for s in samples), "update_ratio": update / weight if weight > 0 else 0.0}


def _range(found: GroupRange | None) -> Row:
    """How the group's gradients lie in fp16, at the loss scale of the step."""
    if found is None:
        return {}
    known = _known(headroom_bits=found.headroom, flushed_share=found.flushed, best_scale=found.best_scale)
    return {**known, "suits": found.format}


def _role(letter: str, samples: Sequence[TensorSample]) -> Row:
    if not samples:
        return {}
    return {
        f"{letter}_norm": _total(s.grad for s in samples),
        f"{letter}_weight": _total(s.weight for s in samples),
        f"{letter}_update": _total(s.update for s in samples),
    }


def _total(norms: Any) -> float:
    return math.sqrt(math.fsum(norm * norm for norm in norms))


def _mean(values: Any) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def _known(**values: float) -> Row:
    """Those that are numbers: JSON has no NaN."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
