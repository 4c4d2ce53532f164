"""`train` and `resume` under torchrun or accelerate launch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .config import TrainConfig
from .console import ConsoleProgress
from .errors import TrainerError


def launched() -> int:
    """How many processes a launcher started for this run; 1 without one."""
    return int(os.environ.get("WORLD_SIZE") or "1")


def speaks() -> bool:
    """Whether this is the process that talks to the user."""
    return launched() == 1 or (os.environ.get("RANK") or "0") == "0"


def limit_of(config: TrainConfig) -> float:
    """Seconds a process waits for another."""
    return config.run.process_timeout * 60.0


def resume_together(run_dir: Path, settings: Mapping[str, Any], *, around: Callable[[Path], Any]) -> int:
    """`train_together` for a run that goes on, with changed settings."""
    from .build import change_run
    from .config_io import from_dict, with_settings
    from .runs.folder import RunFolder

    def prepare() -> Path:
        if settings:
            change_run(run_dir, partial(with_settings, settings=settings))
        return run_dir

    return train_together(
        prepare, limit_s=limit_of(from_dict(RunFolder(run_dir).read_config()["config"])), around=around
    )


def train_together(prepare: Callable[[], Path], *, limit_s: float, around: Callable[[Path], Any]) -> int:
    """The command line's `run_together`: progress and messages in process 0. Returns the exit code."""
    from .distributed.launch import run_together
    from .runs.protocol import Commands, stop_on_signals

    commands = Commands()
    console = ConsoleProgress()
    with stop_on_signals(commands):
        try:
            result = run_together(prepare, commands=commands, sink=console, limit_s=limit_s, around=around)
        except TrainerError as error:
            console.close()
            if speaks():  # it repeats what another process failed of
                print(f"safe-scaler: {error}", file=sys.stderr)
            return 1
    console.close()
    if result is None:
        return 0
    for name, path in (("LoRA", result.lora), ("Report", result.report), ("Run", result.run_dir)):
        if path is not None:
            print(f"{name + ':':8}{path}")
    if result.status == "failed":
        print(f"safe-scaler: {result.message}", file=sys.stderr)
    return result.exit_code
