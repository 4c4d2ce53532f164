"""U11 and U12: two processes (gloo) decide the same when one of them has a gradient that is not finite."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import math, sys
sys.path.insert(0, {root!r})
import torch
import torch.distributed as dist
from trainer_core.config import OptimizerConfig, PrecisionConfig
from trainer_core.optim import Precision, build_optimizer

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=rank, world_size=2)

def agree(flags):
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)

def run(shared):
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = build_optimizer({{"unet": {{"w": weight}}}}, OptimizerConfig(learning_rate=0.1))
    precision = Precision(PrecisionConfig(initial_loss_scale=16.0), "fp16", torch.device("cpu"), agree=agree)
    told = []
    for number in range(3):
        bad = math.inf if number == 1 and rank == 0 else 1.0
        loss = (weight * 1.0).sum()
        precision.backward((loss - loss.detach() + 1.0).view(1), 1)
        weight.grad.mul_(bad)
        if shared:  # U11: plain data parallel, every rank holds the mean
            dist.all_reduce(weight.grad)
            weight.grad.div_(2)
        reading = precision.read(optimizer)
        verdict = precision.judge(optimizer, reading)
        if verdict.action == "apply":
            precision.apply(optimizer, reading, verdict)
        else:
            precision.reject(optimizer, verdict, reading)
        told.append((verdict.kind, float(precision.scaler.state_dict()["scale"])))
    return told, weight.tolist()

for shared in (True, False):  # U12: gradients in shards, only the flag is shared
    print(run(shared), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="gloo over TCP needs no file, but two interpreters are slow there")
def test_u11_u12_ranks_decide_the_same() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = SCRIPT.format(root=str(ROOT), port=port)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = []
    for process in ranks:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        outputs.append(out.splitlines())
    assert outputs[0] == outputs[1]
    told = "[('', 16.0), ('OVERFLOW', 8.0), ('', 8.0)]"
    assert all(line.startswith(f"({told}") for line in outputs[0]), outputs[0]
    assert len(outputs[0]) == 2
