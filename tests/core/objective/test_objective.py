"""Objective against sd-scripts' golden numbers (tests/fixtures/kohya_golden.json) and against closed forms."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from trainer_core.config import ObjectiveConfig
from trainer_core.draws import Draws
from trainer_core.objective import (
    NoisedBatch,
    NoiseSchedule,
    Objective,
    elementwise_loss,
    huber_threshold,
    input_perturbation,
    multires_noise,
    offset_noise,
    snr_weight,
)
from trainer_core.objective.noise import multires_sizes

GOLDEN = json.loads((Path(__file__).parents[2] / "fixtures" / "kohya_golden.json").read_text(encoding="utf-8"))
T = torch.tensor(GOLDEN["T"])


def close(actual: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-6, atol=1e-7)


def test_schedule_matches_golden() -> None:
    plain = NoiseSchedule(prediction_type="epsilon")
    terminal = NoiseSchedule(prediction_type="v", zero_terminal_snr=True)
    close(plain.alphas_cumprod[T], GOLDEN["alphas_cumprod"])
    close(terminal.alphas_cumprod[T], GOLDEN["alphas_cumprod_ztsnr"])
    close(plain.snr[T], GOLDEN["all_snr"])
    close(terminal.snr[T], GOLDEN["all_snr_after_ztsnr_fix_is_stale"])


@pytest.mark.parametrize("gamma", [1, 5, 20])
@pytest.mark.parametrize(("kind", "suffix"), [("epsilon", "eps"), ("v", "v")])
def test_min_snr_matches_golden(gamma: int, kind: str, suffix: str) -> None:
    schedule = NoiseSchedule(prediction_type=kind)
    close(snr_weight(ObjectiveConfig(min_snr_gamma=float(gamma)), schedule, T), GOLDEN[f"minsnr{gamma}_{suffix}"])


@pytest.mark.parametrize(("kind", "suffix"), [("epsilon", "eps"), ("v", "v")])
def test_debiased_matches_golden(kind: str, suffix: str) -> None:
    schedule = NoiseSchedule(prediction_type=kind)
    close(snr_weight(ObjectiveConfig(debiased_estimation=True), schedule, T), GOLDEN[f"debiased_{suffix}"])


def test_scale_v_like_noise_matches_golden() -> None:
    config = ObjectiveConfig(scale_v_pred_loss_like_noise_pred=True)
    close(snr_weight(config, NoiseSchedule(prediction_type="v"), T), GOLDEN["scale_v"])


def test_v_like_loss_matches_golden() -> None:
    config = ObjectiveConfig(v_pred_like_loss=0.1)
    close(snr_weight(config, NoiseSchedule(prediction_type="epsilon"), T), GOLDEN["v_pred_like_0.1"])


@pytest.mark.parametrize("kind", ["constant", "exponential", "snr"])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_huber_threshold_matches_golden(kind: str, scale: float) -> None:
    config = ObjectiveConfig(loss="huber", huber_schedule=kind, huber_scale=scale)
    threshold = huber_threshold(config, NoiseSchedule(prediction_type="epsilon"), T)
    assert threshold is not None
    close(threshold, GOLDEN[f"huber_c_{kind}_scale{scale}"])


def test_huber_threshold_with_terminal_snr_is_finite() -> None:
    schedule = NoiseSchedule(prediction_type="v", zero_terminal_snr=True)
    threshold = huber_threshold(ObjectiveConfig(loss="huber"), schedule, T)
    assert threshold is not None
    close(threshold, GOLDEN["huber_c_snr_ztsnr"])


@pytest.mark.parametrize("kind", ["l2", "l1", "huber", "smooth_l1"])
def test_losses_match_golden(kind: str) -> None:
    # Two samples of two elements; the Huber threshold is 0.1 for the first and 0.5 for the second.
    difference = torch.tensor(GOLDEN["loss_l2"]).sqrt().view(2, 2)
    loss = elementwise_loss(kind, difference, torch.zeros(2, 2), torch.tensor([0.1, 0.5]))
    close(loss.flatten(), GOLDEN[f"loss_{kind}"])


def test_kind_loss_weight_is_finite_at_both_ends() -> None:
    """Timestep 0 and 999, every prediction type and schedule."""
    ends = torch.tensor([0, 999])
    for kind in ("epsilon", "v"):
        for terminal in (False, True):
            schedule = NoiseSchedule(prediction_type=kind, zero_terminal_snr=terminal)
            for config in (ObjectiveConfig(min_snr_gamma=5.0), ObjectiveConfig(debiased_estimation=True)):
                weight = snr_weight(config, schedule, ends)
                assert bool(torch.isfinite(weight).all()), (kind, terminal, config)
                assert bool((weight > 0).all())


@pytest.mark.parametrize("timestep", [10, 500, 990])
def test_targets_by_hand(timestep: int) -> None:
    latents, noise = torch.full((1, 1, 1, 1), 2.0), torch.full((1, 1, 1, 1), -1.0)
    steps = torch.tensor([timestep])
    for kind in ("epsilon", "v"):
        schedule = NoiseSchedule(prediction_type=kind)
        abar = float(schedule.alphas_cumprod[timestep])
        noisy = schedule.add_noise(latents, noise, steps).item()
        assert noisy == pytest.approx(2.0 * math.sqrt(abar) - math.sqrt(1 - abar), abs=1e-6)
        expected = -1.0 if kind == "epsilon" else -math.sqrt(abar) - 2.0 * math.sqrt(1 - abar)
        assert schedule.target(latents, noise, steps).item() == pytest.approx(expected, abs=1e-6)


def make_objective(**options: object) -> Objective:
    return Objective(NoiseSchedule(prediction_type="epsilon"), ObjectiveConfig(**options), vae_scale=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{}, {"noise_offset": 0.1}, {"multires_noise_iterations": 4}, {"ip_noise_gamma": 0.2}]
)
def test_draws_do_not_depend_on_the_batch(options: dict[str, object]) -> None:
    objective, draws = make_objective(**options), Draws(3)
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    both = objective.noised(latents, draws, 1, ["a:0", "b:0"])
    alone = objective.noised(latents[1:], draws, 1, ["b:0"])
    assert torch.equal(both.noisy_BCHW[1:], alone.noisy_BCHW)
    assert torch.equal(both.target_BCHW[1:], alone.target_BCHW)
    assert torch.equal(both.timesteps_B[1:], alone.timesteps_B)
    assert not torch.equal(objective.noised(latents, draws, 2, ["a:0", "b:0"]).noisy_BCHW, both.noisy_BCHW)


def test_latents_are_drawn_or_the_mode() -> None:
    mean_BCHW = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    std_BCHW = torch.full((2, 4, 8, 8), 0.1)
    keys = ["a", "b"]
    schedule = NoiseSchedule(prediction_type="epsilon")
    drawn, mode = (Objective(schedule, ObjectiveConfig(latents=kind), vae_scale=0.5) for kind in ("sample", "mode"))
    assert torch.equal(mode.latents(mean_BCHW, std_BCHW, Draws(1), 0, keys), mean_BCHW * 0.5)
    first = drawn.latents(mean_BCHW, std_BCHW, Draws(1), 0, keys)
    assert torch.equal(first, drawn.latents(mean_BCHW, std_BCHW, Draws(1), 0, keys))
    assert not torch.equal(first, drawn.latents(mean_BCHW, std_BCHW, Draws(1), 1, keys))
    spread = (first / 0.5 - mean_BCHW) / 0.1
    assert 0.8 < spread.std() < 1.2


def test_input_perturbation_leaves_the_target_clean() -> None:
    latents = torch.zeros(1, 4, 8, 8)
    plain = make_objective().noised(latents, Draws(1), 0, ["a:0"])
    moved = make_objective(ip_noise_gamma=0.5).noised(latents, Draws(1), 0, ["a:0"])
    assert torch.equal(plain.target_BCHW, moved.target_BCHW)
    assert not torch.equal(plain.noisy_BCHW, moved.noisy_BCHW)


def test_timesteps_respect_the_range() -> None:
    objective = make_objective(min_timestep=200, max_timestep=210)
    steps = objective.noised(torch.zeros(64, 1, 1, 1), Draws(0), 0, [f"{i}:0" for i in range(64)]).timesteps_B
    assert int(steps.min()) >= 200
    assert int(steps.max()) < 210
    assert len(set(steps.tolist())) > 5


def test_mask_and_sample_weights() -> None:
    objective = make_objective()
    latents = torch.zeros(2, 4, 4, 4)
    noised = objective.noised(latents, Draws(0), 0, ["a:0", "b:0"])
    mask = torch.zeros(2, 1, 4, 4)
    mask[:, :, :2] = 1.0
    full = objective.loss(torch.zeros_like(latents), noised)
    halves = objective.loss(torch.zeros_like(latents), noised, torch.tensor([1.0, 2.0]), mask)
    by_hand = (noised.target_BCHW[:, :, :2].square().sum(dim=(1, 2, 3)) / 64.0) * torch.tensor([1.0, 2.0])
    torch.testing.assert_close(halves, by_hand)
    torch.testing.assert_close(full, noised.target_BCHW.square().mean(dim=(1, 2, 3)))


@pytest.mark.parametrize("kind", ["epsilon", "v"])
@pytest.mark.parametrize("loss", ["l2", "l1", "huber", "smooth_l1"])
def test_pipeline_order_equals_sd_scripts(kind: str, loss: str) -> None:
    """elementwise loss -> mask -> mean over C, H, W -> sample weight (prior) -> SNR weights, in sd-scripts' order."""
    own = {"v": {"scale_v_pred_loss_like_noise_pred": True}, "epsilon": {"v_pred_like_loss": 0.3}}[kind]
    config = ObjectiveConfig(loss=loss, min_snr_gamma=5.0, debiased_estimation=True, **own)  # type: ignore[arg-type]
    schedule = NoiseSchedule(prediction_type=kind)
    generator = torch.Generator().manual_seed(4)
    prediction, target = (torch.randn(3, 4, 6, 6, generator=generator) for _ in range(2))
    timesteps, mask = torch.tensor([0, 250, 999]), torch.rand(3, 1, 6, 6, generator=generator)
    weights = torch.tensor([1.0, 0.5, 2.0])
    noised = NoisedBatch(noisy_BCHW=target, target_BCHW=target, timesteps_B=timesteps)
    made = Objective(schedule, config, vae_scale=1.0).loss(prediction, noised, weights, mask)
    for i, t in enumerate(timesteps.tolist()):
        difference = (prediction[i] - target[i]).double()
        snr = float(schedule.snr[t])
        c = float((1 - 0.1) / (1 + (1 / snr) ** 0.5) ** 2 + 0.1)
        shape = 2 * ((difference.square() + c * c).sqrt() - c)
        each = {"l2": difference.square(), "l1": difference.abs(), "huber": c * shape, "smooth_l1": shape}[loss]
        value = float((each * mask[i].double()).sum()) / each.numel() * float(weights[i])
        capped = min(snr, 1000.0)
        value *= min(snr, 5.0) / (snr + 1 if kind == "v" else snr)
        value *= capped / (capped + 1) if kind == "v" else 1 + 0.3 * (capped + 1) / capped
        value *= 1 / (capped + 1) if kind == "v" else capped**-0.5
        assert float(made[i]) == pytest.approx(value, rel=2e-6)


def test_multires_noise_is_normalised_per_sample() -> None:
    noise = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    levels = [torch.randn(3, 4, *size, generator=torch.Generator().manual_seed(2)) for size in ((8, 8), (3, 3))]
    made = multires_noise(noise, levels, 0.3)
    torch.testing.assert_close(made.std(dim=(1, 2, 3)), torch.ones(3))
    whole = multires_noise(noise, levels, 0.3, per_sample=False)
    assert float(whole.std()) == pytest.approx(1.0, abs=1e-6)
    assert multires_sizes(8, 16, [2.0, 3.0, 3.0, 3.0]) == [(8, 16), (2, 5), (1, 1)]


def test_offset_and_perturbation_are_linear() -> None:
    noise, draw = torch.ones(1, 2, 2, 2), torch.full((1, 2, 1, 1), 3.0)
    assert torch.equal(offset_noise(noise, draw, 0.5), torch.full((1, 2, 2, 2), 2.5))
    assert torch.equal(input_perturbation(noise, noise, 0.25), torch.full((1, 2, 2, 2), 1.25))
