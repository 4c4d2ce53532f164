"""How a run went, in plain words: the summary at the top of the report and its list of problems."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ..events import NOTE_TOPICS
from .report_data import ReportData, Row
from .report_html import duration, listing, number, plural, size

_FEWEST_IN_A_TENTH = 4
_FLAT = 0.03  # a change of the mean loss below this share is called no change
_RISE = 0.02  # a validation loss this share above its best is called risen
_MOST_LINES = 12


@dataclass(frozen=True, kw_only=True)
class ProblemGroup:
    """One kind of problem. `severity`: error, warning or note; `lines`: what happened, at most twelve are shown."""

    severity: str
    title: str
    lines: tuple[str, ...]
    advice: str = ""


def status_word(data: ReportData) -> str:
    words = {"finished": "Finished", "stopped": "Stopped", "failed": "Failed"}
    return words.get(data.summary["status"] or "", "Not ended")


def summary_sentences(data: ReportData) -> list[str]:
    """The run in a few sentences: what was done and what came out; what it did to the losses; what needs a look."""
    sentences = [_what_ran(data), *_score(data), _result(data), *_loss(data), *_validation(data), attention(data)]
    return [sentence for sentence in sentences if sentence]


def _what_ran(data: ReportData) -> str:
    run = data.summary
    total = run["total_steps"]
    steps = f"{run['step']} of {total} steps" if total and total != run["step"] else plural(run["step"], "step")
    pictures = f" on {plural(run['pictures'], 'picture')}" if run["pictures"] else ""
    where = f" ({run['device']}, {run['precision']})" if run["device"] else ""
    time = duration(run["seconds"])
    verdict = {
        "finished": f"The run finished: {steps}{pictures} in {time}{where}.",
        "stopped": f"The run was stopped after {steps}{pictures} and {time}{where}. It can be resumed.",
        "failed": f"The run failed after {steps}{pictures} and {time}{where}.",
    }.get(run["status"] or "")
    if verdict is None:
        lead = "The run is still going, or it ended without a word (killed, or a power cut)."
        return f"{lead} Recorded: {steps}{pictures}."
    if run["rejected"]:
        verdict += f" {plural(run['applied'], 'step was', 'steps were')} applied and {run['rejected']} rejected."
    return verdict


def _score(data: ReportData) -> list[str]:
    if data.score is None:
        return []
    score = data.score
    word = f"'{score['word']}'" if score.get("word") else "the new word"
    text = f"Pictures drawn for {word} were right in {_percent(score.get('score_before'))} of the cases before"
    text += f" and {_percent(score.get('score_after'))} after training"
    if score.get("samples"):
        text += f" ({score['samples']} samples each)"
    if score.get("kept") is not None:
        text += f"; of what the model could already draw, {_percent(score['kept'])} was kept"
    return [text + "."]


def _percent(share: Any) -> str:
    return f"{100 * float(share):.0f} %" if isinstance(share, int | float) else "an unknown share"


def loss_ends(data: ReportData) -> tuple[float, float, int] | None:
    """Mean training loss of the first and the last tenth of the applied steps, and how many steps a tenth is.

    None where a tenth is so few steps that their noise levels alone decide which of the two means is lower.
    """
    losses = [loss for _, loss in data.applied_losses]
    count = len(losses) // 10
    if count < _FEWEST_IN_A_TENTH:
        return None
    return math.fsum(losses[:count]) / count, math.fsum(losses[-count:]) / count, count


def _loss(data: ReportData) -> list[str]:
    ends = loss_ends(data)
    if ends is None:
        return []
    first, last, count = ends
    change = (last - first) / first if first > 0 else 0.0
    means = f"(means of the first and last {plural(count, 'step')})"
    if abs(change) < _FLAT:
        return [
            f"The training loss stayed about the same: {number(first)} and {number(last)} {means}. That is common: "
            "the noise level of each step decides most of it. The validation loss and the previews tell more."
        ]
    if change > 0:
        advice = "A lower learning rate is the first thing to try."
        return [f"The training loss rose from {number(first)} to {number(last)} {means}. {advice}"]
    return [f"The training loss fell from {number(first)} to {number(last)} {means}."]


def _validation(data: ReportData) -> list[str]:
    rows = [row for row in data.validation if row["mean"] is not None]
    if not rows:
        return []
    first, last = rows[0], rows[-1]
    if len(rows) == 1:
        return [f"The validation loss was {number(first['mean'])} at step {first['step']}."]
    text = f"The validation loss {_movement(first['mean'], last['mean'])}"
    text += f" (step {first['step']} to {last['step']}, {plural(last['pictures'], 'picture')})."
    best = min(rows, key=lambda row: row["mean"])
    if last["mean"] > best["mean"] * (1 + _RISE) and best is not last:
        rise = 100 * (last["mean"] / best["mean"] - 1)
        where = "before training" if best["step"] == 0 else f"at step {best['step']}"
        text += f" It was lowest {where} ({number(best['mean'])}) and is {rise:.0f} % higher at the end:"
        text += " the LoRA may be over-trained. Compare it with a file saved nearer to the lowest point."
    return [text]


def _movement(first: float, last: float) -> str:
    if number(first) == number(last):
        return f"stayed at {number(first)}"
    return f"{'fell' if last < first else 'rose'} from {number(first)} to {number(last)}"


def _result(data: ReportData) -> str:
    final = final_lora(data)
    if final is not None:
        name = PurePath(str(final["data"]["file"]).replace("\\", "/")).name
        return f"The LoRA is {name} ({size(final['data']['bytes'])}); it was read back after saving and proven."
    if data.loras:
        last = data.loras[-1]
        return f"The newest LoRA file is {last['data']['file']}, from step {last['step']}."
    return "" if data.summary["status"] is None else "No LoRA file was written."


def final_lora(data: ReportData) -> Row | None:
    """The event of the run's result, if it has one."""
    return next((event for event in reversed(data.loras) if event["data"].get("final")), None)


