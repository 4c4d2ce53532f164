"""A run state of real size without a model: the LoRA of kohya's UNet set on SDXL with AdamW's moments.

Shapes come from SDXL's UNet on the meta device and our own target selection; values are random. At rank 16 adapter and
moments are 511 MB.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainer_core.checkpoints.state import RunState
from trainer_core.networks import find_targets

ROOT = Path(__file__).resolve().parent.parent
SMOKE = {
    "block_out_channels": (64, 128, 256),
    "attention_head_dim": (1, 2, 4),
    "transformer_layers_per_block": (1, 2, 4),
}


def adapter_shapes(rank: int, smoke: bool) -> dict[str, tuple[int, ...]]:
    """Shape of every trained tensor by its name in the file."""
    from diffusers import UNet2DConditionModel

    config: dict[str, Any] = dict(UNet2DConditionModel.load_config(ROOT / "trainer_core" / "assets" / "sdxl" / "unet"))
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config({**config, **(SMOKE if smoke else {})})
    shapes: dict[str, tuple[int, ...]] = {}
    for target in find_targets(unet, "unet"):
        outside, inside, *_ = target.module.weight.shape
        shapes[f"{target.name}.lora_down.weight"] = (rank, inside)
        shapes[f"{target.name}.lora_up.weight"] = (outside, rank)
    return shapes


def make_state(shapes: dict[str, tuple[int, ...]], step: int, device: str = "cpu") -> RunState:
    """Adapter and AdamW moments of these shapes, random, on `device`."""
    generator = torch.Generator(device).manual_seed(step)

    def random() -> dict[str, torch.Tensor]:
        return {name: torch.randn(shape, generator=generator, device=device) for name, shape in shapes.items()}

    adapter, first, second = random(), random(), random()
    optimizer = {f"exp_avg/{name}": value for name, value in first.items()}
    optimizer |= {f"exp_avg_sq/{name}": value for name, value in second.items()}
    return RunState(adapter, optimizer, {"counters": {"step": step}})
