"""The header of a full-size SDXL single file, made from the real configs without a byte of weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

from torch import nn

from trainer_core.models import sgm_keys
from trainer_core.models.configs import shipped_config
from trainer_core.models.loading import builder
from trainer_core.models.weights import build_on_meta

PARTS = ("unet", "te1", "te2", "vae")


def modules() -> dict[str, nn.Module]:
    return {part: build_on_meta(builder(part, shipped_config("sdxl", part) or {})) for part in PARTS}


def sgm_shapes(parts: dict[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    """Every key of a full-size SGM checkpoint with its shape, as Stability AI's file has them."""
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in parts["unet"].state_dict().items():
        found[f"{sgm_keys.UNET_PREFIX}{sgm_keys.unet_diffusers_to_sgm(name)}"] = tuple(tensor.shape)
    for name, tensor in parts["vae"].state_dict().items():
        shape = tuple(tensor.shape)
        conv = (*shape, 1, 1) if ".attentions." in name and len(shape) == 2 else shape
        found[f"{sgm_keys.VAE_PREFIX}{sgm_keys.vae_diffusers_to_ldm(name)}"] = conv
    for name, tensor in parts["te1"].state_dict().items():
        found[f"{sgm_keys.TE1_PREFIX}{sgm_keys.bare_text_name(name)}"] = tuple(tensor.shape)
    for name, tensor in parts["te2"].state_dict().items():
        mapped = sgm_keys.te2_bare_to_open_clip(sgm_keys.bare_text_name(name))
        assert mapped is not None, name
        key, block = mapped
        shape = tuple(tensor.shape)
        if block is not None:
            shape = (3 * shape[0], *shape[1:])
        found[f"{sgm_keys.TE2_PREFIX}{key}"] = tuple(reversed(shape)) if key == "text_projection" else shape
    return found


def write_header_only(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F16") -> Path:
    """A sparse file: a true header, and as many zero bytes as it tells of (they take no disk)."""
    width = {"F16": 2, "BF16": 2, "F32": 4, "I64": 8, "U8": 1}[dtype]
    header: dict[str, object] = {}
    offset = 0
    for name, shape in shapes.items():
        length = math.prod(shape) * width
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.truncate(8 + len(text) + offset)
    return path
