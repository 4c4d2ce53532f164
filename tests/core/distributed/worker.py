"""Groups of processes on a small network, with faults; started by test_processes.py. Prints JSON lines.

The processes are forked from this one after its imports, which take longer than everything else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn

from trainer_core.accumulation import Accumulation
from trainer_core.config import OptimizerConfig, PrecisionConfig
from trainer_core.distributed.alignment import check_start, check_weights, describe_optimizer
from trainer_core.distributed.processes import Processes
from trainer_core.distributed.reduction import Reduction
from trainer_core.errors import TrainerError
from trainer_core.memory.ladder import MemoryLadder
from trainer_core.optim import Precision, build_optimizer
from trainer_core.step_work import StepWork

from .forking import fork_ranks

WIDTH = 5


class Task:
    """Steps on a layer with an adapter; `third` is a parameter that never gets a gradient."""

    def __init__(self, processes: Processes | None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.frozen = torch.randn(WIDTH, WIDTH, generator=generator)
        self.down = nn.Parameter(torch.randn(2, WIDTH, generator=generator))
        self.up = nn.Parameter(torch.randn(WIDTH, 2, generator=generator))
        self.third = nn.Parameter(torch.ones(3))
        named = {"down": self.down, "up": self.up, "third": self.third}
        self.optimizer = build_optimizer({"unet": named}, OptimizerConfig(learning_rate=1e-2), {})
        self.precision = Precision(PrecisionConfig(), "fp32", torch.device("cpu"))
        self.told: list[str] = []
        self.fail_at: set[int] = set()
        self.poison_at: set[int] = set()
        self.calls = 0
        self.stop = False
        self.reduction = None if processes is None else Reduction(processes)
        self.accumulation = Accumulation(
            self.precision, self.optimizer, torch.device("cpu"), compute_loss=self._loss, area=lambda refs: (8, 8),
            should_stop=lambda: self.stop, ladder=MemoryLadder(tell=self.told.append), reduction=self.reduction,
        )  # fmt: skip

    def _loss(self, epoch: int, refs: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls in self.fail_at:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        x_BD = torch.stack([torch.sin(torch.arange(WIDTH) * (ref + 1.0)) for ref in refs])
        y_BD = x_BD @ self.frozen.T + (x_BD @ self.down.T) @ self.up.float().T
        loss_B = (torch.tanh(y_BD) - x_BD).pow(2).mean(1)
        return loss_B * float("nan") if self.calls in self.poison_at else loss_B

    def step(self, number: int) -> str:
        refs = tuple(range(number * 5, number * 5 + 3))
        work: Any = StepWork(number, (refs, (number + 90, number + 91)), 5)
        reading = self.accumulation.measure(work)
        if reading is None:
            return "stopped"
        verdict = self.precision.judge(self.optimizer, reading)
        if verdict.action == "apply":
            self.precision.apply(self.optimizer, reading, verdict)
        else:
            self.precision.reject(self.optimizer, verdict, reading)
        return json.dumps([verdict.action, list(reading.loss_B)]).replace("NaN", "null")

    def weights(self) -> list[float]:
        return [value for p in (self.down, self.up) for value in p.detach().float().reshape(-1).tolist()]


def fault(name: str, task: Task) -> None:
    """What goes wrong before the second step, in one process."""
    if name == "stalled":
        time.sleep(6.0)
    elif name in ("killed", "first killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "dies":
        raise TrainerError("the disk of this process is gone")
    elif name == "one ulp":
        task.up.data.view(torch.int32)[0, 0] += 1
    elif name == "not summed":
        own = Task(None)
        own.step(1)
        task.down.data.copy_(own.down.data)


def scenario(name: str, processes: Processes) -> dict[str, Any]:
    """Run one scenario in this process; the returned facts are printed."""
    last = processes.rank == processes.count - 1
    task = Task(processes)
    if name == "dtype" and last:
        task.up.data = task.up.data.double()
    extra = "more" if name == "uneven data" and last else "same"
    check_start(processes, {"trained tensors": describe_optimizer(task.optimizer), "data set": extra})
    if name == "out of memory" and last:
        task.fail_at = {2}
    if name == "poison" and last:
        task.poison_at = {2}
    steps: list[str] = []
    for number in range(3):
        if name == "slow first" and processes.first and number == 1:
            time.sleep(1.5 * processes.limit_s)  # a validation that takes longer than any collective waits
        processes.gate("step")
        if number == 1 and (processes.first if name == "first killed" else last):
            fault(name, task)
        if name == "stop" and last and number == 2:
            task.stop = True
        steps.append(task.step(number))
        if name in ("one ulp", "not summed", "normal"):
            check_weights(processes, [task.down, task.up], number)
    return {"steps": steps, "weights": task.weights(), "told": task.told}


def run_rank(rank: int, count: int, port: int, limit: float, names: list[str]) -> None:
    """One process of a group: its scenarios, one after the other."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    processes = Processes(limit_s=limit)
    for name in names:
        try:
            facts = scenario(name, processes)
        except TrainerError as error:
            facts = {"error": str(error)}
            if name == "dies":
                processes.tell_failed(error)
        line = json.dumps({"scenario": name, "rank": rank, **facts}) + "\n"
        os.write(1, line.encode())  # in one piece: the others write to the same pipe
    processes.close()


def start_group(count: int, limit: float, names: list[str]) -> list[int]:
    """Fork the processes of one group; their ids."""
    return fork_ranks(count, lambda rank, port: run_rank(rank, count, port, limit, names))


def main() -> None:
    """Arguments: number of processes in a group; JSON rounds of groups [limit_s, [scenario, ...]]. The groups of a
    round run at the same time."""
    count = int(sys.argv[1])
    for groups in json.loads(sys.argv[2]):
        pids = [pid for limit, names in groups for pid in start_group(count, limit, names)]
        for pid in pids:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
