"""Faults of sd-scripts in noise, timesteps and loss weights that are not copied: each test shows what holds here.

What is kept on purpose is tested against the golden numbers instead: the snr Huber schedule takes no scale, and SNR
weights are those of the schedule before zero terminal SNR.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_core.config import ModelConfig, ObjectiveConfig, TrainConfig
from trainer_core.config_rules_training import TRAINING_RULES, training_advice
from trainer_core.draws import Draws
from trainer_core.errors import ConfigError
from trainer_core.objective import NoiseSchedule, Objective, snr_weight

LATENTS = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
KEYS = ["a:0", "b:0", "c:0"]


def objective(kind: str = "epsilon", **options: Any) -> Objective:
    return Objective(NoiseSchedule(prediction_type=kind), ObjectiveConfig(**options), vae_scale=0.13)


def problems(model: str = "auto", **options: Any) -> list[str]:
    config = TrainConfig(model=ModelConfig(prediction_type=model), objective=ObjectiveConfig(**options))
    return [str(problem) for rule in TRAINING_RULES for problem in rule(config)]


def advice(model: ModelConfig | None = None, **options: Any) -> list[str]:
    return training_advice(TrainConfig(model=model or ModelConfig(), objective=ObjectiveConfig(**options)))


@pytest.mark.parametrize(
    "options",
    [
        {"noise_offset": 0.2, "noise_offset_random_strength": True},
        {"ip_noise_gamma": 0.2, "ip_noise_gamma_random_strength": True},
        {"noise_offset": 0.2, "adaptive_noise_scale": 0.1},
        {"multires_noise_iterations": 4},
        {"timestep_distribution": "logit_normal"},
    ],
)
def test_a_sample_is_the_same_in_every_batch(options: dict[str, Any]) -> None:
    """Theirs draws one strength and one pyramid a batch, and normalises over the batch."""
    whole = objective(**options).noised(LATENTS, Draws(1), 0, KEYS)
    for i in range(3):
        alone = objective(**options).noised(LATENTS[i : i + 1], Draws(1), 0, KEYS[i : i + 1])
        assert torch.equal(alone.noisy_BCHW[0], whole.noisy_BCHW[i])
        assert torch.equal(alone.target_BCHW[0], whole.target_BCHW[i])


def test_random_strengths_differ_from_sample_to_sample_and_stay_below_the_set_one() -> None:
    plain = objective().noised(torch.zeros(64, 4, 4, 4), Draws(1), 0, [f"{i}:0" for i in range(64)])
    moved = objective(noise_offset=0.5, noise_offset_random_strength=True).noised(
        torch.zeros(64, 4, 4, 4), Draws(1), 0, [f"{i}:0" for i in range(64)]
    )
    full = objective(noise_offset=0.5).noised(torch.zeros(64, 4, 4, 4), Draws(1), 0, [f"{i}:0" for i in range(64)])
    share = (moved.target_BCHW - plain.target_BCHW)[:, 0, 0, 0] / (full.target_BCHW - plain.target_BCHW)[:, 0, 0, 0]
    assert float(share.min()) >= -1e-3
    assert float(share.max()) <= 1.001
    assert len({round(value, 3) for value in share.tolist()}) > 50


def test_no_draw_touches_or_follows_the_global_random_state() -> None:
    """Theirs draws noise from the device's global generator, so previews and devices change a run."""
    made = objective(noise_offset=0.1, noise_offset_random_strength=True, multires_noise_iterations=3)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = made.noised(LATENTS, Draws(1), 0, KEYS)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(made.noised(LATENTS, Draws(1), 0, KEYS).noisy_BCHW, first.noisy_BCHW)


