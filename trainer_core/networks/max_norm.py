"""Max-norm regularisation as kohya's `scale_weight_norms` computes it (kohya.md 1.2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .lora import LoraModule


@dataclass(frozen=True)
class MaxNormResult:
    """0-dim tensors on the adapters' device, so that nothing waits for the device unless they are read."""

    scaled: torch.Tensor
    mean_norm: torch.Tensor
    max_norm: torch.Tensor


@torch.no_grad()
def apply_max_norm(modules: Iterable[LoraModule], limit: float) -> MaxNormResult:
    """Scale adapters down whose change |scale * up @ down| (Frobenius) passes `limit`; smaller ones stay untouched.

    Both factors get the square root of the ratio. The norm comes from the small matrices:
    |UD|^2 = sum(U'U * DD').
    """
    norms, scaled = [], []
    for module in modules:
        down, up = module.lora_down.weight.flatten(1), module.lora_up.weight.flatten(1)
        squared = ((up.T @ up) * (down @ down.T)).sum().clamp_min(0.0)
        norm = squared.sqrt() * abs(module.scale)
        ratio = torch.where(norm > limit, limit / norm.clamp_min(1e-30), torch.ones_like(norm))
        root = ratio.sqrt()
        module.lora_down.weight.mul_(root)
        module.lora_up.weight.mul_(root)
        norms.append(norm * ratio)
        scaled.append(ratio < 1)
    all_norms = torch.stack(norms)
    return MaxNormResult(torch.stack(scaled).sum(), all_norms.mean(), all_norms.max())
