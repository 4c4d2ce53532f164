"""Schedules against transformers' golden values (20 steps, warm-up 4) and against the rules past the planned end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer_core.config import ScheduleConfig
from trainer_core.optim import learning_rate_factor

GOLDEN = json.loads((Path(__file__).parents[2] / "fixtures" / "kohya_golden.json").read_text(encoding="utf-8"))["lr"]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("constant", ScheduleConfig()),
        ("constant_with_warmup", ScheduleConfig(warmup_steps=4)),
        ("linear", ScheduleConfig(type="linear", warmup_steps=4)),
        ("cosine", ScheduleConfig(type="cosine", warmup_steps=0.2)),
        ("cosine_with_restarts", ScheduleConfig(type="cosine_with_restarts", warmup_steps=4, cycles=2)),
    ],
)
def test_matches_golden(name: str, config: ScheduleConfig) -> None:
    factors = [learning_rate_factor(config, applied, 20) for applied in range(20)]
    assert factors == pytest.approx(GOLDEN[name], abs=1e-7)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "cosine_with_restarts"])
def test_kind_resume_schedule_stays_at_its_end(kind: str) -> None:
    """B15: past the planned end the rate neither climbs nor jumps; extending the plan gives schedule(step, 20)."""
    config = ScheduleConfig(type=kind, min_lr_ratio=0.1)
    ended = {learning_rate_factor(config, applied, 10) for applied in range(10, 25)}
    assert len(ended) == 1 and ended.pop() == pytest.approx(1.0 if kind == "constant" else 0.1)
    extended = [learning_rate_factor(config, applied, 20) for applied in range(10, 20)]
    assert all(later <= earlier for earlier, later in zip(extended, extended[1:], strict=False))


def test_warmup_starts_at_zero_and_reaches_one() -> None:
    config = ScheduleConfig(type="linear", warmup_steps=2)
    assert [learning_rate_factor(config, applied, 8) for applied in (0, 1, 2)] == [0.0, 0.5, 1.0]
