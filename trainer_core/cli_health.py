"""Commands about the health of a run: `health RUN` shows its table, `drill` breaks a run on purpose."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path


def health(words: Sequence[str]) -> int:
    """`health RUN`: the table of the newest full measurement and the open verdicts."""
    from .errors import CheckpointError
    from .health.engine import RING_NAME
    from .health.rows import table_text
    from .runs.folder import RunFolder
    from .runs.record import open_readonly

    parser = argparse.ArgumentParser(prog="safe-scaler health", description=health.__doc__)
    parser.add_argument("run", help="the run folder")
    parser.add_argument("--json", action="store_true", help="every measurement as JSON lines")
    parser.add_argument(
        "--ring", action="store_true", help="the last steps from the flight recorder, also after a crash"
    )
    asked = parser.parse_args(list(words))
    folder = RunFolder(Path(asked.run))
    if asked.ring:
        _print_ring(folder.path / RING_NAME)
        return 0
    with open_readonly(folder.database_path) as record:
        rows = record.health()
        verdicts = record.events("Verdict")
    if not rows:
        raise CheckpointError(
            f"The run {folder.path} holds no health figures: it has not begun, or health.enabled is off."
        )
    if asked.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    last = rows[-1]["step"]
    print(f"Gradient health at step {last}")
    print(table_text([(row["module"], row["data"]) for row in rows if row["step"] == last]))
    for event in verdicts:
        print(f"step {event['step']}: {event['data']['kind']}: {event['data']['sentence']}")
    return 0


def _print_ring(path: Path) -> None:
    from .health.ring import read_ring

    print(f"{'step':>7} {'outcome':<13} {'loss':>10} {'norm':>10} {'scale':>10} {'clip':>7}  tensors without gradient")
    records = read_ring(path)
    most = max((len(record.norms) for record in records), default=0)
    for record in records:
        print(
            f"{record.step:>7} {record.outcome:<13} {record.loss:>10.4g} {record.grad_norm:>10.3g} "
            f"{record.loss_scale:>10g} {record.clip:>7.3f}  {most - len(record.norms)}"
        )


def drill(words: Sequence[str]) -> int:
    """`drill [FAULT...]`."""
    from .drill.command import drill as command

    return command(words)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"health": health, "drill": drill}
