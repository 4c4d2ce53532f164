"""How far the activations are from fp16's largest number: the largest output of every UNet block, on a training step's
own forward pass. Hooks hang for one step in `health.headroom_every`; what they saw is read one step later.

Headroom is log2(65504 / amax) in bits: below 3 it is told, below 1 another number format is the answer.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .records import FP16_MAX
from .signals import to_host

WARN_BITS, ACT_BITS = 3.0, 1.0


class ForwardHeadroom:
    """Measures every `every` steps; `turn` is to be called once after each step."""

    def __init__(self, unet: torch.nn.Module, every: int) -> None:
        self._every = every
        # down_blocks.1.attentions.0 and its like; mid_block.resnets.0 is one level shorter.
        kinds = ("resnets", "attentions")
        self._blocks = {
            name: module
            for name, module in unet.named_modules()
            if name.split(".")[-2:-1] and name.split(".")[-2] in kinds and name.count(".") <= 3
        }
        self._handles: list[Any] = []
        self._seen: dict[str, torch.Tensor] = {}
        self._coming: tuple[list[str], torch.Tensor, Any] | None = None
        """Blocks, their numbers on the way to the host, and the event after which they are there."""

    def turn(self, step: int) -> dict[str, float]:
        """After `step`: headroom in bits by block of the step before when that one was measured, else nothing. Sets up
        the next step. Waits for nothing."""
        found = self._arrived()
        self._send()
        if (step + 1) % self._every == 0:
            self._handles = [module.register_forward_hook(self._hook(name)) for name, module in self._blocks.items()]
        return found

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, name: str) -> Any:
        def note(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
            if isinstance(tensor, torch.Tensor):
                largest = tensor.detach().abs().amax().float()
                before = self._seen.get(name)
                self._seen[name] = largest if before is None else torch.maximum(before, largest)

        return note

    def _arrived(self) -> dict[str, float]:
        if self._coming is None:
            return {}
        names, values, ready = self._coming
        if ready is not None and not ready.query():
            return {}
        self._coming = None
        return {name: bits(float(value)) for name, value in zip(names, values.numpy(), strict=True)}

    def _send(self) -> None:
        if not self._handles:
            return
        self.close()
        seen, self._seen = self._seen, {}
        if seen:
            self._coming = (list(seen), *to_host(torch.stack(list(seen.values()))))


def bits(largest: float) -> float:
    """log2(65504 / largest); infinite for 0, minus infinite for what is not finite."""
    if not math.isfinite(largest):
        return -math.inf
    return math.log2(FP16_MAX / largest) if largest > 0 else math.inf


def headroom_text(found: dict[str, float]) -> str:
    """What is told when a block is near the end; empty when none is."""
    near = {name: value for name, value in found.items() if value < WARN_BITS}
    if not near:
        return ""
    worst = min(near, key=lambda name: near[name])
    advice = (
        "Set precision.compute = 'bf16'" if near[worst] < ACT_BITS else "Watch it, or set precision.compute = 'bf16'"
    )
    return (
        f"Activations of {worst} come within {near[worst]:.1f} bits of fp16's largest number (65504); "
        f"{len(near)} of {len(found)} blocks have less than {WARN_BITS:g} bits. {advice}."
    )
