"""One process of a group on a small network, with a fault; started by test_processes.py. Prints JSON lines."""

from __future__ import annotations

import json
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
    elif name == "slow first":
        time.sleep(3.0)  # longer than the gate's limit in the test that asks for it
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
        processes.gate("step")
        if last and number == 1 or (name == "slow first" and processes.first and number == 1):
            fault(name, task)
        if name == "stop" and last and number == 2:
            task.stop = True
        steps.append(task.step(number))
        if name in ("one ulp", "not summed", "normal"):
            check_weights(processes, [task.down, task.up], number)
    return {"steps": steps, "weights": task.weights(), "told": task.told}


def main() -> None:
    limit = float(sys.argv[1])
    processes = Processes(limit_s=limit)
    for name in sys.argv[2:]:
        try:
            facts = scenario(name, processes)
        except TrainerError as error:
            facts = {"error": str(error)}
            if name == "dies":
                processes.tell_failed(str(error))
        print(json.dumps({"scenario": name, "rank": processes.rank, **facts}), flush=True)
    processes.close()


if __name__ == "__main__":
    main()
