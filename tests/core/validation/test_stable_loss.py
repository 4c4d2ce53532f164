from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from trainer_core.config import ObjectiveConfig, ValidationConfig
from trainer_core.draws import Draws
from trainer_core.models import SDXLModel
from trainer_core.networks import DropoutDraws, LoraNetwork
from trainer_core.objective import NoiseSchedule, Objective
from trainer_core.validation import StableValidation, ValidationResult


@dataclass(frozen=True)
class Picture:
    file: str
    content_hash: str
    caption: str = "a red circle"


@dataclass
class Shelf:
    """A loader of fixed latents; pictures have different sizes."""

    loaded: list[str] = field(default_factory=list)

    def __call__(self, item: Picture) -> Any:
        self.loaded.append(item.file)
        size = (8, 8) if item.file != "wide.png" else (4, 8)
        mean = Draws(9).normal(0, item.content_hash, "latents", (1, 4, *size))
        time_ids = torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]])
        return type("Batch", (), {"mean_BCHW": mean, "time_ids_B6": time_ids})()


ITEMS = (Picture("a.png", "h1"), Picture("wide.png", "h2", "a blue square"), Picture("c.png", "h3"))


def validation(model: SDXLModel, network: LoraNetwork | None, **changes: Any) -> StableValidation:
    objective = Objective(
        NoiseSchedule(prediction_type="epsilon"), changes.pop("objective", ObjectiveConfig()), vae_scale=0.18
    )
    config = changes.pop("config", ValidationConfig(bands=4))
    items = changes.pop("items", ITEMS)
    draws = changes.pop("draws", Draws(7))
    return StableValidation(items, changes.pop("loader", Shelf()), objective, model, network, draws, config, **changes)


def measured(result: ValidationResult | None) -> ValidationResult:
    assert result is not None
    assert result.failure is None
    return result


def bits(result: ValidationResult | None) -> tuple[Any, ...]:
    done = measured(result)
    return done.mean, done.bands, tuple(sorted(done.per_picture.items())), done.pictures


def test_equal_to_the_bit_when_repeated_and_after_other_randomness(micro: SDXLModel, network: LoraNetwork) -> None:
    first = bits(validation(micro, network).run())
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    network.set_draws(DropoutDraws(Draws(3), 5, ("x",)))
    assert bits(validation(micro, network).run()) == first
    # a rollback trains with other draws, but is measured as before
    assert bits(validation(micro, network, draws=Draws(7, attempt=2)).run()) == first
    assert bits(validation(micro, network, draws=Draws(8)).run()) != first


def test_a_picture_does_not_depend_on_the_others(micro: SDXLModel) -> None:
    everything = measured(validation(micro, None).run())
    for item in ITEMS:
        alone = measured(validation(micro, None, items=(item,)).run())
        assert alone.per_picture[item.file] == everything.per_picture[item.file]
    backwards = measured(validation(micro, None, items=ITEMS[::-1]).run())
    assert (backwards.mean, backwards.bands) == (everything.mean, everything.bands)


def test_it_is_the_plain_mean_squared_error(micro: SDXLModel) -> None:
    check = validation(micro, None, items=ITEMS[:1], config=ValidationConfig(bands=3))
    result = measured(check.run())
    from trainer_core.draws import sample_key
    from trainer_core.models import encode_captions

    key = sample_key("a.png", "h1")
    latents = Shelf()(ITEMS[0]).mean_BCHW * 0.18
    with torch.no_grad():
        embeds = encode_captions(micro, ["a red circle"])
        for band in range(3):
            timestep = torch.tensor([check.timestep(key, band)])
            noise = Draws(7).normal(0, key, "validation noise", (4, 8, 8), band)[None]
            abar = NoiseSchedule(prediction_type="epsilon").alphas_cumprod[timestep]
            noisy = abar.sqrt() * latents + (1 - abar).sqrt() * noise
            prediction = micro.denoise(
                noisy, timestep, embeds.context_BTD, embeds.pooled_BD, Shelf()(ITEMS[0]).time_ids_B6
            )
            assert math.isclose(result.bands[band], float((prediction - noise).square().mean()), rel_tol=1e-4)
    assert math.isclose(result.mean, sum(result.bands) / 3, rel_tol=1e-12)
    assert result.pictures == 1


