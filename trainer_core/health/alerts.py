"""From findings to verdicts that are spoken once: raised when they hold, cleared after twice as many clean looks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .findings import Finding

_CLEAN_LOOKS = {
    "TE1-DEAD": 16,
    "TE2-DEAD": 16,
    "DISCONNECTED": 16,
    "FROZEN": 10,
    "DTYPE-CHANGED": 16,
    "STATE-LOST": 6,
    "MISSING-CONTRIBUTION": 16,
    "EXPLODING": 20,
    "VANISHING": 6,
    "STALE": 6,
    "IMBALANCED": 4,
    "COLLAPSING": 4,
}
"""Looks without the finding after which a verdict is over: twice what it takes to raise it."""


@dataclass
class Open:
    """A verdict that holds. `since`: the step it was raised at; `clean`: looks in a row without it."""

    finding: Finding
    since: int
    clean: int = 0


@dataclass(frozen=True)
class Transition:
    """A verdict was raised, or (`over`) is over."""

    finding: Finding
    over: bool


class Alerts:
    """Open verdicts, one for each (kind, subject, cause's class). `ignore`: verdicts that are never raised."""

    def __init__(self, ignore: Iterable[str] = ()) -> None:
        self._ignore = frozenset(ignore)
        self.open: dict[tuple[str, str], Open] = {}

    def update(self, step: int, looked: Iterable[str], findings: Iterable[Finding]) -> list[Transition]:
        """Take in the findings of one look for the verdicts `looked`. Information is passed on and not kept."""
        transitions: list[Transition] = []
        seen: set[tuple[str, str]] = set()
        for finding in sorted(findings, key=lambda one: one.rank):
            if finding.kind in self._ignore:
                continue
            key = (finding.kind, finding.subject)
            if finding.severity == "info":
                transitions.append(Transition(finding, over=False))
                continue
            seen.add(key)
            held = self.open.get(key)
            if held is None:
                self.open[key] = Open(finding, step)
                transitions.append(Transition(finding, over=False))
            else:
                held.finding, held.clean = finding, 0
        kinds = set(looked)
        for key in [key for key in self.open if key[0] in kinds and key not in seen]:
            held = self.open[key]
            held.clean += 1
            if held.clean >= _CLEAN_LOOKS.get(key[0], 1):
                del self.open[key]
                transitions.append(Transition(held.finding, over=True))
        return transitions

    def of_group(self, group: str) -> Finding | None:
        """The open verdict of highest precedence about a group or the whole run."""
        found = [held.finding for held in self.open.values() if held.finding.subject in (group, "")]
        return min(found, key=lambda one: one.rank) if found else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "open": [
                {
                    "kind": held.finding.kind,
                    "subject": held.finding.subject,
                    "tensors": list(held.finding.tensors),
                    "cause": held.finding.cause,
                    "numbers": dict(held.finding.numbers),
                    "since": held.since,
                    "clean": held.clean,
                }
                for held in self.open.values()
            ]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.open = {
            (entry["kind"], entry["subject"]): Open(
                Finding(
                    entry["kind"],
                    entry["subject"],
                    tuple(entry["tensors"]),
                    entry["cause"],
                    "warning",
                    entry["numbers"],
                ),
                int(entry["since"]),
                int(entry["clean"]),
            )
            for entry in state["open"]
        }
