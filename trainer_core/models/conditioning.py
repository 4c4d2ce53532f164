"""SDXL's six size numbers (Podell et al. 2023, section 2.2)."""

from __future__ import annotations

import torch


def time_ids(original_hw: tuple[int, int], crop_tl: tuple[int, int], target_hw: tuple[int, int]) -> torch.Tensor:
    """(6,) fp32: original height, width; crop top, left; target height, width. All in pixels."""
    return torch.tensor([*original_hw, *crop_tl, *target_hw], dtype=torch.float32)
