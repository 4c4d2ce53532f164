"""Stateless draws: golden vectors, independence from everything but the key, and plain statistics."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch

from trainer_core.draws import Draws, sample_key


def test_golden_vectors() -> None:
    """A change of any of these numbers changes every run that was ever made with a seed."""
    draws = Draws(1234)
    assert sample_key("a/b.png", "00ff") == "af98c4f1d78ac76c9758c32f9bdc0cc1:0"
    assert sample_key("a/b.png", "00ff", 2) == "af98c4f1d78ac76c9758c32f9bdc0cc1:2"
    assert draws.normal(0, "s", "noise", (4,)).tolist() == [
        0.13134239614009857,
        -0.9704974889755249,
        0.6952099800109863,
        -0.7256107330322266,
    ]
    assert draws.normal(0, "s", "noise", (2,), index=1).tolist() == [-0.2637641131877899, 1.1053394079208374]
    assert Draws(1234, attempt=1).normal(0, "s", "noise", (2,)).tolist() == [0.9763340353965759, 0.3445172607898712]
    assert draws.uniform(3, "s", "timestep", (3,)).tolist() == [
        0.8332576751708984,
        0.7505342960357666,
        0.7213330268859863,
    ]
    assert draws.integer(0, 1000, 2, "s", "timestep") == 86
    assert draws.permutation(8, 1).tolist() == [0, 5, 2, 3, 6, 7, 1, 4]


def test_shapes_and_types() -> None:
    draws = Draws(0)
    noise = draws.normal(0, "s", "noise", (2, 4, 8, 8))
    assert noise.shape == (2, 4, 8, 8)
    assert noise.dtype == torch.float32
    assert noise.device.type == "cpu"
    assert draws.uniform(0, "s", "u").shape == ()
    assert draws.uniform(0, "s", "u").dtype == torch.float32
    assert draws.normal(0, "s", "n", ()).shape == ()


def test_every_part_of_the_key_counts() -> None:
    seen: dict[tuple[float, ...], tuple[object, ...]] = {}
    for seed, attempt, epoch, sample, purpose, index in product((0, 1), (0, 1), (0, 1), ("a", "b"), ("n", "m"), (0, 1)):
        values = tuple(Draws(seed, attempt).normal(epoch, sample, purpose, (2,), index).tolist())
        assert values not in seen, f"{(seed, attempt, epoch, sample, purpose, index)} draws as {seen.get(values)}"
        seen[values] = (seed, attempt, epoch, sample, purpose, index)
    assert len(seen) == 64


def test_neighbouring_keys_do_not_run_together() -> None:
    """'1' + '12' and '11' + '2' must not be one key: the parts are separated before hashing."""
    assert Draws(1).normal(12, "s", "n", (2,)).tolist() != Draws(11).normal(2, "s", "n", (2,)).tolist()
    assert sample_key("a", "bc") != sample_key("ab", "c")


def test_order_of_calls_and_global_state_do_not_matter() -> None:
    draws = Draws(7)
    first = draws.normal(0, "a", "noise", (3,))
    for seed in (0, 99):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        draws.normal(5, "other", "noise", (100,))
        assert torch.equal(draws.normal(0, "a", "noise", (3,)), first)


def test_draws_leave_global_state_alone() -> None:
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())  # type: ignore[union-attr]
    Draws(7).normal(0, "a", "noise", (1000,))
    Draws(7).permutation(100, 3)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[union-attr]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_permutation_is_one_and_ignores_attempts() -> None:
    for epoch in range(5):
        order = Draws(3).permutation(50, epoch)
        assert sorted(order.tolist()) == list(range(50))
        assert np.array_equal(order, Draws(3, attempt=4).permutation(50, epoch))
    assert Draws(3).permutation(50, 0).tolist() != Draws(3).permutation(50, 1).tolist()
    assert Draws(3).permutation(50, 0).tolist() != Draws(4).permutation(50, 0).tolist()


def test_statistics() -> None:
    normal = torch.stack([Draws(0).normal(0, f"sample {i}", "noise", (64,)) for i in range(500)])
    assert abs(normal.mean().item()) < 0.02
    assert abs(normal.std().item() - 1) < 0.02
    uniform = torch.stack([Draws(0).uniform(0, f"sample {i}", "t") for i in range(4000)])
    assert 0 <= uniform.min().item() < uniform.max().item() < 1
    assert abs(uniform.mean().item() - 0.5) < 0.02
    integers = [Draws(0).integer(0, 10, 0, f"sample {i}", "t") for i in range(4000)]
    assert set(integers) == set(range(10))


def test_paths_that_are_no_unicode_have_a_key() -> None:
    assert sample_key("bad\udcff.png", "00") != sample_key("bad.png", "00")


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_any_seed(seed: int) -> None:
    assert torch.isfinite(Draws(seed).normal(0, "s", "n", (10,))).all()
