"""Runs in 2 and 3 processes (gloo, CPU): false alarms, distance from one process, and killed and stalled processes.

*Normal runs*: `--runs` runs of the micro toy with settings drawn by number (batch, accumulation, dropout, optimizer,
precision, text encoders, average, validation, previews), alternately in 2 and 3 processes, weights compared at every
second step instead of every 50th. A run that does not finish is a false alarm. Every fifth run in fp32 is also made in
one process, and losses and adapter are compared.

*Faults* (`--faults`): one run in 2 and one in 3 processes. At a step a process is killed or sleeps longer than a
collective waits (every 16 steps); all are started again as a launcher would. Adapter and record must equal the
undisturbed run's, bit by bit.

Processes are forked from one that has done its imports. Finished runs are kept in benchmarks/results/processes.jsonl; a
later call goes on. Last line: {"runs", "false_alarms", "checks", "compared", "loss_difference_max",
"adapter_difference_max", "faults", "faults_survived"}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.faults import final_lora, prepare, record_of  # noqa: E402
from benchmarks.measure import RESULTS, store_result  # noqa: E402
from trainer_core import trainer as trainer_module  # noqa: E402
from trainer_core.build import create_run, run  # noqa: E402
from trainer_core.config import TrainConfig  # noqa: E402
from trainer_core.distributed.launch import run_together  # noqa: E402
from trainer_core.networks.file_check import body_hash  # noqa: E402
from trainer_core.runs.protocol import Commands  # noqa: E402

KEPT = RESULTS / "processes.jsonl"
STEPS, CHECK_EVERY = 4, 2
STALL_EVERY = 16
NORMAL_LIMIT_S, FAULT_LIMIT_S = 300.0, 12.0


@dataclass(frozen=True)
class Fault:
    """What happens to process `rank` in the forward of the step after `step`: "kill" or "stall"."""

    kind: str
    rank: int
    step: int


@dataclass
class Outcome:
    """One run. `alarm`: why it did not finish, or, with faults, what is wrong with its result; empty = nothing."""

    name: str
    processes: int
    checks: int = 0
    alarm: str = ""
    loss_difference: float | None = None
    adapter_difference: float | None = None
    faults: int = 0
    seconds: float = 0.0


def settings(number: int) -> dict[str, dict[str, Any]]:
    """Sections of run `number`; each setting that several processes must agree on is tried in some."""
    draw = random.Random(number)
    text = draw.choice((None, 0.0))
    compute = "fp16" if number % 5 == 3 else "fp32"
    return {
        "dataset": {"batch_size": draw.choice((1, 2, 3))},
        "gradient": {"accumulation": draw.choice((1, 1, 2))},
        "lora": {"rank": draw.choice((2, 4)), "dropout": draw.choice((0.0, 0.1))},
        "optimizer": {
            "type": draw.choice(("adamw", "adamw", "lion", "adafactor")),
            "te1_lr": text,
            "te2_lr": text,
            "ema_decay": draw.choice((0.0, 0.9)),
        },
        "precision": {"compute": compute, "initial_loss_scale": 64.0},
        "validation": {"enabled": draw.random() < 0.3, "split": 0.3, "every_steps": 3, "bands": 2},
        "preview": {
            "prompts": ("a red circle --w 64 --h 64 --s 2",) if draw.random() < 0.2 else (),
            "every_steps": 4,
            "at_start": False,
        },
        "checkpoint": {"every_steps": draw.choice((1, 3))},
        "run": {"seed": number},
    }


def config_of(folder: Path, output: Path, sections: dict[str, dict[str, Any]]) -> TrainConfig:
    plain: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder / "micro")},
        "dataset": {"path": str(folder / "pictures"), "workers": 0, "cache_dir": str(folder / "cache")},
        "optimizer": {"learning_rate": 1e-3},
        "run": {"output_dir": str(output), "output_name": "x", "max_train_steps": STEPS, "device": "cpu"},
    }
    config = TrainConfig()
    for name in {**plain, **sections}:
        fields = {**plain.get(name, {}), **sections.get(name, {})}
        config = replace(config, **{name: replace(getattr(config, name), **fields)})
    return config


def together(run_dir: Path, count: int, limit_s: float, fault: Fault | None = None) -> tuple[list[int], list[str]]:
    """One start of a run in `count` processes, to its end: (exit codes, each one's last line)."""
    with socket.socket() as stream:
        stream.bind(("127.0.0.1", 0))
        port = str(stream.getsockname()[1])
    logs = [run_dir / f"process-{rank}.log" for rank in range(count)]
    pids: list[int] = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            in_child(run_dir, logs[rank], limit_s, fault)
        pids.append(pid)
    codes = wait_for(pids, limit_s)
    lines = [path.read_text(encoding="utf-8", errors="replace").strip() for path in logs]
    return codes, [text.splitlines()[-1] if text else "" for text in lines]


def wait_for(pids: list[int], limit_s: float) -> list[int]:
    """Exit codes. Once one has failed the others get twice the limit, as a launcher would give them, and are killed."""
    codes: dict[int, int] = {}
    failed_at: float | None = None
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    failed_at = failed_at or (time.monotonic() if codes[pid] else None)
                elif failed_at is not None and time.monotonic() - failed_at > 2 * limit_s:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return [codes[pid] for pid in pids]


def in_child(run_dir: Path, log: Path, limit_s: float, fault: Fault | None) -> None:
    """The forked process: never returns."""
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        trainer_module.EVERY = CHECK_EVERY
        if fault is not None and os.environ["RANK"] == str(fault.rank):
            inject(fault, 1.5 * limit_s)
        result = run_together(lambda: run_dir, commands=Commands(), limit_s=limit_s)
        code = 0 if result is None else result.exit_code
        print("done" if result is None else result.message, flush=True)
    except BaseException as error:  # noqa: BLE001 - a forked process: its log and exit code are all that is left
        print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
    finally:
        os._exit(code)


def inject(fault: Fault, seconds: float) -> None:
    """Make this process fail in the forward of its step."""
    original = trainer_module.Trainer.loss

    def loss(self: Any, epoch: int, batch: Any) -> Any:
        if self.state.step == fault.step:
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(seconds)
        return original(self, epoch, batch)

    trainer_module.Trainer.loss = loss


def normal(folder: Path, number: int) -> Outcome:
    """Run `number` in 2 or 3 processes, and every fifth also in one."""
    outcome = Outcome(f"normal {number}", 2 + number % 2)
    started = time.perf_counter()
    with scratch(folder) as work:
        run_dir = create_run(config_of(folder, work / "together", settings(number))).path
        codes, lines = together(run_dir, outcome.processes, NORMAL_LIMIT_S)
        outcome.seconds = round(time.perf_counter() - started, 1)
        if any(codes):
            outcome.alarm = "; ".join(line for line, code in zip(lines, codes, strict=True) if code)
            return outcome
        losses = record_of(run_dir)
        outcome.checks = len(losses) // CHECK_EVERY
        if number % 5 == 0:
            alone = run(create_run(config_of(folder, work / "alone", settings(number))).path)
            pairs = zip(record_of(alone.run_dir), losses, strict=True)
            outcome.loss_difference = max(abs(one - other) / abs(one) for (_, one), (_, other) in pairs)
            outcome.adapter_difference = difference(final_lora(alone.run_dir), final_lora(run_dir))
    return outcome


def difference(one: Path, other: Path) -> float:
    """The distance of two adapters, over the norm of the first."""
    import torch
    from safetensors.torch import load_file

    left, right = load_file(one), load_file(other)
    apart = sum(float((left[name].double() - right[name].double()).pow(2).sum()) for name in left)
    norm = sum(float(value.double().pow(2).sum()) for value in left.values())
    return float(torch.tensor(apart / norm).sqrt())


def with_faults(folder: Path, count: int) -> Outcome:
    """One run whose processes are killed and stalled, each time started again; judged by the undisturbed run."""
    steps = 2 * STALL_EVERY + 2
    last = count - 1
    faults = [Fault("kill", last, 3), Fault("kill", 0, 7)]
    faults += [Fault("stall", last, STALL_EVERY), Fault("stall", 0, 2 * STALL_EVERY)]
    outcome = Outcome(f"faults {count}", count, faults=len(faults))
    sections = {
        "dataset": {"batch_size": 3},
        "lora": {"rank": 2, "preset": "attention", "dropout": 0.1},
        "optimizer": {"te1_lr": 0.0, "te2_lr": 0.0},
        "validation": {"enabled": False},
        "checkpoint": {"every_steps": 4},
        "run": {"seed": 5, "max_train_steps": steps},
    }
    started = time.perf_counter()
    with scratch(folder) as work:
        whole = create_run(config_of(folder, work / "whole", sections)).path
        disturbed = create_run(config_of(folder, work / "disturbed", sections)).path
        codes, lines = together(whole, count, NORMAL_LIMIT_S)
        if any(codes):
            outcome.alarm = f"the undisturbed run failed: {lines}"
            return outcome
        for fault in faults:
            codes, lines = together(disturbed, count, FAULT_LIMIT_S, fault)
            print(f"{count} processes, {fault}: {lines}", flush=True)
            if not any(codes):
                outcome.alarm = f"{fault} did not end the run"
                return outcome
        codes, lines = together(disturbed, count, NORMAL_LIMIT_S)
        if any(codes):
            outcome.alarm = f"the last start failed: {lines}"
        elif body_hash(final_lora(disturbed)) != body_hash(final_lora(whole)):
            outcome.alarm = "the final adapter differs from the undisturbed run's"
        elif record_of(disturbed) != record_of(whole):
            outcome.alarm = "the record differs from the undisturbed run's"
        outcome.checks = steps // CHECK_EVERY
    outcome.seconds = round(time.perf_counter() - started, 1)
    return outcome


@contextlib.contextmanager
def scratch(folder: Path) -> Any:
    work = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    yield work
    shutil.rmtree(work)  # kept after an error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--faults", action="store_true", help="also the runs with faults, in 2 and 3 processes")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this long; the next call goes on")
    parser.add_argument("--fresh", action="store_true", help="forget kept results")
    parser.add_argument("--smoke", action="store_true", help="one normal run, nothing kept")
    arguments = parser.parse_args()
    if arguments.fresh:
        KEPT.unlink(missing_ok=True)
    kept = [] if arguments.smoke or not KEPT.exists() else KEPT.read_text(encoding="utf-8").splitlines()
    outcomes = {outcome.name: outcome for outcome in (Outcome(**json.loads(line)) for line in kept)}
    folder = Path(tempfile.mkdtemp(prefix="safe-scaler-processes-"))
    prepare(folder)
    begun = time.perf_counter()
    names = [f"normal {number}" for number in range(1 if arguments.smoke else arguments.runs)]
    names += ["faults 2", "faults 3"] if arguments.faults else []
    for name in names:
        if name in outcomes or (arguments.minutes and time.perf_counter() - begun > arguments.minutes * 60):
            continue
        kind, number = name.split()
        outcomes[name] = normal(folder, int(number)) if kind == "normal" else with_faults(folder, int(number))
        print(json.dumps(asdict(outcomes[name])), flush=True)
        if not arguments.smoke:
            with KEPT.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(outcomes[name])) + "\n")
    shutil.rmtree(folder)
    report(list(outcomes.values()), store=not arguments.smoke)


def report(outcomes: list[Outcome], *, store: bool) -> None:
    runs = [outcome for outcome in outcomes if not outcome.faults]
    disturbed = [outcome for outcome in outcomes if outcome.faults]
    losses = [outcome.loss_difference for outcome in runs if outcome.loss_difference is not None]
    adapters = [outcome.adapter_difference for outcome in runs if outcome.adapter_difference is not None]
    summary = {
        "runs": len(runs),
        "false_alarms": sum(bool(outcome.alarm) for outcome in runs),
        "checks": sum(outcome.checks for outcome in runs),
        "compared": len(losses),
        "loss_difference_max": max(losses, default=None),
        "adapter_difference_max": max(adapters, default=None),
        "faults": sum(outcome.faults for outcome in disturbed),
        "faults_survived": sum(outcome.faults for outcome in disturbed if not outcome.alarm),
    }
    if store:
        store_result("processes", summary)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
