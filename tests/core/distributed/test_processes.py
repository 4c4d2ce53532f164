"""Two and three processes over gloo: equal to one process, and every fault told instead of a hang or a silent drift."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_core.distributed.alignment import fingerprint

from .worker import Task

ROOT = Path(__file__).resolve().parents[3]


def free_port() -> int:
    with socket.socket() as stream:
        stream.bind(("127.0.0.1", 0))
        return int(stream.getsockname()[1])


def launch(count: int, scenarios: list[str], limit: float = 30.0) -> dict[str, list[dict[str, Any]]]:
    """Run the scenarios one after the other in one group; facts by scenario, in order of rank."""
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.core.distributed.worker", str(limit), *scenarios],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(count)
    ]  # fmt: skip
    outputs: list[tuple[str, str]] = [("", "")] * count

    def collect(rank: int) -> None:
        outputs[rank] = workers[rank].communicate(timeout=600)

    threads = [threading.Thread(target=collect, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    facts: dict[str, list[dict[str, Any]]] = {name: [] for name in scenarios}
    for rank, (out, err) in enumerate(outputs):
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert len(lines) == len(scenarios), f"process {rank}: {err[-2000:]}"
        for line in lines:
            facts[line["scenario"]].append(line)
    return facts


@pytest.fixture(scope="module")
def alone() -> Task:
    """The unbroken run in one process."""
    task = Task(None)
    for number in range(3):
        task.step(number)
    return task


def assert_like(facts: dict[str, Any], alone: Task) -> None:
    torch.testing.assert_close(torch.tensor(facts["weights"]), torch.tensor(alone.weights()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_equal_to_one_process_and_faults_that_are_got_over(count: int, alone: Task) -> None:
    found = launch(count, ["normal", "out of memory", "poison", "stop", "slow first"], limit=20.0)
    for name, facts in found.items():
        assert not [fact["error"] for fact in facts if "error" in fact], name
        assert all(fact["weights"] == facts[0]["weights"] for fact in facts), f"{name}: all hold the same bits"
        assert all(fact["steps"] == facts[0]["steps"] for fact in facts), f"{name}: all decide the same"
    for name in ("normal", "out of memory", "slow first"):
        assert_like(found[name][0], alone)
    losses = [json.loads(step)[1] for step in found["normal"][0]["steps"]]
    assert all(len(step) == 5 for step in losses), "every process knows the losses of the whole step"
    told = [fact["told"] for fact in found["out of memory"]]
    assert [bool(texts) for texts in told] == [False] * (count - 1) + [True], "only the one that had no room cuts"
    actions = [json.loads(step)[0] for step in found["poison"][0]["steps"]]
    assert actions.count("reject") == 1, "NaN of one process rejects the step in all"
    assert [step == "stopped" for step in found["stop"][0]["steps"]] == [False, False, True]


def test_what_is_not_the_same_is_named_at_the_start_and_later() -> None:
    found = launch(2, ["dtype", "uneven data", "one ulp", "not summed"])
    drift = "The weights of process 1 are not those of process 0 any more at step 1"
    expected = {
        "dtype": "process 1: trained tensors",
        "uneven data": "process 1: data set",
        "one ulp": drift,
        "not summed": drift,
    }
    for name, text in expected.items():
        for facts in found[name]:
            assert text in facts["error"], name


def test_a_process_that_fails_is_named_by_the_others() -> None:
    first, last = launch(2, ["dies"])["dies"]
    assert last["error"] == "the disk of this process is gone"
    assert first["error"] == "Process 1 failed: the disk of this process is gone"


def test_a_process_that_stalls_is_named_within_the_limit() -> None:
    first = launch(2, ["stalled"], limit=2.0)["stalled"][0]
    assert "Process 1 did not answer within 2 s" in first["error"]
    assert "any number of processes" in first["error"]


def test_fingerprint_sees_any_bit_place_and_order() -> None:
    one, two = torch.randn(7, 3), torch.randn(5)
    whole = fingerprint([one, two])
    changed = one.clone()
    changed.view(torch.int32)[4, 1] ^= 1
    swapped = one.clone()
    swapped[0, 0], swapped[0, 1] = one[0, 1].clone(), one[0, 0].clone()
    assert fingerprint([one.clone(), two]) == whole
    assert len({whole, fingerprint([changed, two]), fingerprint([swapped, two]), fingerprint([two, one])}) == 4
