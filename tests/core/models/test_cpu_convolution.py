"""Half-precision convolutions computed in fp32: exact, trainable through, same types outside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_core.models.cpu_convolution import compute_convolutions_in_fp32, has_native


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_result_is_the_rounded_fp32_result(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    exact = nn.Conv2d(4, 6, 3, padding=1)
    half = nn.Conv2d(4, 6, 3, padding=1).to(dtype)
    half.load_state_dict(exact.state_dict())
    exact.load_state_dict(half.state_dict())
    assert compute_convolutions_in_fp32(half) == 1
    images = torch.randn(2, 4, 8, 8, generator=generator).to(dtype).requires_grad_(True)
    out = half(images)
    assert torch.equal(out, exact(images.float()).to(dtype))
    out.float().sum().backward()
    assert images.grad is not None
    assert images.grad.dtype == half.weight.dtype == dtype


def test_fp32_is_always_native() -> None:
    assert has_native(torch.float32)
    assert isinstance(has_native(torch.bfloat16), bool)
