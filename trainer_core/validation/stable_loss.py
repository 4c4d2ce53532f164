"""Stable validation loss: the same pictures, noise and timesteps every time, so that a change means the model changed.

Every picture is measured at one fixed timestep in each of `bands` equal strata of the training range, with fixed noise;
both are keyed by picture. The latents are the posterior's mean, the caption is the item's own (no dropout, no shuffle),
and the loss is the plain mean squared error of the prediction target: no SNR weights, no sample weights, no noise
variants, so that runs with other settings can be compared. Each picture is computed on its own (its bands in groups of
at most four), so the value of a picture does not depend on which others are measured.

Fixed seeds and timesteps are what sd-scripts settled on too (kohya-ss/sd-scripts PR 1903); random ones need 6 to 29
times as many forwards for the same precision.

Shapes: B batch (here: bands of one picture), C channel, H height, W width of latents, T tokens, D features.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..config import ValidationConfig
from ..draws import Draws, sample_key
from ..objective import Objective
from .isolation import undisturbed
from .previews import failure_text

if TYPE_CHECKING:
    from ..models import SDXLModel, TextEmbeds
    from ..networks import Network

log = logging.getLogger(__name__)

_GROUP = 4  # bands computed together; fixed, because another grouping rounds differently


class Picture(Protocol):
    """What is needed to know of a measured picture; `data.Item` fits."""

    @property
    def file(self) -> str: ...
    @property
    def content_hash(self) -> str: ...
    @property
    def caption(self) -> str: ...


class LatentBatch(Protocol):
    """Cached latents of one picture, unscaled, and its size conditioning; `data.Batch` fits."""

    @property
    def mean_BCHW(self) -> torch.Tensor: ...  # noqa: N802
    @property
    def time_ids_B6(self) -> torch.Tensor: ...  # noqa: N802


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """`mean` over all pictures and bands; `bands`: mean of each stratum, low noise first; `per_picture`: file to the
    loss in each band. With `failure` set (plain words) there is no measurement and `mean` is NaN."""

    mean: float
    bands: tuple[float, ...]
    per_picture: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    pictures: int
    seconds: float
    failure: str | None = None


class StableValidation:
    """Measures the validation loss of a run; every `run` on the same weights gives the same bits.

    `loader` gives a picture's cached latents and size conditioning as a batch of one. `encode` turns captions into text
    embeddings (default: the model's text encoders as they are now, adapters included); runs that cache them pass their
    own. `compute` makes the context around encoding and UNet (autocast).
    """

    def __init__(
        self,
        items: Sequence[Picture],
        loader: Callable[[Any], LatentBatch],
        objective: Objective,
        model: SDXLModel,
        network: Network | None,
        draws: Draws,
        config: ValidationConfig,
        *,
        encode: Callable[[Sequence[str]], TextEmbeds] | None = None,
        max_token_length: int = 75,
        weighted_captions: bool = False,
        compute: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.items = tuple(items)
        self.loader = loader
        self.objective = objective
        self.model = model
        self.network = network
        # Without the attempt number: a rollback draws its training anew, but is measured like the rest of the run.
        self.draws = Draws(draws.seed)
        self.config = config
        self.encode = encode
        self.max_token_length = max_token_length
        self.weighted_captions = weighted_captions
        self.compute = compute

    def run(self, *, should_stop: Callable[[], bool] | None = None) -> ValidationResult | None:
        """Measure all pictures. Never raises for what goes wrong inside: that is logged and told in `failure`.

        `should_stop` is asked before every picture; a stopped measurement is none and gives None.
        """
        start = time.perf_counter()
        failure = None
        losses: dict[str, tuple[float, ...]] = {}
        try:
            with undisturbed(self.model, self.network):
                for item in self.items:
                    if should_stop is not None and should_stop():
                        log.info("validation stopped after %d of %d pictures", len(losses), len(self.items))
                        return None
                    losses[item.file] = self.measure(item)
        except Exception as error:
            failure = failure_text(error, "validation")
            log.exception("%s", failure)
        if failure is None and not losses:
            failure = "There is no picture to validate with."
        return self._result(losses, time.perf_counter() - start, failure)

    @torch.no_grad()
    def measure(self, item: Picture) -> tuple[float, ...]:
        """Loss of one picture in each band, as the model stands (modes and multiplier are the caller's)."""
        device = self.model.device
        batch = self.loader(item)
        latents_1CHW = (batch.mean_BCHW.to(device).float() * self.objective.vae_scale)[:1]
        time_ids_16 = batch.time_ids_B6[:1].to(device)
        with self.compute():
            embeds = self._encode([item.caption])
        context_1TD, pooled_1D = embeds.context_BTD.to(device), embeds.pooled_BD.to(device)
        key = sample_key(item.file, item.content_hash)
        losses = []
        for first in range(0, self.config.bands, _GROUP):
            bands = range(first, min(first + _GROUP, self.config.bands))
            count = len(bands)
            timesteps_B = torch.tensor([self.timestep(key, band) for band in bands], device=device)
            noise_BCHW = torch.stack(
                [self.draws.normal(0, key, "validation noise", latents_1CHW.shape[1:], band) for band in bands]
            ).to(device)
            latents_BCHW = latents_1CHW.expand(count, -1, -1, -1)
            noisy_BCHW = self.objective.schedule.add_noise(latents_BCHW, noise_BCHW, timesteps_B)
            target_BCHW = self.objective.schedule.target(latents_BCHW, noise_BCHW, timesteps_B)
            with self.compute():
                prediction_BCHW = self.model.denoise(
                    noisy_BCHW,
                    timesteps_B,
                    context_1TD.expand(count, -1, -1),
                    pooled_1D.expand(count, -1),
                    time_ids_16.expand(count, -1),
                )
            losses.append((prediction_BCHW.float() - target_BCHW).square().mean(dim=(1, 2, 3)))
        return tuple(torch.cat(losses).tolist())

    def timestep(self, key: str, band: int) -> int:
        """The fixed timestep of a picture in stratum `band` of [min_timestep, max_timestep)."""
        low, high, bands = self.objective.config.min_timestep, self.objective.config.max_timestep, self.config.bands
        start = low + (high - low) * band // bands
        end = low + (high - low) * (band + 1) // bands
        return self.draws.integer(start, max(end, start + 1), 0, key, "validation timestep", band)

    def _encode(self, captions: Sequence[str]) -> TextEmbeds:
        if self.encode is not None:
            return self.encode(captions)
        from ..models import encode_captions

        return encode_captions(
            self.model, captions, max_token_length=self.max_token_length, weighted=self.weighted_captions
        )

    def _result(self, losses: dict[str, tuple[float, ...]], seconds: float, failure: str | None) -> ValidationResult:
        failure = failure or self._no_numbers(losses)
        if failure is not None:
            return ValidationResult(mean=math.nan, bands=(), pictures=0, seconds=seconds, failure=failure)
        count = len(losses)
        bands = tuple(math.fsum(values) / count for values in zip(*losses.values(), strict=True))
        return ValidationResult(
            mean=math.fsum(bands) / len(bands), bands=bands, per_picture=losses, pictures=count, seconds=seconds
        )

    def _no_numbers(self, losses: Mapping[str, tuple[float, ...]]) -> str | None:
        """What is wrong where a loss is NaN or infinite: a mean without it would not be comparable to the others."""
        bad = [
            f"{item.file} (timestep {self.timestep(sample_key(item.file, item.content_hash), band)})"
            for item in self.items
            for band, loss in enumerate(losses.get(item.file, ()))
            if not math.isfinite(loss)
        ]
        if not bad:
            return None
        named = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        return (
            f"There is no validation loss this time: {len(bad)} of {sum(map(len, losses.values()))} losses are NaN or "
            f"infinite, of {named}. The trained weights are checked at every step, so this is most likely a number too "
            "large for fp16 in the frozen model: use bf16 or fp32, or look at these pictures."
        )
