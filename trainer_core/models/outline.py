"""The layers of an SDXL model without its weights: enough to say where adapters go, in a second and no memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .loading import builder, native_size, plan, vae_factor
from .sdxl import SDXLModel
from .sources import FOLDERS
from .weights import build_on_meta


def outline_sdxl(path: str | Path, *, vae: str | Path | None = None, config_dir: str | Path | None = None) -> SDXLModel:
    """The model's modules on the meta device, frozen; it has names and shapes and computes nothing.

    ModelFileError naming what is wrong with the file.
    """
    source, _, configs = plan(path, vae=vae, config_dir=config_dir)
    modules: dict[str, Any] = {part: build_on_meta(builder(part, configs.parts[part])).eval() for part in FOLDERS}
    for module in modules.values():
        module.requires_grad_(False)
    return SDXLModel(
        unet=modules["unet"],
        text_encoders=(modules["te1"], modules["te2"]),
        vae=modules["vae"],
        tokenizers=(None, None),  # type: ignore[arg-type]  # nothing is encoded
        prediction_type="epsilon",
        zero_terminal_snr=False,
        native_size=native_size(configs),
        fingerprint="",
        source=source.path,
        vae_scale=1.0,
        vae_factor=vae_factor(configs),
        dtype=torch.float32,
        configs={**configs.parts, "scheduler": configs.scheduler},
    )
