"""The VAE and classifier stages of `make_toy_sdxl.py`, and the loop all stages share."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from trainer_core.draws import Draws  # noqa: E402
from trainer_core.toy import shapes  # noqa: E402
from trainer_core.toy.classifier import COLOUR_CLASSES, SHAPE_CLASSES, Classifier, to_square  # noqa: E402
from trainer_core.toy.folder import TOY, build_models, initialise  # noqa: E402

SAVE_EVERY = 250


@dataclass(kw_only=True)
class Loop:
    """A resumable training loop: AdamW, one-cycle rate, state saved every 250 steps, EMA of the weights."""

    name: str
    folder: Path
    modules: dict[str, nn.Module]
    steps: int
    peak_rate: float
    ema_decay: float = 0.998
    weight_decay: float = 0.01
    ema: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def run(self, loss_of: Callable[[int], Tensor]) -> None:
        """Train until `steps`; `loss_of(step)` must depend on nothing but the step and the weights."""
        decayed, plain = [], []
        for module in self.modules.values():
            module.train()
            for path, parameter in module.named_parameters():
                # Embeddings keep their drawn length: a spare word that never trains must not fade.
                (plain if parameter.ndim < 2 or "embedding" in path else decayed).append(parameter)
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=self.peak_rate, betas=(0.9, 0.99))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.peak_rate, total_steps=self.steps, pct_start=0.1, cycle_momentum=False
        )
        start = self._resume(optimizer, schedule)
        began, losses = time.perf_counter(), []
        for step in range(start, self.steps):
            loss = loss_of(step)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(decayed + plain, 1.0)
            optimizer.step()
            schedule.step()
            self._follow(step)
            losses.append(float(loss.detach()))
            if (step + 1) % 50 == 0:
                rate = (time.perf_counter() - began) / (step + 1 - start)
                mean = float(np.mean(losses[-200:]))
                print(f"{self.name} {step + 1}/{self.steps} loss {mean:.5f} {rate:.3f} s/step", flush=True)
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == self.steps:
                self._save(step + 1, optimizer, schedule)
        for module in self.modules.values():
            module.eval()

    def use_ema(self) -> None:
        """Put the averaged weights into the modules."""
        for name, module in self.modules.items():
            module.load_state_dict(self.ema[name])

    @torch.no_grad()
    def _follow(self, step: int) -> None:
        decay = min(self.ema_decay, (1 + step) / (10 + step))
        for name, module in self.modules.items():
            average = self.ema.setdefault(name, {k: v.detach().clone() for k, v in module.state_dict().items()})
            for key, value in module.state_dict().items():
                average[key].lerp_(value, 1 - decay) if value.is_floating_point() else average[key].copy_(value)

    @property
    def state_path(self) -> Path:
        return self.folder / f"{self.name}.state.pt"

    def _save(
        self, step: int, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler
    ) -> None:
        state = {
            "step": step,
            "modules": {name: module.state_dict() for name, module in self.modules.items()},
            "ema": self.ema,
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
        }
        temporary = self.state_path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.state_path)

    def _resume(self, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler) -> int:
        if not self.state_path.is_file():
            return 0
        state = torch.load(self.state_path, weights_only=False)
        for name, module in self.modules.items():
            module.load_state_dict(state["modules"][name])
        self.ema = state["ema"]
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        print(f"{self.name}: going on at step {state['step']}", flush=True)
        return int(state["step"])


def to_images(pictures: Sequence[np.ndarray]) -> Tensor:
    """uint8 (H, W, 3) pictures of one size -> float32 (B, 3, H, W) in [0, 1]."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float().div(255).contiguous()


