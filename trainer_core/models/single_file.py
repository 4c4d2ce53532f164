"""Write an SDXL model as one SGM `.safetensors` file, the form that ComfyUI, A1111 and kohya read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import sgm_keys
from .sdxl import SDXLModel
from .sources import CONFIG_KEY
from .tensor_file import Outgoing, write_tensors


def save_single_file(
    model: SDXLModel,
    path: str | Path,
    dtype: torch.dtype = torch.float16,
    *,
    with_vae: bool = True,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write UNet, text encoders and VAE under SGM names, all in `dtype`, one tensor in memory at a time.

    The configs go into the header's metadata (`safe_scaler.configs`), because shapes do not tell all of them; the
    marker keys `v_pred` and `ztsnr` are written where they hold. Temporary name, flush, rename.
    """
    tensors = single_file_tensors(model, dtype, with_vae=with_vae)
    if model.prediction_type == "v":
        tensors["v_pred"] = Outgoing(dtype, (), lambda: torch.zeros(()))
    if model.zero_terminal_snr:
        tensors["ztsnr"] = Outgoing(dtype, (), lambda: torch.zeros(()))
    configs = json.dumps({part: dict(config) for part, config in model.configs.items()}, sort_keys=True)
    target = Path(path)
    write_tensors(target, tensors, {**(metadata or {}), CONFIG_KEY: configs})
    return target


def single_file_tensors(model: SDXLModel, dtype: torch.dtype, *, with_vae: bool = True) -> dict[str, Outgoing]:
    """The keys of the model's single file, with shapes and where the values come from. Works on meta modules too."""
    layers, levels = (
        int(model.configs["unet"].get("layers_per_block", 2)),
        len(model.configs["unet"]["block_out_channels"]),
    )
    depth = len(model.configs["vae"]["block_out_channels"])
    found: dict[str, Outgoing] = {}

    def unet_name(name: str) -> str | None:
        return sgm_keys.unet_diffusers_to_sgm(name, layers, levels)

    def vae_name(name: str) -> str | None:
        return sgm_keys.vae_diffusers_to_ldm(name, depth)

    _add(found, model.unet, sgm_keys.UNET_PREFIX, unet_name, dtype)
    _add(found, model.text_encoders[0], sgm_keys.TE1_PREFIX, sgm_keys.te1_bare_to_sgm, dtype)
    _add_open_clip(found, model.text_encoders[1], dtype)
    if with_vae:
        _add(found, model.vae, sgm_keys.VAE_PREFIX, vae_name, dtype, as_conv=True)
    return found


def _add(
    found: dict[str, Outgoing],
    module: nn.Module,
    prefix: str,
    renamed: Callable[[str], str | None],
    dtype: torch.dtype,
    *,
    as_conv: bool = False,
) -> None:
    """Add a module's weights; `as_conv` writes linear attention weights of the VAE as 1x1 convolutions."""
    for name, tensor in module.state_dict().items():
        key = renamed(name)
        if key is None:
            raise ValueError(f"{name} has no SGM name: this is no SDXL model")
        shape = tuple(tensor.shape)
        if as_conv and ".attentions." in name and len(shape) == 2:
            shape = (*shape, 1, 1)
        found[prefix + key] = Outgoing(dtype, shape, _reshaped(tensor, shape))


def _reshaped(tensor: torch.Tensor, shape: tuple[int, ...]) -> Callable[[], torch.Tensor]:
    return lambda: tensor.reshape(shape)


def _add_open_clip(found: dict[str, Outgoing], module: nn.Module, dtype: torch.dtype) -> None:
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in module.state_dict().items():
        mapped: Any = sgm_keys.te2_bare_to_open_clip(sgm_keys.bare_text_name(name))
        if mapped is None:
            raise ValueError(f"{name} has no open_clip name: this is no SDXL text encoder")
        key, block = sgm_keys.TE2_PREFIX + mapped[0], mapped[1]
        if block is not None:
            stacks.setdefault(key, {})[block] = tensor
            continue
        values = tensor.t() if mapped[0] == "text_projection" else tensor
        found[key] = Outgoing(dtype, tuple(values.shape), _reshaped(values, tuple(values.shape)))
    for key, blocks in stacks.items():
        ordered = [blocks[index] for index in range(3)]
        shape = (3 * ordered[0].shape[0], *ordered[0].shape[1:])
        found[key] = Outgoing(dtype, shape, _stacked(ordered))


def _stacked(blocks: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: torch.cat(blocks)
