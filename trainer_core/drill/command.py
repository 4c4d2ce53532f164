"""`safe-scaler drill [FAULT...]`: put faults into a toy run, or yours, and show what is noticed, when, and what
follows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, Problem
from .faults import FAULTS, Fault, find_fault

ONSET = 24
_TAIL = 12


def drill(words: Sequence[str]) -> int:
    """The command; exit code 0 when everything was noticed in time, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="safe-scaler drill", description=__doc__)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="names or recipes (F1 ... R6); none = all")
    parser.add_argument("--list", action="store_true", help="name the faults")
    parser.add_argument("--config", help="a run of yours (TOML or JSON) instead of the micro toy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--audit", action="store_true", help="let the check before the first step see it as well")
    parser.add_argument("--json", action="store_true", help="one JSON object a fault")
    asked = parser.parse_args(list(words))
    if asked.list:
        for fault in FAULTS:
            print(f"{fault.recipe:<4} {fault.name:<22} {fault.title}; expected: {' or '.join(fault.verdicts)}")
        return 0
    chosen = [_known(name) for name in asked.faults] or list(FAULTS)
    missed = 0
    with _place() as place:
        for fault in chosen:
            outcome = rehearse(fault, place, seed=asked.seed, config_file=asked.config, audit=asked.audit)
            missed += not outcome["noticed"]
            print(json.dumps(outcome) if asked.json else _shown(outcome), flush=True)
    return 1 if missed else 0


def rehearse(
    fault: Fault, place: Path, *, seed: int, config_file: str | None = None, audit: bool = False
) -> dict[str, Any]:
    """Run one fault and say how it went. `place`: a folder for toy, pictures and runs."""
    from .run import horizon_ok, run_with, with_sections

    onset = 1 if fault.early else ONSET
    config = with_sections(_base(place, seed, config_file), fault.sections)
    steps = onset + fault.horizon + _TAIL
    config = replace(config, run=replace(config.run, max_train_steps=steps, max_train_epochs=None))
    run = run_with(config, fault.inject, seed=seed, onset=onset, audit=audit and fault.early)
    alarm = run.first()
    early_enough = horizon_ok(run, fault.verdicts, fault.horizon)
    by_audit = alarm is not None and audit and alarm.step == 0 and alarm.kind in fault.verdicts
    return {
        "fault": fault.name,
        "recipe": fault.recipe,
        "title": fault.title,
        "onset": onset,
        "expected": list(fault.verdicts),
        "horizon": fault.horizon,
        "noticed": early_enough or by_audit,
        "verdict": None if alarm is None else alarm.kind,
        "step": None if alarm is None else alarm.step,
        "sentence": "" if alarm is None else alarm.sentence,
        "culprit_right": run.named_right(),
        "also_said": sorted({one.kind for one in run.alarms} - ({alarm.kind} if alarm else set())),
        "interventions": run.interventions,
        "end": run.status,
        "steps": run.steps,
        "message": run.message,
    }


def _known(name: str) -> Fault:
    fault = find_fault(name)
    if fault is None:
        import difflib

        near = difflib.get_close_matches(name, [one.name for one in FAULTS], 1, 0.3)
        fix = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError([Problem("FAULT", name, "is not known", f"{fix}safe-scaler drill --list names them all.")])
    return fault


def _base(place: Path, seed: int, config_file: str | None) -> Any:
    from .run import drill_config

    if config_file is None:
        return drill_config(place / "micro", place / "pictures", place / "runs", steps=100, seed=seed)
    from ..config_io import load_config

    config, _ = load_config(Path(config_file), {"run.output_dir": str(place / "runs")})
    return config


@contextmanager
def _place() -> Iterator[Path]:
    """A temporary folder with the micro toy and pictures."""
    from ..toy.micro import make_micro
    from .run import drill_pictures

    with tempfile.TemporaryDirectory(prefix="safe-scaler-drill-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)
        make_micro(place / "micro", small=True)
        drill_pictures(place / "pictures")
        yield place


def _shown(outcome: dict[str, Any]) -> str:
    lines = [f"{outcome['recipe']} {outcome['fault']}: {outcome['title']} (from step {outcome['onset']})"]
    if outcome["verdict"] is None:
        lines.append("  NOT NOTICED")
    else:
        delay = outcome["step"] - outcome["onset"]
        word = "noticed" if outcome["noticed"] else "noticed as something else, or too late"
        lines.append(f"  {word}: {outcome['verdict']} at step {outcome['step']} ({delay:+d})")
        lines.append(f"  {outcome['sentence']}")
    if outcome["culprit_right"] is not None:
        lines.append(f"  named {'what was broken' if outcome['culprit_right'] else 'something else'}")
    lines += [f"  {text}" for text in outcome["interventions"][:6]]
    lines.append(f"  the run {outcome['end']} after {outcome['steps']} steps {outcome['message'][:200]}".rstrip())
    return "\n".join(lines)