def train_vae(folder: Path, *, seed: int, batch: int = 8) -> AutoencoderKL:
    """Train the VAE on pictures of all shapes and colours: loss L1 + 0.5 MSE + 1e-6 KL, in two one-cycle runs.

    The second run adds 2 MSE of the 8x8 means: after the first, edges were right but cyan still came out blue.
    """
    vae = build_models(TOY, seed=seed).vae
    draws = Draws(seed)

    def loss_of(step: int, first: int, colour_weight: float) -> Tensor:
        number = first + step
        # One batch in four has another size than 64x64, so that the decoder knows borders of every size.
        size = shapes.SIZES[(number // 4) % 4 + 1] if number % 4 == 3 else shapes.SIZES[0]
        drawn = [shapes.any_picture(seed, number * batch + i, size).pixels_HWC for i in range(batch)]
        images_B3HW = to_images(drawn) * 2 - 1
        posterior = vae.encode(images_B3HW).latent_dist
        noise_BCHW = draws.normal(0, "toy", "vae latent", posterior.mean.shape, number)
        made_B3HW = vae.decode(posterior.mean + posterior.std * noise_BCHW).sample
        error = (made_B3HW - images_B3HW).abs().mean() + 0.5 * functional.mse_loss(made_B3HW, images_B3HW)
        if colour_weight:
            error = error + colour_weight * functional.avg_pool2d(made_B3HW - images_B3HW, 8).square().mean()
        return error + 1e-6 * posterior.kl().mean()

    runs = (("vae", 1600, 1.5e-3, 0.0), ("vae_colours", 1200, 2e-3, 2.0))
    first = 0
    for name, steps, rate, colour_weight in runs:
        loop = Loop(name=name, folder=folder, modules={"vae": vae}, steps=steps, peak_rate=rate, ema_decay=0.99)
        loop.run(lambda step, first=first, weight=colour_weight: loss_of(step, first, weight))
        loop.use_ema()
        first += steps
    return vae.requires_grad_(False)


def _formless(generator: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """A picture without a shape: an empty ground, noise, or soft colour clouds. uint8 (height, width, 3)."""
    ground = shapes.background(generator, size)
    kind = generator.integers(3)
    if kind == 1:
        ground = ground + generator.normal(0, generator.uniform(5, 80), ground.shape)
    if kind == 2:
        coarse = torch.from_numpy(generator.uniform(0, 1, (1, 1, 5, 5)))
        cloud = functional.interpolate(coarse, size=size, mode="bicubic")[0, 0, :, :, None].numpy()
        colour = np.array(list(shapes.COLOURS.values())[int(generator.integers(9))], dtype=np.float64)
        ground = ground + (colour - ground) * np.clip(cloud, 0, 1) * generator.uniform(0.3, 1)
    return np.clip(np.round(ground), 0, 255).astype(np.uint8)


def _classifier_batch(seed: int, step: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images in [0, 1] (blurred, shaded and grained as samples are), shape labels, colour labels (-1: none)."""
    pictures, shape_ids, colour_ids = [], [], []
    generator = shapes.keyed_generator(seed, "classifier batch", step)
    size = shapes.SIZES[int(generator.choice(5, p=(0.5, 0.15, 0.15, 0.1, 0.1)))]
    for i in range(batch):
        index = step * batch + i
        if i % 10 == 9:
            pictures.append(_formless(shapes.keyed_generator(seed, "formless", index), size))
            shape_ids.append(len(shapes.SHAPES))
            colour_ids.append(-1)
            continue
        picture = shapes.any_picture(seed, 10_000_000 + index, size)
        pictures.append(picture.pixels_HWC)
        shape_ids.append(SHAPE_CLASSES.index(picture.shape))
        colour_ids.append(COLOUR_CLASSES.index(picture.colour))
    images_B3HW = to_square(to_images(pictures))
    blur = int(generator.integers(4))
    if blur:
        size = (64, 48, 32, 24)[blur]
        small = functional.interpolate(images_B3HW, size=(size, size), mode="area")
        images_B3HW = functional.interpolate(small, size=(64, 64), mode="bilinear")
    grain = generator.uniform(0, 0.06) * torch.from_numpy(generator.standard_normal(images_B3HW.shape)).float()
    shade = torch.from_numpy(generator.uniform(-0.06, 0.06, (batch, 3, 1, 1))).float()
    return (images_B3HW + grain + shade).clamp(0, 1), torch.tensor(shape_ids), torch.tensor(colour_ids)


def train_classifier(folder: Path, *, seed: int, steps: int = 1500, batch: int = 40) -> Classifier:
    """Train the classifier on drawn pictures of all shapes and colours."""
    model = Classifier()
    initialise(model, seed=seed, name="classifier")

    def loss_of(step: int) -> Tensor:
        images_B3HW, shape_ids, colour_ids = _classifier_batch(seed, step, batch)
        shape_logits, colour_logits = model(images_B3HW)
        colour_loss = functional.cross_entropy(colour_logits, colour_ids, ignore_index=-1, label_smoothing=0.05)
        return functional.cross_entropy(shape_logits, shape_ids, label_smoothing=0.05) + colour_loss

    loop = Loop(name="classifier", folder=folder, modules={"classifier": model}, steps=steps, peak_rate=2e-3)
    loop.run(loss_of)
    loop.use_ema()
    return model.requires_grad_(False)


def write_json(path: Path, content: object) -> None:
    """Write readable JSON, sorted, UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((json.dumps(content, indent=2, sort_keys=True) + "\n").encode("utf-8"))
