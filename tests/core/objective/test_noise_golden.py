"""Noise functions against sd-scripts' numbers: its random tensors, drawn in its order, are fed in as arguments.

The numbers were made with latents of `torch.manual_seed(42)` and shape (2, 4, 16, 24), and with seed 7 of torch and of
Python before each call. Draws: noise, [strength], offset, pyramid, timesteps, [strength], perturbation.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_core.objective import (
    NoiseSchedule,
    adaptive_strength,
    input_perturbation,
    multires_noise,
    offset_noise,
)
from trainer_core.objective.noise import multires_sizes

GOLDEN = json.loads((Path(__file__).parents[2] / "fixtures" / "kohya_golden.json").read_text(encoding="utf-8"))["noise"]
SHAPE = (2, 4, 16, 24)

#: row -> options of the call that made it
ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offset.05": {"offset": 0.05},
    "offset_rand": {"offset": 0.05, "random_offset": True},
    "adaptive": {"offset": 0.05, "adaptive": 0.01},
    "multires6_.3": {"levels": 6, "discount": 0.3},
    "ip.1": {"gamma": 0.1},
    "ip_rand": {"gamma": 0.1, "random_gamma": True},
    "t200_400": {"low": 200, "high": 400},
    "t500_500": {"low": 500, "high": 500},
}


@pytest.fixture(autouse=True)
def _random_state_is_put_back() -> Any:
    state, python = torch.get_rng_state(), random.getstate()
    yield
    torch.set_rng_state(state)
    random.setstate(python)


def kohya_batch(options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(noise, noised latents, timesteps) of our functions on sd-scripts' draws."""
    torch.manual_seed(42)
    latents = torch.randn(SHAPE)
    torch.manual_seed(7)
    random.seed(7)
    noise = torch.randn_like(latents)
    if "offset" in options:
        strength: float | torch.Tensor = options["offset"]
        if options.get("random_offset"):
            strength = torch.rand(1) * strength
        if "adaptive" in options:
            strength = adaptive_strength(latents, strength, options["adaptive"])
        noise = offset_noise(noise, torch.randn(*SHAPE[:2], 1, 1), strength)
    if "levels" in options:
        ratios = [random.random() * 2 + 2 for _ in range(options["levels"])]
        levels = [torch.randn(*SHAPE[:2], *size) for size in multires_sizes(*SHAPE[2:], ratios)]
        noise = multires_noise(noise, levels, options["discount"], per_sample=False)
    low, high = options.get("low", 0), options.get("high", 1000)
    timesteps = torch.randint(low, high, (2,)) if low < high else torch.full((2,), high)
    entering = noise
    if "gamma" in options:
        gamma = options["gamma"] * torch.rand(1) if options.get("random_gamma") else options["gamma"]
        entering = input_perturbation(noise, torch.randn_like(latents), gamma)
    return noise, NoiseSchedule(prediction_type="epsilon").add_noise(latents, entering, timesteps), timesteps


def test_every_row_is_tested() -> None:
    assert set(ROWS) == set(GOLDEN)


@pytest.mark.parametrize("row", ROWS)
def test_noise_matches_golden(row: str) -> None:
    noise, noisy, timesteps = kohya_batch(ROWS[row])
    golden = GOLDEN[row]
    assert timesteps.tolist() == golden["timesteps"]
    torch.testing.assert_close(noise.flatten()[:4], torch.tensor(golden["noise0"]), rtol=0, atol=1e-6)
    torch.testing.assert_close(noisy.flatten()[:4], torch.tensor(golden["noisy0"]), rtol=0, atol=1e-6)
    # 3072 numbers were added up: 1e-6 each.
    assert float(noise.double().sum()) == pytest.approx(golden["noise_sum"], abs=1e-6 * noise.numel())
    assert float(noisy.double().sum()) == pytest.approx(golden["noisy_sum"], abs=1e-6 * noise.numel())
    assert float(noise.double().std()) == pytest.approx(golden["noise_std"], abs=1e-6)