def attention(data: ReportData) -> str:
    """The sentence that says whether something needs a look."""
    serious = [group for group in problem_groups(data) if group.severity != "note"]
    if not serious:
        return "Nothing needs your attention."
    return f"Please look at the problems below: {listing([_lower_first(group.title) for group in serious])}."


def _lower_first(text: str) -> str:
    return text if text[:4] == "LoRA" else text[:1].lower() + text[1:]


def problem_groups(data: ReportData) -> list[ProblemGroup]:
    """All problems of the run, worst first."""
    groups = [*_failure(data), *_missing_result(data), *_rejections(data), *_verdicts(data), *_warnings(data)]
    groups += [*_damaged_record(data), *_resumes(data)]
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(groups, key=lambda group: order[group.severity])


def _failure(data: ReportData) -> list[ProblemGroup]:
    if data.summary["status"] != "failed":
        return []
    message = str(data.summary["message"]) or "no message was recorded; run.log has the traceback"
    return [ProblemGroup(severity="error", title="The run failed", lines=tuple(message.splitlines()))]


def _missing_result(data: ReportData) -> list[ProblemGroup]:
    if data.summary["status"] != "finished" or data.loras:
        return []
    return [ProblemGroup(severity="error", title="No LoRA file was written", lines=("See the warnings and run.log.",))]


def _rejections(data: ReportData) -> list[ProblemGroup]:
    """Rejected steps by class (or reason), with what is known about the cause; those of an fp16 run that was looking
    for its loss scale are no problem."""
    seeking = [event for event in data.rejections if event["data"].get("phase") == "CALIBRATE"]
    by_class: dict[str, list[Row]] = {}
    for event in data.rejections:
        if event not in seeking:
            reason = str(event["data"].get("reason", "unknown reason"))
            by_class.setdefault(str(event["data"].get("kind") or reason), []).append(event)
    groups = [_rejection_group(events) for events in by_class.values()]
    if seeking:
        title = f"{plural(len(seeking), 'step was', 'steps were')} rejected while the loss scale was looked for"
        line = "fp16 begins with a loss scale that is too large on purpose, and halves it until gradients fit."
        groups.append(ProblemGroup(severity="note", title=title, lines=(line,)))
    return groups


