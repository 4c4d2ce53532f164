"""Who is to blame for a bad step: the layer, micro-batch, picture and timestep that failed first.

The step is computed once more with the same draws and hooks that note where a number stops being finite. In the forward
pass that is the first layer whose inputs were finite and whose output is not; in the backward pass the first parameter
(gradients arrive from the output inwards) whose gradient is not. A step that comes out finite the second time was hit
by something that is not in its numbers: a transient fault of the hardware.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..optim.reading import largest, named

if TYPE_CHECKING:
    from ..data.records import SampleRef
    from ..step_work import StepWork
    from ..trainer import Trainer


@dataclass(frozen=True)
class FirstHit:
    """`where`: layer and block in words; empty when nothing was found. `micro_batch` counts from 0. `reproduced`:
    whether the second computation failed as well."""

    where: str = ""
    micro_batch: int | None = None
    reproduced: bool = False


def bad_inputs(trainer: Trainer, epoch: int, ref: SampleRef) -> str:
    """What of a sample's inputs is not finite, in words; empty when all are. Reads the device."""
    batch = trainer.load(epoch, (ref,))
    parts = (
        ("latents", (batch.mean_BCHW, batch.std_BCHW)),
        ("encoded caption", (batch.context_BTD, batch.pooled_BD)),
        ("loss mask", (batch.masks_B1HW,)),
        ("loss weight", (batch.weights_B,)),
    )
    bad = [name for name, tensors in parts if any(t is not None and not _finite(t) for t in tensors)]
    return " and ".join(bad)


def first_forward_hit(trainer: Trainer, work: StepWork) -> FirstHit:
    """Where the forward pass of the step stops being finite."""
    for number, refs in enumerate(work.batches):
        with _watched_layers(trainer) as seen, torch.no_grad():
            loss_B = trainer.loss(work.epoch, trainer.load(work.epoch, refs))
        if _finite(loss_B):
            continue
        flags = torch.stack([flag for _, flag in seen]).tolist() if seen else []
        where = next((name for (name, _), bad in zip(seen, flags, strict=True) if bad), "")
        return FirstHit(where or "the loss itself", number, True)
    return FirstHit()


def first_backward_hit(trainer: Trainer, work: StepWork) -> FirstHit:
    """Which parameter's gradient is the first that is not finite. Leaves no gradients."""
    parts = trainer.parts
    parameters = dict(named(parts.optimizer))
    for number, refs in enumerate(work.batches):
        parts.optimizer.zero_grad(set_to_none=True)
        order: list[str] = []
        with _noting(parameters, order):
            loss_B = trainer.loss(work.epoch, trainer.load(work.epoch, refs))
            parts.precision.scaler.scale(loss_B.sum() / work.divisor).backward()
        arrived = [(name, parameters[name].grad) for name in dict.fromkeys(order)]
        norms = torch._foreach_norm([grad for _, grad in arrived if grad is not None], float("inf"))
        flags = (~torch.isfinite(torch.stack([norm.float() for norm in norms]))).tolist() if norms else []
        parts.optimizer.zero_grad(set_to_none=True)
        hit = next((name for (name, _), bad in zip(arrived, flags, strict=True) if bad), None)
        if hit is not None:
            return FirstHit(place(hit), number, True)
    return FirstHit()


def timestep_of(trainer: Trainer, epoch: int, ref: SampleRef) -> int:
    """The timestep that the sample was trained at: a draw, so it can be asked for again."""
    from ..objective.timesteps import draw_timestep

    return int(draw_timestep(trainer.parts.objective.config, trainer.draws, epoch, ref.key))


_BLOCKS = (
    (re.compile(r"unet_input_blocks_(\d+)_"), "input block {}"),
    (re.compile(r"unet_middle_block_"), "middle block"),
    (re.compile(r"unet_output_blocks_(\d+)_"), "output block {}"),
    (re.compile(r"te1_text_model_encoder_layers_(\d+)_"), "text encoder 1, layer {}"),
    (re.compile(r"te2_text_model_encoder_layers_(\d+)_"), "text encoder 2, layer {}"),
)


def place(parameter: str) -> str:
    """A parameter's module and block in words: `lora_unet_..._attn2_to_k (output block 3)`."""
    module = parameter.partition(".")[0]
    for pattern, text in _BLOCKS:
        if match := pattern.search(module):
            return f"{module} ({text.format(*match.groups())})"
    return module


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


@contextmanager
def _noting(parameters: dict[str, torch.nn.Parameter], order: list[str]) -> Iterator[None]:
    """Note the names of parameters as their gradients arrive."""
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        for name, parameter in parameters.items()
        if parameter.requires_grad  # the ladder may have frozen some
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _watched_layers(trainer: Trainer) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """(layer, its output is not finite) of every layer of the model, in the order in which they ran."""
    seen: list[tuple[str, torch.Tensor]] = []

    def hook(name: str) -> Any:
        def note(module: torch.nn.Module, inputs: Sequence[Any], output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) and output else output
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                seen.append((name, ~torch.isfinite(largest([tensor.detach()], tensor))))

        return note

    handles = [
        module.register_forward_hook(hook(f"{part}.{name}"))
        for part, root in trainer.parts.model.parts.items()
        for name, module in root.named_modules()
        if name and not any(True for _ in module.children())
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
