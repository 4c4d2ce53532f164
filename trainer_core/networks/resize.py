"""Changing the rank of LoRA weights with the least possible change of what they do (Eckart and Young 1936)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Factors:
    """`lora_down` and `lora_up` so that the weight change is scale * up @ down. `lost` is the relative Frobenius norm
    of what a smaller rank could not keep."""

    down: torch.Tensor
    up: torch.Tensor
    lost: float = 0.0


def truncate(down: torch.Tensor, up: torch.Tensor, rank: int) -> Factors:
    """The best factors of lower `rank`, in the shapes of `down` and `up`; the scale stays.

    Works on the small matrices (QR of both, SVD of rank x rank), in float64; the singular values are shared evenly.
    """
    down_2d, up_2d = down.flatten(1).double(), up.flatten(1).double()
    left, left_r = torch.linalg.qr(up_2d)
    right, right_r = torch.linalg.qr(down_2d.T)
    u, values, v = torch.linalg.svd(left_r @ right_r.T)
    kept = min(rank, values.numel())
    root = values[:kept].sqrt()
    new_up = left @ (u[:, :kept] * root)
    new_down = (root[:, None] * v[:kept]) @ right.T
    total = float(values.square().sum())
    lost = (float(values[kept:].square().sum()) / total) ** 0.5 if total > 0 else 0.0
    return Factors(
        new_down.to(down.dtype).reshape(kept, *down.shape[1:]),
        new_up.to(up.dtype).reshape(up.shape[0], kept, *up.shape[2:]),
        lost,
    )


def smallest_rank(down: torch.Tensor, up: torch.Tensor, keep: float) -> int:
    """The smallest rank that keeps the share `keep` of the weight change's squared Frobenius norm."""
    _, left_r = torch.linalg.qr(up.flatten(1).double())
    _, right_r = torch.linalg.qr(down.flatten(1).double().T)
    squared = torch.linalg.svdvals(left_r @ right_r.T).square()
    total = float(squared.sum())
    if total == 0:
        return 1
    shares = squared.cumsum(0) / total
    return min(int((shares < keep - 1e-12).sum()) + 1, squared.numel())
