from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler

from trainer_core.draws import Draws
from trainer_core.models import SDXLModel
from trainer_core.objective import NoiseSchedule
from trainer_core.validation import SAMPLERS, Conditioning, PreviewPrompt, encode_prompts, sample_latents
from trainer_core.validation.samplers import SamplingStopped, make_scheduler


def prompt(**changes: Any) -> PreviewPrompt:
    values: dict[str, Any] = {
        "text": "a red circle",
        "negative": "",
        "width": 64,
        "height": 64,
        "steps": 8,
        "guidance": 1.0,
        "seed": 3,
        "sampler": "euler",
    }
    return PreviewPrompt(**{**values, **changes})


class KnowsTheAnswer:
    """A denoiser of one known picture: whatever it is shown, it predicts exactly the noise (or v) that leads there."""

    def __init__(self, answer_CHW: torch.Tensor, prediction_type: str, zero_terminal_snr: bool) -> None:
        self.answer_CHW = answer_CHW
        self.schedule = NoiseSchedule(prediction_type=prediction_type, zero_terminal_snr=zero_terminal_snr)
        self.prediction_type = prediction_type
        self.zero_terminal_snr = zero_terminal_snr
        self.vae_factor = 8
        self.device = torch.device("cpu")
        self.unet = SimpleNamespace(config={"in_channels": 4})
        self.seen: list[float] = []

    def denoise(self, noisy_BCHW: torch.Tensor, timesteps_B: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(timesteps_B[0]))
        abar = self.schedule.alphas_cumprod[timesteps_B.long()].view(-1, 1, 1, 1)
        noise = (noisy_BCHW - abar.sqrt() * self.answer_CHW) / (1 - abar).sqrt()
        return noise if self.prediction_type == "epsilon" else abar.sqrt() * noise - (1 - abar).sqrt() * self.answer_CHW


def no_text(count: int = 1) -> Conditioning:
    return Conditioning(*[torch.zeros(count, 1)] * 4)


@pytest.mark.parametrize("steps", [1, 2, 7, 30])
@pytest.mark.parametrize(("prediction_type", "zero_terminal_snr"), [("epsilon", False), ("v", False), ("v", True)])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_reaches_the_answer(
    sampler: str, prediction_type: str, zero_terminal_snr: bool, steps: int
) -> None:
    answer = Draws(5).normal(0, "", "answer", (4, 8, 8))
    model: Any = KnowsTheAnswer(answer, prediction_type, zero_terminal_snr)
    made = sample_latents(model, no_text(), [prompt(sampler=sampler, steps=steps)])
    assert made.dtype == torch.float32
    assert torch.allclose(made[0], answer, atol=2e-3)
    assert model.seen[0] == 999.0  # trailing: begins where the noise is
    assert len(model.seen) == steps


@pytest.mark.parametrize("steps", [1, 3, 13, 30, 250, 600, 999, 1000])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_timesteps_are_those_of_training(sampler: str, steps: int) -> None:
    scheduler = make_scheduler(sampler, prediction_type="epsilon", zero_terminal_snr=False)
    scheduler.set_timesteps(steps)
    timesteps = scheduler.timesteps.tolist()
    assert len(timesteps) == steps
    assert timesteps[0] == 999
    assert timesteps[-1] >= 0
    assert all(later < earlier for earlier, later in zip(timesteps, timesteps[1:], strict=False))
    assert bool(torch.isfinite(scheduler.sigmas).all())
    assert float(scheduler.sigmas[-1]) == 0.0


def run_with_fixed_predictions(
    scheduler: Any, predictions: list[torch.Tensor], start: torch.Tensor, **extra: Any
) -> list[torch.Tensor]:
    scheduler.set_timesteps(len(predictions))
    latents = [start]
    for index, timestep in enumerate(scheduler.timesteps):
        more = {key: value[index] for key, value in extra.items()}
        latents.append(scheduler.step(predictions[index], timestep, latents[-1], return_dict=False, **more)[0])
    return latents


@pytest.mark.parametrize(("prediction_type", "zero_terminal_snr"), [("epsilon", False), ("v", False), ("v", True)])
def test_ddim_is_the_written_out_step_with_eta_zero(prediction_type: str, zero_terminal_snr: bool) -> None:
    """Song et al. 2021, eq. 12 with sigma = 0: x' = sqrt(abar') x0 + sqrt(1 - abar') eps."""
    scheduler = make_scheduler("ddim", prediction_type=prediction_type, zero_terminal_snr=zero_terminal_snr)
    predictions = [Draws(1).normal(0, "", "prediction", (1, 4, 8, 8), i) for i in range(12)]
    start = Draws(1).normal(0, "", "start", (1, 4, 8, 8))
    got = run_with_fixed_predictions(scheduler, predictions, start)
    abar = NoiseSchedule(prediction_type=prediction_type, zero_terminal_snr=zero_terminal_snr).alphas_cumprod.double()
    timesteps = [int(t) for t in scheduler.timesteps]
    for index, timestep in enumerate(timesteps):
        now = abar[timestep]
        then = abar[timesteps[index + 1]] if index + 1 < len(timesteps) else torch.tensor(1.0).double()
        x, prediction = got[index].double(), predictions[index].double()
        if prediction_type == "epsilon":
            clean = (x - (1 - now).sqrt() * prediction) / now.sqrt()
            noise = prediction
        else:
            clean = now.sqrt() * x - (1 - now).sqrt() * prediction
            noise = now.sqrt() * prediction + (1 - now).sqrt() * x
        expected = then.sqrt() * clean + (1 - then).sqrt() * noise
        # diffusers keeps the terminal alpha at 2**-24 where it should be 0
        tolerance = 2e-3 if zero_terminal_snr and index == 0 else 2e-5
        assert torch.allclose(got[index + 1].double(), expected, rtol=tolerance, atol=tolerance), index


