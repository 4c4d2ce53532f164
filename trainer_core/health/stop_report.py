"""What a person reads when the ladder gave up: what happened, who was hit, what was tried, what to change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..optim.phases import FLOOR, OVERFLOW, POISON, WEIGHTS, Trigger
from .ladder import Attempt


@dataclass(frozen=True)
class StepRow:
    """One decided step: `kind` is empty for an applied one."""

    step: int
    attempt: int
    kind: str
    loss: float
    grad_norm: float
    loss_scale: float


@dataclass(frozen=True)
class StopFacts:
    """Everything the report shows. `why`: why the ladder ended; `passed`: rungs that were not taken, each with its
    reason; `tensors`, `samples`: how often each was hit."""

    step: int
    trigger: Trigger
    why: str
    compute: str
    passed: Sequence[str] = ()
    history: Sequence[Attempt] = ()
    rows: Sequence[StepRow] = ()
    tensors: Counter[str] | None = None
    samples: Counter[str] | None = None
    quarantined: Sequence[str] = ()
    learning_rate: float = 0.0


def stop_report(facts: StopFacts) -> str:
    """The report as Markdown."""
    parts = [
        f"# Stopped at step {facts.step}\n",
        f"{facts.trigger.reason} ({facts.trigger.kind}). {facts.why}\n",
        "The adapter holds the state before these steps. Nothing that is not a finite number reached a weight.\n",
        _section("What was tried", [_attempt(entry) for entry in facts.history] or ["nothing: see above"]),
        _section("Rungs not taken", facts.passed),
        _section("Tensors hit most often", _most(facts.tensors)),
        _section("Pictures in failed steps", _most(facts.samples)),
        _section("Quarantined pictures", facts.quarantined),
        _section("What to change", suggestions(facts)),
        _table(facts.rows),
    ]
    return "\n".join(part for part in parts if part)


def suggestions(facts: StopFacts) -> list[str]:
    """Changes of the config worth trying, most likely first."""
    found: list[str] = []
    if facts.quarantined or facts.trigger.kind == POISON:
        found.append("leave out or repair the pictures named here; dataset.verify = true reads all of them again")
        found.append("when latents are not finite: model.vae = an SDXL VAE that is sound in its own precision")
    if facts.compute == "fp16" and facts.trigger.kind in (OVERFLOW, FLOOR, POISON):
        found.append("precision.compute = 'bf16', or 'fp32' where the device has no bf16")
    if facts.trigger.kind == WEIGHTS:
        found.append("check the device (memory errors); resume from an older checkpoint")
    rate = facts.learning_rate
    found.append(f"optimizer.learning_rate = {rate / 4:g} instead of {rate:g}" if rate else "a lower learning rate")
    found.append("gradient.max_norm = 0.5, and schedule.warmup_steps = 0.05")
    return found


def _attempt(entry: Attempt) -> str:
    return f"step {entry.step}: {entry.trigger}; back to step {entry.back_to}, {entry.text} ({entry.rung})"


def _most(counts: Counter[str] | None) -> list[str]:
    return [f"{name} ({count} times)" for name, count in (counts or Counter()).most_common(16)]


def _section(title: str, lines: Iterable[str]) -> str:
    items = [f"- {line}" for line in lines]
    return "\n".join([f"## {title}", *items, ""]) if items else ""


def _table(rows: Sequence[StepRow]) -> str:
    if not rows:
        return ""
    head = [
        "## The last steps",
        "",
        "| step | attempt | outcome | loss | gradient norm | loss scale |",
        "|---|---|---|---|---|---|",
    ]
    body = [
        f"| {row.step} | {row.attempt} | {row.kind or 'applied'} | {_number(row.loss)} | {_number(row.grad_norm)} "
        f"| {row.loss_scale:g} |"
        for row in rows
    ]
    return "\n".join([*head, *body, ""])


def _number(value: float) -> str:
    return f"{value:.5g}" if math.isfinite(value) else "not finite"
