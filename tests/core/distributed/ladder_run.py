"""A run whose steps fail in the last process only, in several forked processes; started by test_ladder.py.

Arguments: number of processes, config file (JSON), the run's folder. Every process prints one JSON line: what each of
its steps led to, and a fingerprint of its weights.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

from trainer_core.build import create_run
from trainer_core.config_io import from_dict
from trainer_core.distributed.alignment import fingerprint
from trainer_core.distributed.launch import run_together
from trainer_core.errors import TrainerError
from trainer_core.runs.protocol import Commands
from trainer_core.trainer import Trainer

from .forking import fork_ranks

Trace = list[list[Any]]


class _Poisoned(torch.autograd.Function):
    """Identity with a gradient of NaN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * math.nan


def fails(trainer: Trainer) -> bool:
    """Two recoveries do not help, the third holds for three steps; then there is no rung left."""
    state = trainer.state
    return (state.attempt < 2 and state.step >= 2) or state.step >= 5


def break_steps(trace: Trace, *, here: bool) -> list[Trainer]:
    """Let steps fail in this process when `here`, and note how each was decided. Returns the trainer, once it runs."""
    loss, step, seen = Trainer.loss, Trainer.train_step, []

    def broken(self: Trainer, epoch: int, batch: Any) -> torch.Tensor:
        loss_B = loss(self, epoch, batch)
        return _Poisoned.apply(loss_B) if here and fails(self) else loss_B  # type: ignore[no-any-return]

    def noted(self: Trainer) -> bool:
        seen[:] = [self]
        went_on = step(self)
        state, phases = self.state, self.parts.precision.phases
        counters = (state.step, state.attempt, state.skipped, state.applied, state.rejected)
        trace.append([*counters, self.lr_factor, phases.phase])
        return went_on

    Trainer.loss, Trainer.train_step = broken, noted  # type: ignore[method-assign]
    return seen


def run_rank(rank: int, count: int, port: int, config_file: str) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    trace: Trace = []
    seen = break_steps(trace, here=rank == count - 1)
    config = from_dict(json.loads(Path(config_file).read_text(encoding="utf-8")))
    events: list[Any] = []
    message = ""
    try:
        result = run_together(lambda: create_run(config).path, commands=Commands(), sink=events.append, limit_s=120.0)
        message = "" if result is None else result.message
    except TrainerError as error:
        message = str(error)
    parameters = [p for group in seen[0].parts.optimizer.param_groups for p in group["params"]]
    told = [wire["data"]["action"] for wire in events if wire["type"] == "Intervention"]
    facts = {"rank": rank, "trace": trace, "weights": fingerprint(parameters), "message": message, "told": told}
    os.write(1, (json.dumps(facts) + "\n").encode())


def main() -> None:
    count, config_file = int(sys.argv[1]), sys.argv[2]
    pids = fork_ranks(count, lambda rank, port: run_rank(rank, count, port, config_file))
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