def _rejection_group(events: list[Row]) -> ProblemGroup:
    def values(name: str) -> list[str]:
        return list(dict.fromkeys(str(value) for event in events for value in event["data"].get(name) or ()))

    steps = [str(event["step"]) for event in events]
    one = len(steps) == 1
    lines = [f"{'Step' if one else 'Steps'} {listing(steps, 20)}: {events[0]['data'].get('reason', 'unknown reason')}."]
    if samples := values("samples"):
        lines.append(f"Pictures in {'it' if one else 'them'}: {listing(samples, 8)}.")
    if where := list(dict.fromkeys(str(event["data"]["where"]) for event in events if event["data"].get("where"))):
        lines.append(f"Layers hit first: {listing(where, 4)}.")
    if culprits := values("culprits"):
        lines.append(f"Weights with bad gradients: {listing(culprits, 4)}.")
    if timesteps := values("timesteps"):
        lines.append(f"Timesteps: {listing(timesteps, 8)}.")
    advice = "A rejected step changes nothing: weights and schedule are as before it."
    title = f"{plural(len(events), 'step was', 'steps were')} rejected"
    return ProblemGroup(severity="warning", title=title, lines=tuple(lines), advice=advice)


def _verdicts(data: ReportData) -> list[ProblemGroup]:
    said = [event for event in data.verdicts if event["data"].get("severity", "info") not in ("info", "ok")]
    acted = data.interventions
    lines = [f"Step {event['step']}: {event['data'].get('sentence') or event['data'].get('kind')}" for event in said]
    lines += [f"Step {event['step']}: {event['data'].get('action')} ({event['data'].get('reason')})" for event in acted]
    if not lines:
        return []
    return [ProblemGroup(severity="warning", title="Health of the gradients", lines=tuple(lines))]


_TOPICS = {
    "settings": "Settings",
    "data": "The data set",
    "preview": "Previews",
    "validation": "Validation",
    "evaluation": "Validations that failed",
    "network": "The adapter",
    "checkpoint": "Checkpoints that could not be written",
    "save": "LoRA files that could not be written",
    "restart": "Restarts",
    "model": "The base model",
    "memory": "Memory",
}


def _warnings(data: ReportData) -> list[ProblemGroup]:
    by_topic: dict[str, dict[str, None]] = {}
    for event in data.warnings:
        topic, message = str(event["data"].get("topic", "")), str(event["data"].get("message", ""))
        by_topic.setdefault(topic, {}).setdefault(message)
    return [
        ProblemGroup(
            severity="note" if topic in NOTE_TOPICS else "warning",
            title=_TOPICS.get(topic, topic[:1].upper() + topic[1:] or "Warnings"),
            lines=tuple(messages),
        )
        for topic, messages in by_topic.items()
    ]


def _damaged_record(data: ReportData) -> list[ProblemGroup]:
    name = data.meta.get("damaged_record")
    if not name:
        return []
    line = f"The earlier record could not be read and was kept as {name}; what is shown here starts after it."
    return [ProblemGroup(severity="warning", title="The run's record was damaged", lines=(line,))]


def _resumes(data: ReportData) -> list[ProblemGroup]:
    lines = []
    for event in data.resumes:
        details = event["data"]
        line = f"Went on from {details.get('checkpoint')} at step {event['step']}."
        if details.get("passed_over"):
            line += f" Passed over as damaged: {listing(list(map(str, details['passed_over'])))}."
        if details.get("differences"):
            line += f" Different from before: {listing(list(map(str, details['differences'])))}."
        lines.append(line)
    if not lines:
        return []
    title = f"The run was resumed {'once' if len(lines) == 1 else f'{len(lines)} times'}"
    return [ProblemGroup(severity="note", title=title, lines=tuple(lines))]


def shown_lines(group: ProblemGroup) -> tuple[tuple[str, ...], int]:
    """The lines that are shown at once, and how many are left."""
    return group.lines[:_MOST_LINES], max(0, len(group.lines) - _MOST_LINES)
