"""Clipping modes against numbers worked out by hand, and the watch on the clip rate against synthetic series."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from trainer_core.config import GradientConfig, OptimizerConfig, PrecisionConfig
from trainer_core.optim import Precision, StepReading, build_optimizer
from trainer_core.optim.clip_watch import ClipWatch
from trainer_core.optim.clipping import Clip, Clipping


def reading(*norms: float, weights: tuple[float, ...] = ()) -> StepReading:
    total = math.sqrt(math.fsum(norm * norm for norm in norms))
    names = tuple(f"t{place}" for place in range(len(norms)))
    return StepReading((1.0,), total, 1.0, names=names, norms=norms, weight_norms=weights)


def clip_all(clipping: Clipping, norms: list[float]) -> list[Clip]:
    clips = []
    for norm in norms:
        one = reading(norm)
        clips.append(clipping.decide(one))
        clipping.learn(one, clips[-1])
    return clips


def test_fixed() -> None:
    clipping = Clipping(GradientConfig(max_norm=1.0))
    assert clipping.decide(reading(3.0, 4.0)) == Clip(0.2, (), pytest.approx(1.0))
    assert not clipping.decide(reading(0.6, 0.8 - 1e-9)).acted
    assert not Clipping(GradientConfig(max_norm=0.0)).decide(reading(1e6)).acted


def test_zclip_warms_up_then_cuts_a_spike_to_the_reciprocal_rule() -> None:
    """log G alternates around 0 with spread 0.1; a norm of e^5 is z = 50 out: it is cut to e^(2.5 * 0.1 * 2.5 / 50)."""
    clipping = Clipping(GradientConfig(clip="zclip", max_norm=0.0, zclip_warmup=20))
    warm = [math.exp(0.1 * (-1) ** number) for number in range(20)]
    assert not any(clip.acted for clip in clip_all(clipping, warm))
    (spike,) = clip_all(clipping, [math.exp(5.0)])
    assert spike.norm == pytest.approx(math.exp(2.5 * 0.1 * 2.5 / 50), rel=1e-6)
    again = clipping.decide(reading(math.exp(5.0)))  # the clipped value was learnt, so the threshold has not moved away
    assert again.norm == pytest.approx(spike.norm, rel=0.01)
    assert not clipping.decide(reading(math.exp(0.2))).acted


def test_zclip_keeps_the_ceiling() -> None:
    clipping = Clipping(GradientConfig(clip="zclip", max_norm=0.5, zclip_warmup=20))
    assert clipping.decide(reading(1.0)).norm == pytest.approx(0.5)


def test_percentile_of_all_norms_so_far() -> None:
    clipping = Clipping(GradientConfig(clip="percentile", max_norm=0.0, clip_percentile=25.0))
    assert not clipping.decide(reading(5.0)).acted
    clip_all(clipping, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert clipping.decide(reading(10.0)).norm == pytest.approx(2.0)
    assert not clipping.decide(reading(1.5)).acted


def test_module_clipping_by_tensor_with_up_exempt_until_it_has_grown() -> None:
    clipping = Clipping(GradientConfig(clip="module", max_norm=0.0, module_clip=0.01))
    clip = clipping.decide(reading(1.0, 1.0, 0.001, weights=(10.0, 0.0, 10.0)))
    assert clip.factors == (pytest.approx(0.1), 1.0, 1.0)
    assert clip.norm == pytest.approx(math.sqrt(0.01 + 1.0 + 1e-6))


def test_module_clipping_is_applied_to_the_gradients() -> None:
    weight, up = torch.nn.Parameter(torch.full((4,), 5.0)), torch.nn.Parameter(torch.zeros(4))
    optimizer = build_optimizer({"unet": {"down": weight, "up": up}}, OptimizerConfig(learning_rate=0.1))
    gradient = GradientConfig(clip="module", max_norm=0.0, module_clip=0.01)
    precision = Precision(PrecisionConfig(), "fp32", torch.device("cpu"), gradient=gradient)
    seen: list[float] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(float(p.grad.norm()) for p in (weight, up) if p.grad is not None)
    )
    precision.backward((weight.sum() + up.sum()).view(1), 1)
    precision.apply(optimizer, precision.read(optimizer))
    assert seen == [pytest.approx(0.1), pytest.approx(2.0)]


@pytest.mark.parametrize("clip", ["zclip", "percentile"])
def test_state_round_trip(clip: str) -> None:
    norms = np.random.default_rng(3).lognormal(0, 0.5, 60).tolist()
    config = GradientConfig(clip=clip, max_norm=0.0)
    one, other = Clipping(config), Clipping(config)
    clip_all(one, norms[:30])
    other.load_state_dict(one.state_dict())
    assert clip_all(one, norms[30:]) == clip_all(other, norms[30:])


def kinds(watch: ClipWatch, norms: Any, limit: float) -> list[tuple[int, str, str]]:
    return [
        (step, news.kind, news.severity)
        for step, norm in enumerate(norms)
        for news in watch.see(float(norm), min(1.0, limit / float(norm)))
    ]


def test_saturation_is_told_once_and_taken_back() -> None:
    watch = ClipWatch()
    said = kinds(watch, [50.0] * 80, 1.0) + kinds(watch, [0.5] * 200, 1.0)
    saturation = [(step, severity) for step, kind, severity in said if kind == "CLIP-SATURATED"]
    assert [severity for _, severity in saturation] == ["warning", "ok"]
    assert saturation[0][0] == 49
    assert not [entry for entry in kinds(ClipWatch(), [2.0] * 80, 1.0) if entry[1] == "CLIP-SATURATED"]


@pytest.mark.parametrize("limit", [1.0, 2.0])
def test_drift_is_not_told_of_stationary_norms_and_is_of_threefold_ones(limit: float) -> None:
    """Lognormal, spread 0.3 decades: at most 1 % false alarms in 2,000 steps, x3 seen within 30 steps in 95 %."""
    generator, runs = np.random.default_rng(5), 20
    false = [bool(drifts(10 ** (0.3 * generator.standard_normal(2000)), limit)) for _ in range(runs)]
    assert sum(false) <= 1
    seen = 0
    for _ in range(runs):
        norms = 10 ** (0.3 * generator.standard_normal(430))
        norms[400:] *= 3
        seen += any(400 <= step < 430 for step in drifts(norms, limit))
    assert seen >= 0.95 * runs - 1


def drifts(norms: Any, limit: float) -> list[int]:
    return [step for step, kind, _ in kinds(ClipWatch(), norms, limit) if kind == "CLIP-DRIFT"]


def test_watch_state_round_trip() -> None:
    norms = 10 ** (0.3 * np.random.default_rng(7).standard_normal(400))
    norms[250:] *= 5
    one, other = ClipWatch(), ClipWatch()
    kinds(one, norms[:230], 1.0)
    other.load_state_dict(one.state_dict())
    assert kinds(one, norms[230:], 1.0) == kinds(other, norms[230:], 1.0) != []
