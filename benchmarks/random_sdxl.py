"""A full-size SDXL single file of random weights: for benchmarks that need the size and not the knowledge."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_core.models import SDXLModel
from trainer_core.models.configs import shipped_config
from trainer_core.models.loading import builder
from trainer_core.models.single_file import single_file_tensors
from trainer_core.models.tensor_file import Outgoing, write_tensors
from trainer_core.models.weights import build_on_meta


def write_random_sdxl(path: Path, dtype: torch.dtype = torch.float16, seed: int = 0) -> Path:
    """Write about 6.9 GB (two-byte types), one tensor in memory at a time. Activations stay finite: matrices have
    variance 1 / inputs, norms are 1, biases 0."""
    configs: dict[str, Any] = {part: shipped_config("sdxl", part) for part in ("unet", "te1", "te2", "vae")}
    parts: dict[str, Any] = {part: build_on_meta(builder(part, config)) for part, config in configs.items()}
    model = SDXLModel(
        unet=parts["unet"],
        text_encoders=(parts["te1"], parts["te2"]),
        vae=parts["vae"],
        tokenizers=(None, None),  # type: ignore[arg-type]  # not looked at
        prediction_type="epsilon",
        zero_terminal_snr=False,
        native_size=1024,
        fingerprint="",
        source=path,
        vae_scale=0.13025,
        vae_factor=8,
        dtype=dtype,
        configs=configs,
    )
    numbers = torch.from_numpy(np.random.Generator(np.random.Philox(key=seed)).standard_normal(4_194_304, np.float32))
    tensors = {
        name: Outgoing(dtype, outgoing.shape, _random(name, outgoing.shape, numbers))
        for name, outgoing in single_file_tensors(model, dtype).items()
    }
    write_tensors(path, tensors)
    return path


def _random(name: str, shape: tuple[int, ...], numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Values by kind: scaled normals from one drawn block, begun at a place of the tensor's own."""

    def make() -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
        count = math.prod(shape)
        start = sum(name.encode()) * 997 % numbers.numel()
        block = torch.cat([numbers[start:], numbers[:start]])
        values = block.repeat(math.ceil(count / block.numel()))[:count]
        inputs = 2500 if "embedding" in name else math.prod(shape[1:])
        return (values / math.sqrt(inputs)).reshape(shape)

    return make
