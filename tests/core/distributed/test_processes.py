"""Two and three processes over gloo: equal to one process, and every fault told instead of a hang or a silent drift."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_core.distributed.alignment import fingerprint

from .worker import Task

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its processes")

ROOT = Path(__file__).resolve().parents[3]


ROUNDS: list[list[tuple[float, list[str]]]] = [
    [
        (30.0, ["normal", "out of memory", "poison", "stop", "first killed"]),
        (30.0, ["dtype", "uneven data", "one ulp", "not summed", "killed"]),
        (30.0, ["dies"]),
    ],
    [(2.0, ["slow first", "stalled"])],
]
"""Groups, each with the seconds its collectives wait, and what happens in it; those of a round run together. A killed
process tells nothing, and its group ends with it."""

Facts = dict[str, list[dict[str, Any]]]


@functools.cache
def launched(count: int) -> Facts:
    """Run all groups with `count` processes each; facts by scenario, in order of rank."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.distributed.worker", str(count), json.dumps(ROUNDS)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    lines = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda line: line["rank"])
    names = [name for groups in ROUNDS for _, scenarios in groups for name in scenarios]
    facts: Facts = {name: [line for line in lines if line["scenario"] == name] for name in names}
    for name, told in facts.items():
        assert len(told) == count - ("killed" in name), f"{name}: {told}\n{done.stderr[-3000:]}"
    return facts


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.slow)])
def count(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def found(count: int) -> Facts:
    return launched(count)


@pytest.fixture(scope="module")
def alone() -> Task:
    """The unbroken run in one process."""
    task = Task(None)
    for number in range(3):
        task.step(number)
    return task


def assert_like(facts: dict[str, Any], alone: Task) -> None:
    torch.testing.assert_close(torch.tensor(facts["weights"]), torch.tensor(alone.weights()), rtol=1e-6, atol=1e-6)


def test_equal_to_one_process_and_faults_that_are_got_over(found: Facts, count: int, alone: Task) -> None:
    for name in ("normal", "out of memory", "poison", "stop", "slow first"):
        facts = found[name]
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


def test_what_is_not_the_same_is_named_at_the_start_and_later(found: Facts, count: int) -> None:
    last = count - 1
    drift = f"The weights of process {last} are not those of process 0 any more at step 1"
    expected = {
        "dtype": f"process {last}: trained tensors",
        "uneven data": f"process {last}: data set",
        "one ulp": drift,
        "not summed": drift,
    }
    for name, text in expected.items():
        for facts in found[name]:
            assert text in facts["error"], name


def test_a_process_that_fails_or_is_killed_is_named_by_the_others(found: Facts, count: int) -> None:
    *others, last = found["dies"]
    assert last["error"] == "the disk of this process is gone"
    for facts in others:
        assert facts["error"] == f"Process {count - 1} failed: the disk of this process is gone"
    for facts in found["killed"]:
        assert f"Process {count - 1} did not answer within 30 s or is gone" in facts["error"]
    for facts in found["first killed"]:
        assert re.search("with it process 0 \\(|Process 0 did not answer|store of this run is gone", facts["error"])


def test_a_process_that_stalls_is_named_within_the_limit(found: Facts, count: int) -> None:
    """Collectives wait 2 s. "slow first", where process 0 works 3 s outside a step, ran in the same group unharmed."""
    for facts in found["stalled"][:-1]:
        assert f"Process {count - 1} did not answer within 2 s" in facts["error"]
        assert "any number of processes" in facts["error"]


def test_fingerprint_sees_any_bit_place_and_order() -> None:
    one, two = torch.randn(7, 3), torch.randn(5)
    whole = fingerprint([one, two])
    changed = one.clone()
    changed.view(torch.int32)[4, 1] ^= 1
    swapped = one.clone()
    swapped[0, 0], swapped[0, 1] = one[0, 1].clone(), one[0, 0].clone()
    assert fingerprint([one.clone(), two]) == whole
    assert len({whole, fingerprint([changed, two]), fingerprint([swapped, two]), fingerprint([two, one])}) == 4
