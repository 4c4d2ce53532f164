"""A base model with NaN or infinity in it is refused when it is loaded, with the tensor's name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer_core.errors import ModelFileError
from trainer_core.models import load_sdxl
from trainer_core.models.soundness import non_finite_tensors, refuse_damaged


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_one_bad_element_is_found_among_any_others(dtype: torch.dtype, bad: float) -> None:
    limit = torch.finfo(dtype).max
    for others in (0.0, -0.0, 1.0, -1.0, limit, -limit):
        layer = nn.Linear(5, 3).to(dtype)
        with torch.no_grad():
            layer.weight.fill_(others)
            layer.bias.fill_(1.0)
        assert non_finite_tensors(layer) == []
        with torch.no_grad():
            layer.weight[1, 2] = bad
        assert non_finite_tensors(layer) == ["weight"]


def test_negative_nan_of_all_ones() -> None:
    layer = nn.Linear(2, 1).half()
    layer.weight.data.view(torch.int16)[0, 1] = -1
    assert non_finite_tensors(layer) == ["weight"]


def test_a_damaged_model_is_refused_by_name(micro_model: Path) -> None:
    model = load_sdxl(micro_model)
    refuse_damaged(model)
    weight = model.unet.conv_in.weight
    with torch.no_grad():
        weight.data = weight.data.clone()
        weight[0, 0, 0, 0] = math.nan
    with pytest.raises(ModelFileError, match=r"holds NaN or infinity in 1 tensors: conv_in.weight \(UNet\)"):
        refuse_damaged(model)
