"""PiSSA: adapters that begin as the principal part of the base weight (Meng, Wang and Zhang 2024, arXiv:2404.02948).

The paper takes the principal part out of the base weight. Here the base stays as it is, and the adapter subtracts the
part it began with: y = base(x) + scale * (up @ down - up0 @ down0) x. That is the same function and the same gradients,
and the file is an ordinary LoRA of twice the rank that every loader knows.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..draws import Draws
from .lora import LoraModule
from .lowrank import top_singular


@torch.no_grad()
def initialise_pissa(modules: Iterable[LoraModule], seed: int) -> None:
    """Give every adapter the principal part of its base weight, and remember that part as what is subtracted."""
    draws = Draws(seed)
    for module in modules:
        weight = module.base.weight.detach()
        u, s, vh = top_singular(weight.flatten(1), module.rank, draws, module.name)
        root = (s / module.scale).sqrt()
        down, up = module.lora_down.weight, module.lora_up.weight
        down.zero_()
        up.zero_()
        kept = s.numel()
        down[:kept] = (root[:, None] * vh).reshape(kept, *down.shape[1:])
        up[:, :kept] = (u * root).reshape(up.shape[0], kept, *up.shape[2:])
        module.subtract(down, up)