def test_weights_and_noise_variants_of_training_do_not_enter(micro: SDXLModel) -> None:
    plain = bits(validation(micro, None).run())
    varied = ObjectiveConfig(loss="huber", min_snr_gamma=5.0, noise_offset=0.1, ip_noise_gamma=0.1)
    assert bits(validation(micro, None, objective=varied).run()) == plain


@pytest.mark.parametrize(("low", "high", "bands"), [(0, 1000, 4), (0, 1000, 7), (200, 700, 3), (10, 12, 5), (5, 6, 4)])
def test_one_timestep_in_every_stratum(low: int, high: int, bands: int) -> None:
    objective = ObjectiveConfig(min_timestep=low, max_timestep=high)
    model: Any = None
    check = validation(model, None, objective=objective, config=ValidationConfig(bands=bands))
    for key in map(str, range(50)):
        chosen = [check.timestep(key, band) for band in range(bands)]
        assert all(low <= t < high for t in chosen)
        if high - low >= bands:
            width = (high - low) / bands
            assert [int((t - low + 0.999) / width) for t in chosen] == list(range(bands))
    assert len({check.timestep(str(key), 0) for key in range(50)}) > 1 or high - low < 2 * bands


def test_many_bands_are_grouped(micro: SDXLModel) -> None:
    result = measured(validation(micro, None, items=ITEMS[:1], config=ValidationConfig(bands=9)).run())
    assert len(result.bands) == len(result.per_picture["a.png"]) == 9


def test_state_is_put_back_and_failures_are_told(
    micro: SDXLModel, network: LoraNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    network.set_multiplier(0.7)
    for _, parameter in network.named_parameters():
        parameter.grad = torch.ones_like(parameter)
    before = (network.container.training, torch.get_rng_state(), network.multiplier)
    assert bits(validation(micro, network).run())

    def no_memory(*_: Any) -> Any:
        micro.unet.train()
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    result = validation(micro, network, loader=no_memory).run()
    assert result is not None
    assert math.isnan(result.mean)
    assert "not enough memory for validation" in str(result.failure)
    assert (network.container.training, network.multiplier) == (before[0], before[2])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert not micro.unet.training
    assert all(bool((p.grad == 1).all()) for _, p in network.named_parameters() if p.grad is not None)
    assert torch.is_grad_enabled()


def test_a_loss_that_is_no_number_is_a_failure_that_names_the_picture(micro: SDXLModel) -> None:
    shelf = Shelf()

    def too_large(item: Picture) -> Any:
        batch = shelf(item)
        if item.file == "wide.png":
            batch.mean_BCHW = batch.mean_BCHW * 1e38
        return batch

    result = validation(micro, None, loader=too_large).run()
    assert result is not None
    assert math.isnan(result.mean), "the mean of the other pictures would look like a change of the model"
    assert not result.bands
    assert "4 of 12 losses are NaN or infinite, of wide.png (timestep" in str(result.failure)
    assert "and 1 more" in str(result.failure)
    assert "a.png" not in str(result.failure)


def test_the_network_matters_and_its_dropout_does_not(micro: SDXLModel, network: LoraNetwork) -> None:
    trained = bits(validation(micro, network).run())
    network.set_multiplier(0.0)
    base = bits(validation(micro, network).run())
    assert base != trained
    network.detach()
    assert bits(validation(micro, None).run()) == base
    network.attach()


def test_own_encoder_is_used(micro: SDXLModel) -> None:
    from trainer_core.models import encode_captions

    asked: list[list[str]] = []

    def encode(captions: Any) -> Any:
        asked.append(list(captions))
        return encode_captions(micro, captions)

    assert bits(validation(micro, None, encode=encode).run()) == bits(validation(micro, None).run())
    assert asked == [["a red circle"], ["a blue square"], ["a red circle"]]


def test_stop_gives_no_result(micro: SDXLModel) -> None:
    shelf = Shelf()
    assert validation(micro, None, loader=shelf).run(should_stop=lambda: len(shelf.loaded) == 2) is None
    assert shelf.loaded == ["a.png", "wide.png"]


def test_nothing_to_measure_is_said(micro: SDXLModel) -> None:
    result = validation(micro, None, items=()).run()
    assert result is not None
    assert result.failure == "There is no picture to validate with."