def test_adaptive_scale_follows_each_picture_and_never_turns_negative() -> None:
    latents = torch.zeros(2, 4, 4, 4)
    latents[1] = 3.0
    plain = objective().noised(latents, Draws(1), 0, KEYS[:2]).target_BCHW
    grown = objective(noise_offset=0.1, adaptive_noise_scale=0.1).noised(latents, Draws(1), 0, KEYS[:2]).target_BCHW
    fixed = objective(noise_offset=0.1).noised(latents, Draws(1), 0, KEYS[:2]).target_BCHW
    torch.testing.assert_close(grown[0], fixed[0])
    torch.testing.assert_close(grown[1] - plain[1], 4.0 * (fixed[1] - plain[1]), rtol=1e-4, atol=1e-5)
    none = objective(noise_offset=0.1, adaptive_noise_scale=-1.0).noised(latents, Draws(1), 0, KEYS[:2]).target_BCHW
    torch.testing.assert_close(none[1], plain[1])


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"adaptive_noise_scale": 0.1}, "objective.noise_offset is 0"),
        ({"noise_offset_random_strength": True}, "objective.noise_offset is 0"),
        ({"ip_noise_gamma_random_strength": True}, "objective.ip_noise_gamma is 0"),
        ({"min_timestep": 500, "max_timestep": 500}, "leaves no timestep"),
        ({"min_timestep": 600, "max_timestep": 500}, "leaves no timestep"),
    ],
)
def test_settings_without_effect_are_refused(options: dict[str, Any], part: str) -> None:
    """Theirs goes on without them, or trains one timestep only."""
    found = problems(**options)
    assert len(found) == 1
    assert part in found[0]


def test_a_huber_scale_without_effect_is_told() -> None:
    assert any("huber_scale = 2" in line for line in advice(loss="huber", huber_scale=2.0))
    assert not advice(loss="huber", huber_scale=2.0, huber_schedule="constant")


def test_weights_that_multiply_are_told() -> None:
    (line,) = advice(min_snr_gamma=5.0, debiased_estimation=True)
    assert "min_snr_gamma" in line
    assert "debiased_estimation" in line
    assert "twice" in line
    assert not advice(min_snr_gamma=5.0)


def test_zero_terminal_snr_with_an_epsilon_model_is_told() -> None:
    model = ModelConfig(zero_terminal_snr="true", prediction_type="epsilon")
    assert any("nothing to learn" in line for line in advice(model))


def test_weights_that_do_not_fit_the_model_are_refused_before_and_after_it_is_known() -> None:
    """The prediction type may only be known from the model file: the objective refuses then."""
    assert "the model predicts v" in problems("v", v_pred_like_loss=0.1)[0]
    assert "predicts noise" in problems("epsilon", scale_v_pred_loss_like_noise_pred=True)[0]
    assert not problems("auto", v_pred_like_loss=0.1)
    with pytest.raises(ConfigError, match="the model predicts v"):
        objective("v", v_pred_like_loss=0.1)
    with pytest.raises(ConfigError, match="predicts noise"):
        objective("epsilon", scale_v_pred_loss_like_noise_pred=True)


def test_kind_loss_weight_zero_is_not_off() -> None:
    """B05: gamma 0 would weigh everything with 0; it is refused, and off is written as unset."""
    assert "nothing would be learnt" in problems(min_snr_gamma=0.0)[0]
    assert problems() == []


def test_kind_loss_weight_is_finite_and_positive_everywhere() -> None:
    """All timesteps, both prediction types, both schedules, every weight and their product."""
    timesteps = torch.arange(1000)
    for kind, own in (("epsilon", "v_pred_like_loss"), ("v", "scale_v_pred_loss_like_noise_pred")):
        for terminal in (False, True):
            schedule = NoiseSchedule(prediction_type=kind, zero_terminal_snr=terminal)
            weights: dict[str, Any] = {"min_snr_gamma": 5.0, "debiased_estimation": True, own: 1}
            for options in ({name: value} for name, value in weights.items()):
                weight = snr_weight(ObjectiveConfig(**options), schedule, timesteps)
                sound = torch.isfinite(weight) & (weight > 0)
                assert bool(sound.all()), (kind, terminal, options)
            assert bool(torch.isfinite(snr_weight(ObjectiveConfig(**weights), schedule, timesteps)).all())
