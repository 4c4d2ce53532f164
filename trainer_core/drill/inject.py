"""How each fault is put into a run. No real trainer code is replaced beyond what the fault itself is."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import torch

from .site import Planted, Site


def nothing(site: Site) -> Planted:
    return Planted()


def cut_adapters(site: Site) -> Planted:
    modules = site.modules()
    chosen = [modules[place] for place in site.choose("cut", 2, len(modules))]
    for module in chosen:
        _replace(module, "_down", lambda original: lambda *args: original(*args).detach())
    return Planted(tuple(module.name for module in chosen))


def reentrant_checkpoint(site: Site) -> Planted:
    """The first transformer of the UNet: nothing before it is trained, so its inputs need no gradient."""
    from torch.utils.checkpoint import checkpoint

    unet: Any = site.trainer.parts.model.unet
    name, block = next((n, m) for n, m in unet.named_modules() if type(m).__name__ == "Transformer2DModel")

    def wrap(original: Any) -> Any:
        def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(lambda x: original(x, *args, **kwargs), hidden, use_reentrant=True)

        return forward

    _replace(block, "forward", wrap)
    return Planted(tuple(module.name for module in site.modules() if module.path.startswith(name + ".")))


def orphaned_parameters(site: Site) -> Planted:
    modules = site.modules()
    chosen = [modules[place] for place in site.choose("orphans", max(1, len(modules) // 3), len(modules))]
    for module in chosen:
        for holder in (module.lora_down, module.lora_up):
            holder.weight = torch.nn.Parameter(holder.weight.detach().clone())
    if site.trainer.health is not None:
        site.trainer.health.refresh()
    return Planted(tuple(module.name for module in chosen))


def te2_detached(site: Site) -> Planted:
    encoder: Any = site.trainer.parts.model.text_encoders[1]

    def wrap(original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return original(*args, **kwargs)

        return forward

    _replace(encoder, "forward", wrap)
    return Planted(tuple(module.name for module in site.modules("te2")))


def nan_latent(site: Site) -> Planted:
    """The first sample of the step at the onset."""
    trainer = site.trainer
    key = _first_key(site, site.onset)
    site.poison(lambda found: found == key and trainer.state.step + 1 == site.onset)
    return Planted(files=site.files_of([key]))


def corrupt_pictures(site: Site) -> Planted:
    """A quarter of the pictures, at least one, among them one that the step at the onset sees."""
    trainer = site.trainer
    keys = site.picture_keys()
    bad = {keys[place] for place in site.choose("corrupt", max(1, len(keys) // 4), len(keys))}
    bad.add(_first_key(site, site.onset).partition(":")[0])
    site.poison(lambda found: found.partition(":")[0] in bad and trainer.state.step + 1 >= site.onset)
    return Planted(files=site.files_of(bad))


def lr_times_200(site: Site) -> Planted:
    site.at(site.onset, lambda: _scale_rates(site, 200.0))
    return Planted()


def lr_stuck_zero(site: Site) -> Planted:
    site.at(site.onset, lambda: _scale_rates(site, 0.0))
    return Planted()


def underflow(site: Site) -> Planted:
    """Gradients go through fp16 at a scale at which their median is 2^-26: the step before the onset says which."""
    medians: list[float] = []
    scale: list[float] = []

    def arrived(parameter: torch.nn.Parameter) -> None:
        grad = parameter.grad
        if grad is None:
            return
        if scale:
            grad.copy_((grad * scale[0]).half().float() / scale[0])
        elif site.trainer.state.step + 2 == site.onset and bool(grad.any()):
            medians.append(float(grad[grad != 0].abs().median()))

    for parameter in site.parameters().values():
        parameter.register_post_accumulate_grad_hook(arrived)
    site.at(site.onset, lambda: scale.append(2.0**-26 / statistics.median(medians)))
    return Planted()


def b_rate_zero(site: Site) -> Planted:
    """Every optimizer group is split: lora_up goes into one with a rate of 0."""
    optimizer = site.trainer.parts.optimizer
    names: list[str] = []
    for group in list(optimizer.param_groups):
        pairs = list(zip(group["names"], group["params"], strict=True))
        ups = [(name, parameter) for name, parameter in pairs if ".lora_up" in name]
        rest = [(name, parameter) for name, parameter in pairs if ".lora_up" not in name]
        names += [name for name, _ in ups]
        group["names"], group["params"] = [n for n, _ in rest], [p for _, p in rest]
        extra = {key: value for key, value in group.items() if key not in ("params", "names")}
        optimizer.add_param_group(
            {**extra, "params": [p for _, p in ups], "names": [n for n, _ in ups], "base_lr": 0.0, "lr": 0.0,
             "label": f"{group['label']}_up"}
        )  # fmt: skip
    return Planted(tuple(name.partition(".")[0] for name in names))


def clip_tiny(site: Site) -> Planted:
    clipping: Any = site.trainer.parts.precision.clipping
    norms: list[float] = []

    def wrap(original: Any) -> Any:
        def decide(reading: Any) -> Any:
            norms.append(reading.grad_norm)
            return original(reading)

        return decide

    _replace(clipping, "decide", wrap)

    def tighten() -> None:
        clipping.config = dataclasses.replace(clipping.config, max_norm=1e-3 * statistics.median(norms))

    site.at(site.onset, tighten)
    return Planted()


@torch.no_grad()
def bf16_weights(site: Site) -> Planted:
    for parameter in site.parameters().values():
        parameter.data = parameter.data.bfloat16()
    site.began_so()
    return Planted(tuple(module.name for module in site.modules()))


def bit_flip(site: Site) -> Planted:
    """The highest exponent bit of one gradient element, once: a small number becomes about 1e33."""
    parameters = [p for name, p in site.parameters().items() if ".lora_up" in name]
    parameter = parameters[site.choose("tensor", 1, len(parameters))[0]]
    place = site.choose("element", 1, parameter.numel())[0]
    done: list[bool] = []

    def arrived(found: torch.nn.Parameter) -> None:
        if done or site.trainer.state.step + 1 < site.onset or found.grad is None:
            return
        done.append(True)
        found.grad.view(torch.int32).view(-1)[place] ^= 1 << 30

    parameter.register_post_accumulate_grad_hook(arrived)
    return Planted()


def state_dropped(site: Site) -> Planted:
    site.at(site.onset, lambda: site.trainer.parts.optimizer.state.clear())
    return Planted()


def adapter_cast(site: Site) -> Planted:
    """As `pipeline.to(dtype)` does to an adapter that hangs on its UNet. The optimizer's state goes along, else torch
    would refuse the next update."""

    def cast() -> None:
        with torch.no_grad():
            for parameter in site.parameters().values():
                parameter.data = parameter.data.bfloat16()
                state = site.trainer.parts.optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        state[key] = value.bfloat16()

    site.at(site.onset, cast)
    return Planted()


def requires_grad_off(site: Site) -> Planted:
    modules = site.modules()
    chosen = [modules[place] for place in site.choose("off", max(1, len(modules) // 5), len(modules))]

    def switch_off() -> None:
        for module in chosen:
            module.requires_grad_(False)

    site.at(site.onset, switch_off)
    return Planted(tuple(module.name for module in chosen))


def nan_weight(site: Site) -> Planted:
    modules = site.modules()
    module = modules[site.choose("weight", 1, len(modules))[0]]

    def damage() -> None:
        with torch.no_grad():
            module.lora_up.weight.view(-1)[0] = float("nan")

    site.at(site.onset, damage)
    return Planted((module.name,))


def lost_micro_batch(site: Site) -> Planted:
    """The second backward of the step at the onset is left out."""
    precision: Any = site.trainer.parts.precision
    calls: list[int] = []

    def wrap(original: Any) -> Any:
        def backward(loss_B: torch.Tensor, samples: int) -> None:
            step = site.trainer.state.step + 1
            calls.append(step)
            if step == site.onset and calls.count(step) == 2:
                precision.losses.append(loss_B.detach())
                return
            original(loss_B, samples)

        return backward

    _replace(precision, "backward", wrap)
    return Planted()


def zero_embeddings(site: Site) -> Planted:
    """As diffusers' SDXL does for an empty prompt: both embeddings are zeros."""
    trainer: Any = site.trainer
    original = trainer._conditioning

    def conditioning(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        context_BTD, pooled_BD = original(batch)
        kept_B = torch.tensor([float(bool(caption)) for caption in batch.captions])
        return context_BTD * kept_B[:, None, None], pooled_BD * kept_B[:, None]

    trainer._conditioning = conditioning
    return Planted()


def tiny_loss(site: Site) -> Planted:
    trainer: Any = site.trainer
    original = trainer.loss
    trainer.loss = lambda *args: original(*args) * 1e-5
    return Planted()


def first_overflows(site: Site) -> Planted:
    """Five steps whose gradients overflow while the scale is looked for (the true fp16 path is slow on a CPU)."""
    parameter = next(iter(site.parameters().values()))
    precision: Any = site.trainer.parts.precision
    precision.phases.scaled = True
    precision.phases.phase = "CALIBRATE"

    def arrived(found: torch.nn.Parameter) -> None:
        if site.trainer.state.step < 5 and found.grad is not None:
            found.grad.view(-1)[0] = float("inf")

    parameter.register_post_accumulate_grad_hook(arrived)
    return Planted()


def _replace(owner: Any, name: str, wrap: Any) -> None:
    """Put `wrap(original)` in the place of a method of one object."""
    setattr(owner, name, wrap(getattr(owner, name)))


def _scale_rates(site: Site, factor: float) -> None:
    for group in site.trainer.parts.optimizer.param_groups:
        group["base_lr"] *= factor


def _first_key(site: Site, step: int) -> str:
    trainer = site.trainer
    per_epoch = trainer.parts.plan.steps_per_epoch(trainer.config.gradient.accumulation)
    epoch, index = divmod(step - 1, per_epoch)
    batches = trainer.parts.plan.batches(epoch)
    return str(batches[index * trainer.config.gradient.accumulation][0].key)