def test_euler_a_is_the_ancestral_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fed the same noise, it agrees with diffusers' EulerAncestralDiscreteScheduler, which works in sigma space."""
    import diffusers.schedulers.scheduling_euler_ancestral_discrete as home

    steps = 10
    predictions = [Draws(2).normal(0, "", "prediction", (1, 4, 8, 8), i) for i in range(steps)]
    noises = [Draws(2).normal(0, "", "noise", (1, 4, 8, 8), i) for i in range(steps)]
    start = Draws(2).normal(0, "", "start", (1, 4, 8, 8))
    ours = make_scheduler("euler_a", prediction_type="epsilon", zero_terminal_snr=False)
    got = run_with_fixed_predictions(ours, predictions, start, variance_noise=noises)
    theirs = EulerAncestralDiscreteScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        timestep_spacing="trailing",
    )
    feed = iter(noises)
    monkeypatch.setattr(home, "randn_tensor", lambda *_, **__: next(feed))
    theirs.set_timesteps(steps)
    first_sigma = theirs.sigmas[0]
    expected = run_with_fixed_predictions(theirs, predictions, start * (first_sigma**2 + 1).sqrt())
    for index in range(1, steps + 1):
        sigma = theirs.sigmas[index]
        assert torch.allclose(got[index] * (sigma**2 + 1).sqrt(), expected[index], rtol=1e-4, atol=2e-4), index


def test_dpmpp_2m_is_second_order_and_ddim_first() -> None:
    """On Gaussian data the exact path is known; halving the step must shrink the error about 4 and 2 times."""

    def error(sampler: str, steps: int) -> float:
        width = 5.0

        class Gaussian(KnowsTheAnswer):
            def denoise(self, noisy_BCHW: torch.Tensor, timesteps_B: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
                abar = self.schedule.alphas_cumprod[timesteps_B.long()].view(-1, 1, 1, 1)
                return noisy_BCHW * (1 - abar).sqrt() / (abar * width**2 + 1 - abar)

        model: Any = Gaussian(torch.zeros(4, 8, 8), "epsilon", False)
        start = Draws(3).normal(0, "", "preview noise", (4, 8, 8))
        abar = model.schedule.alphas_cumprod[999]
        exact = start * width / (abar * width**2 + 1 - abar).sqrt()
        made = sample_latents(model, no_text(), [prompt(sampler=sampler, steps=steps)])[0]
        return float((made - exact).abs().max() / exact.abs().max())

    assert 1.7 < error("ddim", 20) / error("ddim", 40) < 2.3
    assert 1.7 < error("euler", 20) / error("euler", 40) < 2.3
    assert 3.2 < error("dpmpp_2m", 20) / error("dpmpp_2m", 40) < 4.8
    assert error("dpmpp_2m", 20) < 0.1 * error("ddim", 20)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_pictures_depend_on_their_seed_and_on_nothing_else(micro: SDXLModel, sampler: str) -> None:
    def sample(**changes: Any) -> torch.Tensor:
        one = prompt(sampler=sampler, steps=2, guidance=3.0, **changes)
        return sample_latents(micro, encode_prompts(micro, [one]), [one])

    first = sample()
    torch.manual_seed(123)
    np.random.seed(5)
    state = torch.get_rng_state()
    again = sample()
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), state)
    assert bool(torch.isfinite(first).all())
    assert not torch.equal(first, sample(seed=4))
    assert not torch.equal(first, sample(text="a blue square"))


def test_a_batch_gives_the_pictures_of_its_prompts(micro: SDXLModel) -> None:
    prompts = [prompt(steps=2, sampler="euler_a", guidance=g, seed=s) for g, s in ((3.0, 1), (1.0, 2), (7.0, 3))]
    together = sample_latents(micro, encode_prompts(micro, prompts), prompts)
    for index, one in enumerate(prompts):
        alone = sample_latents(micro, encode_prompts(micro, [one]), [one])
        assert float((together[index] - alone[0]).norm() / alone.norm()) < 1e-5


def test_guidance_moves_away_from_the_negative_prompt(micro: SDXLModel) -> None:
    def sample(guidance: float, negative: str = "") -> torch.Tensor:
        one = prompt(steps=2, guidance=guidance, negative=negative)
        return sample_latents(micro, encode_prompts(micro, [one]), [one])

    plain = sample(1.0)
    assert torch.equal(plain, sample(0.0))
    assert torch.equal(plain, sample(1.0, "a blue square"))  # no guidance, no negative
    assert not torch.equal(sample(4.0), sample(4.0, "a blue square"))
    # negative = prompt leaves nothing to move away from
    assert torch.allclose(sample(4.0, "a red circle"), plain, atol=1e-4)


def test_one_batch_has_one_size(micro: SDXLModel) -> None:
    with pytest.raises(ValueError, match="must share size, steps and sampler"):
        sample_latents(micro, no_text(2), [prompt(), prompt(width=96)])


def test_stopping_is_polled_before_every_step(micro: SDXLModel) -> None:
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 3

    with pytest.raises(SamplingStopped):
        sample_latents(micro, encode_prompts(micro, [prompt()]), [prompt()], should_stop=stop)
    assert len(asked) == 3


def test_unknown_sampler() -> None:
    with pytest.raises(ValueError, match="must be one of euler, euler_a, dpmpp_2m, ddim"):
        make_scheduler("heun", prediction_type="epsilon", zero_terminal_snr=False)
