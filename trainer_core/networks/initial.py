"""First values of adapter weights, each module from its own keyed draw.

`lora_down` is Kaiming-uniform with a = sqrt(5), that is uniform in +-1/sqrt(fan_in) (He et al. 2015, equation 14, as
torch's own layers use it); `lora_up` is zero, so an untrained adapter changes nothing.
"""

from __future__ import annotations

import math

import torch

from ..draws import Draws


def keyed_down(draws: Draws, name: str, shape: torch.Size) -> torch.Tensor:
    """First `lora_down` of module `name`, float32 on the CPU; no other module changes it."""
    fan_in = math.prod(shape[1:])
    uniform = draws.uniform(0, name, "lora_down_init", shape)
    return (uniform * 2.0 - 1.0) / math.sqrt(fan_in)


def kohya_down(shape: torch.Size, up_shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """First `lora_down` as sd-scripts makes it from torch's random stream (kohya.md 1.5): three draws a module, of
    which the last one counts. For parity tests; it depends on all modules made before."""
    down, up = torch.empty(shape), torch.empty(up_shape)
    for weight in (down, up, down):
        torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
    return down
