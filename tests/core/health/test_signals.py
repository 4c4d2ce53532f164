"""Full measurements against direct computation, and the range of gradients against known distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from health_records import fast

from trainer_core.health.dynamic_range import group_range, range_table, ranges, recommended_scale
from trainer_core.health.groups import describe
from trainer_core.health.headroom import ForwardHeadroom, headroom_text
from trainer_core.health.records import HIGHEST_EXPONENT, LOWEST_EXPONENT, SlowRecord
from trainer_core.health.signals import UpdateProbe
from trainer_core.health.slope import slope_interval

DOWN = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_q.lora_down.weight"
UP = DOWN.replace("lora_down", "lora_up")


class Small:
    """One adapter of rank 4 with an AdamW of its own."""

    def __init__(self, rate: float = 1e-2, width: int = 32) -> None:
        generator = torch.Generator().manual_seed(1)
        self.down = torch.nn.Parameter(torch.randn(4, width, generator=generator))
        self.up = torch.nn.Parameter(torch.randn(width, 4, generator=generator) * 0.1)
        group = {"params": [self.down, self.up], "names": [DOWN, UP], "lr": rate, "part": "unet"}
        self.optimizer = torch.optim.AdamW([group], weight_decay=0.0)
        self.live = [(describe(DOWN, "unet"), self.down), (describe(UP, "unet"), self.up)]
        self.probe = UpdateProbe(self.live, self.optimizer)
        self.tensors = {tensor.name: tensor for tensor, _ in self.live}

    def step(self, down: torch.Tensor, up: torch.Tensor, *, clip: float = 1.0) -> SlowRecord:
        self.down.grad, self.up.grad = down, up
        self.probe.due = True
        self.optimizer.step()
        self.probe.bind(fast(self.tensors, clip=clip))
        ((_, record),) = self.probe.ready()
        return record


def grads(seed: int = 0, scale: float = 1.0, width: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(4, width, generator=generator) * scale, torch.randn(width, 4, generator=generator) * scale)


def test_figures_equal_direct_computation() -> None:
    small = Small()
    down, up = grads()
    down[0] = 0.0
    before_a, before_b = small.down.detach().clone(), small.up.detach().clone()
    record = small.step(down.clone(), up.clone(), clip=0.5)
    a, b = record.tensors[DOWN], record.tensors[UP]
    moved_a, moved_b = small.down.detach() - before_a, small.up.detach() - before_b
    assert a.zero == pytest.approx(0.25)
    assert a.changed == pytest.approx(float((moved_a != 0).float().mean()))
    assert a.grad == pytest.approx(2 * float(down.norm()), rel=1e-5), "unclipped again"
    assert b.amax == pytest.approx(2 * float(up.abs().max()), rel=1e-5)
    assert b.weight == pytest.approx(float(small.up.detach().norm()), rel=1e-5)
    assert b.update == pytest.approx(float(moved_b.norm()), rel=1e-5)
    wanted = math.log10(float((moved_b @ before_a).norm()) / float((before_b @ moved_a).norm()))
    assert record.quotients[DOWN.partition(".")[0]] == pytest.approx(wanted, abs=1e-4)
    assert (b.age, b.rate, b.dtype, b.in_optimizer) == (1.0, 1e-2, "float32", True)
    assert b.rms == pytest.approx(1.0, abs=1e-3), "at the first step v is g squared"


def test_consistency_of_noise_and_of_a_constant_gradient() -> None:
    noise, constant = Small(), Small()
    for step in range(150):
        random = noise.step(*grads(step))
        same = constant.step(*grads(0))
    floor = (1 - 0.9) / (1 + 0.9)
    assert random.tensors[DOWN].consistency == pytest.approx(floor, rel=0.5)
    assert same.tensors[DOWN].consistency == pytest.approx(1.0, rel=0.02)
    assert same.tensors[DOWN].spread > 0.5


def test_a_tensor_outside_the_optimizer_is_seen_by_identity() -> None:
    small = Small()
    small.live[0] = (small.live[0][0], torch.nn.Parameter(small.down.detach().clone()))
    small.live[0][1].grad = torch.ones(4, 32)
    record = small.step(*grads())
    assert not record.tensors[DOWN].in_optimizer
    assert record.tensors[DOWN].changed == 0.0
    assert record.tensors[UP].in_optimizer


def test_a_tensor_without_a_gradient_is_told_apart_from_zero() -> None:
    small = Small()
    small.up.grad, small.probe.due = torch.zeros(32, 4), True
    small.optimizer.step()
    small.probe.bind(fast(small.tensors))
    ((_, record),) = small.probe.ready()
    assert not record.tensors[DOWN].has_gradient
    assert record.tensors[UP].has_gradient
    assert record.tensors[UP].zero == 1.0


def test_big_tensors_are_sampled_and_norms_are_near() -> None:
    small = Small(width=20_000)
    down, up = grads(width=20_000)
    record = small.step(down.clone(), up.clone())
    assert record.tensors[DOWN].grad == pytest.approx(float(down.norm()), rel=0.1)
    assert record.tensors[UP].zero == 0.0
    assert -1 < record.quotients[DOWN.partition(".")[0]] < 3


def test_nothing_is_measured_when_nothing_is_due() -> None:
    small = Small()
    small.down.grad, small.up.grad = grads()
    small.optimizer.step()
    assert not small.probe.waiting
    small.probe.close()


@pytest.mark.parametrize(("exponent", "zeros"), [(0, 0.23), (8, 9e-4), (12, 6e-5)])
def test_flushed_share_of_a_known_distribution(exponent: int, zeros: float) -> None:
    """|g| ~ 1e-7 N(0, 1): the shares that fp16 makes 0 at S = 2^0, 2^8, 2^12 (measured by casting)."""
    values = np.abs(np.random.default_rng(0).standard_normal(400_000)) * 1e-7
    places = np.floor(np.log2(values)).astype(int) - LOWEST_EXPONENT
    counts = np.bincount(places, minlength=HIGHEST_EXPONENT - LOWEST_EXPONENT + 1)
    found = group_range("down1.cross", counts.tolist(), 0, float(values.max()), 2.0**exponent)
    cast = float(np.mean((values * 2.0**exponent).astype(np.float16) == 0))
    assert cast == pytest.approx(zeros, rel=0.05, abs=3 * math.sqrt(zeros / len(values)))
    # fp16 rounds to nearest, so half of the last octave survives: flushed counts all of it.
    assert cast <= found.flushed <= 2.2 * cast + 1e-4


def test_the_range_table_tells_which_groups_overflow_in_fp16_only() -> None:
    small = Small()
    record = small.step(*grads(scale=1e-3))
    (fine,) = ranges(record, small.tensors, 256.0)
    assert not fine.overflows_fp16
    assert fine.suits_fp16
    assert 2.0 <= math.log2(65504 / (fine.amax * fine.best_scale)) < 3.0
    assert recommended_scale([fine]) == fine.best_scale
    (hot,) = ranges(record, small.tensors, 2.0**25)
    assert hot.overflows_fp16
    assert not hot.overflows_bf16
    assert "OVERFLOWS in fp16, not in bf16" in range_table([hot])
    wide = [0] * (HIGHEST_EXPONENT - LOWEST_EXPONENT + 1)
    wide[-45 - LOWEST_EXPONENT], wide[10 - LOWEST_EXPONENT] = 500, 500
    unfit = group_range("down1.cross", wide, 0, 2.0**10.5, 1.0)
    assert (unfit.suits_fp16, unfit.format) == (False, "bf16")


class _Block(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.resnets = torch.nn.ModuleList([torch.nn.Identity()])
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.resnets[0](x * self.factor))


@pytest.mark.parametrize(("largest", "told"), [(4e4, "Set precision.compute"), (1e4, "Watch it"), (1e3, "")])
def test_activations_near_fp16s_end_are_told(largest: float, told: str) -> None:
    unet = torch.nn.Module()
    unet.down_blocks = torch.nn.ModuleList([_Block(largest)])
    headroom = ForwardHeadroom(unet, every=5)
    found = {}
    for step in range(1, 12):
        unet.down_blocks[0](torch.tensor([-1.0, 0.5]))
        if seen := headroom.turn(step):
            found[step] = seen
    assert set(found) == {6, 11}, "every fifth step, told one step later"
    assert found[6] == {"down_blocks.0.resnets.0": pytest.approx(math.log2(65504 / largest))}
    text = headroom_text(found[6])
    assert told in text
    assert bool(text) == bool(told)


def test_slope_of_noise_is_seldom_called_a_decline() -> None:
    """Lognormal noise of 0.3 decades: the interval lies below the limit in at most 1 % of series."""
    generator = np.random.default_rng(0)
    wrong = sum(slope_interval(generator.normal(0, 0.3, 100))[2] < -0.003 for _ in range(100))
    assert wrong <= 1
    slope, low, high = slope_interval(-0.02 * np.arange(100) + generator.normal(0, 0.1, 100))
    assert slope == pytest.approx(-0.02, abs=0.002)
    assert low < slope < high < -0.003
