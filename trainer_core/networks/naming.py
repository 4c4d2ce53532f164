"""Names of adapters in files: kohya's, made from SGM paths for the UNet and from HF paths for the text encoders.

Facts: `kohya.md` 2.1 and 2.2. The text encoders' names always hold `text_model_`, although transformers >= 5.6 dropped
that level from `CLIPTextModel`; ComfyUI and A1111 skip keys without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..models.sgm_keys import bare_text_name, unet_diffusers_to_sgm

if TYPE_CHECKING:
    from torch import nn

PREFIXES: Mapping[str, str] = {"te1": "lora_te1", "te2": "lora_te2", "unet": "lora_unet"}
"""Part -> prefix of its names in a file, in the order in which kohya writes the parts."""


def kohya_name(part: str, sgm_or_text_path: str) -> str:
    """Name of an adapter in a file. UNet: the SGM path; text encoders: the path without `text_model.`."""
    inner = sgm_or_text_path if part == "unet" else f"text_model.{bare_text_name(sgm_or_text_path)}"
    return f"{PREFIXES[part]}_{inner.replace('.', '_')}"


_SDXL_NAME = re.compile(
    r"lora_(?:(unet)_(?:input_blocks_\d+_\d|middle_block_\d|output_blocks_\d+_\d|time_embed|label_emb_0|out)_"
    r"|(te1|te2)_(?:text_model_encoder_layers_\d+_|text_projection$))"
)


def part_of_name(name: str) -> str | None:
    """Part ("unet", "te1", "te2") that a name in a file belongs to, None when it is not kohya's SDXL naming."""
    match = _SDXL_NAME.match(name)
    return match[1] or match[2] if match else None


def foreign_part(name: str) -> str | None:
    """`part_of_name` for adapters of foreign modules, which have prefixes of their own (OFT of sd-scripts)."""
    return part_of_name(name.replace("oft_unet_", "lora_unet_", 1) if name.startswith("oft_unet_") else name)


_ATTENTION_IN_LEVEL_0 = re.compile(r"lora_unet_(?:input_blocks_[12]|output_blocks_[678])_1_")


def is_sdxl_place(name: str) -> bool:
    """Whether SDXL has attention where this name puts it: SD 1.x and 2.x have it in the first level too."""
    return _ATTENTION_IN_LEVEL_0.match(name) is None


def module_names(part: str, root: nn.Module) -> dict[str, str]:
    """Module path -> name in a file, for every module of `root` that has a place in kohya's naming."""
    paths = [path for path, _ in root.named_modules() if path]
    if part != "unet":
        return {path: kohya_name(part, path) for path in paths}
    sgm = {path: unet_sgm_path(root, path) for path in paths}
    return {path: kohya_name(part, name) for path, name in sgm.items() if name is not None}


def unet_sgm_path(unet: nn.Module, path: str) -> str | None:
    """SGM path of a module of diffusers' UNet, None where SGM has no such module."""
    config: Any = getattr(unet, "config", None)
    layers = getattr(config, "layers_per_block", 2)
    levels = len(getattr(config, "block_out_channels", (0, 0, 0)))
    return unet_diffusers_to_sgm(path, layers if isinstance(layers, int) else layers[0], levels)


_UNET_BLOCK_NAME = re.compile(r"lora_unet_(input_blocks|middle_block|output_blocks)_(\d+)")
_TE_LAYER_NAME = re.compile(r"lora_te[12]_text_model_encoder_layers_(\d+)_")


def block_of_name(name: str) -> str:
    """Human name of the block a module belongs to: IN04, MID, OUT00, "layer 11", or "base" outside of all blocks."""
    if match := _UNET_BLOCK_NAME.match(name):
        label = {"input_blocks": "IN", "output_blocks": "OUT"}.get(match[1])
        return f"{label}{int(match[2]):02d}" if label else "MID"
    if match := _TE_LAYER_NAME.match(name):
        return f"layer {match[1]}"
    return "base"


def text_layer_of_name(name: str) -> int | None:
    """Index of the text-encoder layer in a name, None for other names."""
    match = _TE_LAYER_NAME.match(name)
    return int(match[1]) if match else None
