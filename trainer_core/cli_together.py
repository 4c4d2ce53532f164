"""`train` and `resume` under torchrun or accelerate launch."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .config import TrainConfig
from .console import ConsoleProgress
from .errors import Problem, TrainerError

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def launched() -> int:
    """How many processes a launcher started for this run; 1 without one."""
    return int(os.environ.get("WORLD_SIZE") or "1")


def speaks() -> bool:
    """Whether this is the process that talks to the user."""
    return launched() == 1 or (os.environ.get("RANK") or "0") == "0"


def launch_problem() -> Problem | None:
    """What is wrong where several processes were asked for, but each would train a run of its own.

    accelerate launch starts a single process on a machine without several GPUs, whatever --num_processes says; that it
    was more than 1 shows in MASTER_ADDR. mpirun tells its processes nothing that torch reads.
    """
    known = os.environ
    if "WORLD_SIZE" in known:
        return None
    if {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"} <= set(known):
        why = "was asked for several processes but started one, as it does where it sees no two GPUs"
        fix = "Add --multi_gpu (on a CPU too), use torchrun --nproc_per_node N, or start it with --num_processes 1."
        return Problem("accelerate launch", "one process", why, fix)
    count = next((known[name] for name in _MPI_SIZES if known.get(name, "1") != "1"), None)
    if count is not None:
        why = "started processes that do not know each other: each would train a run of its own"
        return Problem("mpirun", f"{count} processes", why, "Use torchrun --nproc_per_node N or accelerate launch.")
    return None


def start_or_go_on(config: TrainConfig, notes: list[str]) -> Path:
    """A new run, or the one that these processes trained before their launcher restarted them (torchrun
    --max-restarts). Called in process 0."""
    from .prepare import create_run
    from .runs.registry import list_runs

    launch = _launch()
    if launch and int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0") > 0:
        for run in list_runs(Path(config.run.output_dir).expanduser()):
            if not run.problem and run.folder.read_config().get("launch") == launch:
                print(f"restarted by the launcher: going on with {run.folder.path}", flush=True)
                return run.folder.path
    return create_run(config, notes, extra={"launch": launch} if launch else None).path


def _launch() -> str:
    """Identity of the launcher that started this process; the same after it restarts its processes."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{name} {socket.gethostname()} {os.getppid()}" if name else ""


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

    return train_together(prepare, limit_s=limit_of(from_dict(RunFolder(run_dir).read_run()["config"])), around=around)


def train_together(prepare: Callable[[], Path], *, limit_s: float, around: Callable[[Path], Any]) -> int:
    """The command line's `run_together`: progress and messages in process 0. Returns the exit code."""
    from .libraries import import_libraries

    import_libraries()
    from .distributed.launch import run_together
    from .runs.protocol import Commands, stop_on_signals

    commands = Commands()
    console = ConsoleProgress()
    with stop_on_signals(commands):
        try:
            result = run_together(prepare, commands=commands, sink=console, limit_s=limit_s, around=around)
        except TrainerError as error:
            console.close()
            from .distributed.processes import ToldElsewhereError

            if speaks():
                print(f"safe-scaler: {error}", file=sys.stderr)
            elif not isinstance(error, ToldElsewhereError):
                print(f"safe-scaler: process {os.environ.get('RANK')}: {error}", file=sys.stderr)
            return 1
    console.close()
    if result is None:
        return 0
    tell_files(result.lora, result.report, result.run_dir, go_on=result.status == "stopped" and result.step > 0)
    if result.status == "failed":
        print(f"safe-scaler: {result.message}", file=sys.stderr)
    return result.exit_code


def tell_files(lora: Path | None, report: Path | None, run_dir: Path, *, go_on: bool) -> None:
    """What a run left, and with `go_on` the command that goes on with it, unless its folder is gone."""
    for name, path in (("LoRA", lora), ("Report", report), ("Run", run_dir)):
        if path is not None:
            print(f"{name + ':':8}{path}")
    if go_on and (run_dir / "config.json").exists():
        print(f"Go on:  {program()} resume {run_dir}")


def program() -> str:
    """How this program was started, as it is typed: a command that is printed must work where it is read."""
    if told := os.environ.get("SAFE_SCALER_PROGRAM"):  # set by run.py, whose environment is no part of PATH
        return told
    return "python -m trainer_core" if Path(sys.argv[0]).name == "__main__.py" else "safe-scaler"
