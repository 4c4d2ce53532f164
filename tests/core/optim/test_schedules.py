"""Schedules against transformers' golden values (20 steps, warm-up 4) and against the rules past the planned end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer_core.config import ScheduleConfig
from trainer_core.config_fields import BadValue
from trainer_core.config_schedule import parse_step_rules
from trainer_core.optim import learning_rate_factor, schedule_problem

GOLDEN = json.loads((Path(__file__).parents[2] / "fixtures" / "kohya_golden.json").read_text(encoding="utf-8"))["lr"]

#: The golden numbers were made with rate 1, cycles 2, power 2, smallest share 0.1 and a decay of 5 steps.
CONFIGS = {
    "constant": ScheduleConfig(),
    "constant_with_warmup": ScheduleConfig(type="constant_with_warmup", warmup_steps=4),
    "linear": ScheduleConfig(type="linear", warmup_steps=4),
    "cosine": ScheduleConfig(type="cosine", warmup_steps=0.2),
    "cosine_with_restarts": ScheduleConfig(type="cosine_with_restarts", warmup_steps=4, cycles=2),
    # Theirs ends at the absolute rate 1e-7, which at rate 1 is a share of 1e-7.
    "polynomial": ScheduleConfig(type="polynomial", warmup_steps=4, power=2.0, min_lr_ratio=1e-7),
    "inverse_sqrt": ScheduleConfig(type="inverse_sqrt", warmup_steps=4),
    "cosine_with_min_lr": ScheduleConfig(type="cosine_with_min_lr", warmup_steps=4, cycles=2, min_lr_ratio=0.1),
    "warmup_stable_decay": ScheduleConfig(
        type="warmup_stable_decay", warmup_steps=4, decay_steps=0.25, cycles=2, min_lr_ratio=0.1
    ),
}


def test_every_golden_schedule_is_tested() -> None:
    assert set(CONFIGS) == set(GOLDEN)
    assert len(GOLDEN) == 9


@pytest.mark.parametrize("name", CONFIGS)
def test_matches_golden(name: str) -> None:
    factors = [learning_rate_factor(CONFIGS[name], applied, 20) for applied in range(20)]
    assert factors == pytest.approx(GOLDEN[name], abs=1e-9)


@pytest.mark.parametrize("rate", [1.0, 1e-4, 5e-6])
def test_polynomial_ends_at_the_rate_of_sd_scripts(rate: float) -> None:
    """transformers: (rate - end) (1 - done)^power + end, an absolute end of 1e-7 whatever the rate."""
    config = ScheduleConfig(type="polynomial", warmup_steps=4, power=2.0, end_lr=1e-7)
    rates = [rate * learning_rate_factor(config, applied, 20, rate) for applied in range(25)]
    wanted = [rate * applied / 4 for applied in range(4)]
    wanted += [(rate - 1e-7) * (1 - done / 16) ** 2 + 1e-7 for done in range(16)] + [1e-7] * 5
    assert rates == pytest.approx(wanted, rel=1e-9)
    if rate == 1.0:
        assert rates[:20] == pytest.approx(GOLDEN["polynomial"], abs=1e-9)


def test_piecewise_constant_equals_diffusers() -> None:
    import torch
    from diffusers.optimization import get_piecewise_constant_schedule

    rules = "1:10,0.1:20,0.01:30,0.005"
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_piecewise_constant_schedule(optimizer, rules)
    config = ScheduleConfig(type="piecewise_constant", step_rules=rules)
    for applied in range(40):
        assert learning_rate_factor(config, applied, 40) == theirs.get_last_lr()[0]
        optimizer.step()
        theirs.step()


def test_piecewise_constant_with_shares_warmup_and_a_floor() -> None:
    config = ScheduleConfig(type="piecewise_constant", step_rules="1:0.5, 0.2:0.8, 0.01", warmup_steps=2)
    factors = [learning_rate_factor(config, applied, 10) for applied in range(12)]
    assert factors == [0.0, 0.5, 1.0, 1.0, 1.0, 0.2, 0.2, 0.2, 0.01, 0.01, 0.01, 0.01]
    floor = ScheduleConfig(type="piecewise_constant", step_rules="1:5,0.01", min_lr_ratio=0.1)
    assert learning_rate_factor(floor, 7, 10) == 0.1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "'' in '' is no number"),
        ("1:10", "the last factor has a step"),
        ("1,0.1", "'1' has no step"),
        ("1:0,0.1", "neither a whole step nor a share"),
        ("1:2.5,0.1", "neither a whole step nor a share"),
        ("1:10,0.5:10,0.1", "two factors"),
        ("-1:10,0.1", "no number from 0 on"),
        ("nan:10,0.1", "no number from 0 on"),
    ],
)
def test_step_rules_that_cannot_be_read(text: str, part: str) -> None:
    with pytest.raises(BadValue) as caught:
        parse_step_rules(text)
    assert part in caught.value.why
    assert "1:500,0.1:900,0.01" in caught.value.fix


def test_constant_with_warmup_and_constant_are_one_schedule() -> None:
    """sd-scripts refuses warm-up with constant; here both names mean the same."""
    factors = [learning_rate_factor(ScheduleConfig(warmup_steps=4), applied, 20) for applied in range(20)]
    assert factors == GOLDEN["constant_with_warmup"]


@pytest.mark.parametrize("name", CONFIGS)
def test_kind_resume_schedule_stays_at_its_end(name: str) -> None:
    """B15: past the planned end the rate neither climbs nor jumps; an extended plan is that plan from its start."""
    config = CONFIGS[name]
    ended = {learning_rate_factor(config, applied, 20) for applied in range(20, 45)}
    assert len(ended) == 1
    before, end = learning_rate_factor(config, 19, 20), ended.pop()
    assert abs(end - before) < 0.35
    fresh = [learning_rate_factor(config, applied, 40) for applied in range(20, 40)]
    assert fresh == [learning_rate_factor(config, applied, 40) for applied in range(20, 40)]
    assert end <= 1.0


@pytest.mark.parametrize("kind", ["linear", "cosine", "cosine_with_restarts", "polynomial", "cosine_with_min_lr"])
def test_decay_ends_at_the_smallest_share(kind: str) -> None:
    config = ScheduleConfig(type=kind, min_lr_ratio=0.1)
    assert learning_rate_factor(config, 10, 10) == pytest.approx(0.1)
    factors = [learning_rate_factor(config, applied, 20) for applied in range(21)]
    assert all(later <= earlier for earlier, later in zip(factors, factors[1:], strict=False))


def test_warmup_stable_decay_holds_and_then_falls() -> None:
    config = ScheduleConfig(type="warmup_stable_decay", warmup_steps=2, decay_steps=4)
    factors = [learning_rate_factor(config, applied, 10) for applied in range(11)]
    assert factors[:7] == [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert factors[8] == pytest.approx(0.5)
    assert factors[10] == 0.0


@pytest.mark.parametrize(
    ("warmup", "total", "length"), [(4, 20, 4), (0.2, 20, 4), (0.15, 20, 3), (0.04, 20, 0), (1, 20, 1), (0.999, 20, 19)]
)
def test_steps_and_shares(warmup: float, total: int, length: int) -> None:
    config = ScheduleConfig(warmup_steps=warmup)
    factors = [learning_rate_factor(config, applied, total) for applied in range(total)]
    assert sum(factor < 1 for factor in factors) == length


def test_inverse_sqrt_timescale() -> None:
    config = ScheduleConfig(type="inverse_sqrt", timescale=9)
    assert learning_rate_factor(config, 0, 100) == 1.0
    assert learning_rate_factor(config, 27, 100) == pytest.approx(0.5)
    without = ScheduleConfig(type="inverse_sqrt")
    assert learning_rate_factor(without, 100, 1000) == pytest.approx((1.01) ** -0.5)


def test_kind_step_count_warmup_longer_than_the_run_is_told_with_both_numbers() -> None:
    """B69: 50 steps of warm-up in a run of 6."""
    trouble = schedule_problem(ScheduleConfig(warmup_steps=50), 6)
    assert trouble is not None
    assert "50" in trouble
    assert "6 steps" in trouble
    decay = schedule_problem(ScheduleConfig(type="warmup_stable_decay", warmup_steps=4, decay_steps=8), 10)
    assert decay is not None
    assert "warm-up (4) and decay (8)" in decay
    assert schedule_problem(ScheduleConfig(type="warmup_stable_decay", warmup_steps=2, decay_steps=8), 10) is None
    assert schedule_problem(ScheduleConfig(warmup_steps=1), 1) is None
