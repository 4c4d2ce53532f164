"""Other spellings of a LoRA file: diffusers' and ComfyUI's own names. (PEFT folders are in `peft_folder.py`.)

kohya's file is the default, because every tool reads it. In diffusers' form the scale is folded into `lora_B`, so that
readers that know no alpha compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..errors import AdapterError
from .from_file import targets_by_name
from .lora_file import ALPHA, DOWN, UP
from .naming import unet_sgm_path
from .targets import Target

if TYPE_CHECKING:
    from ..models import SDXLModel

FORMATS = ("kohya", "diffusers", "comfyui")
_DIFFUSERS_PREFIX = {"unet": "unet.", "te1": "text_encoder.text_model.", "te2": "text_encoder_2.text_model."}
_COMFY_CLIP = {"te1": "clip_l", "te2": "clip_g"}


def to_format(state: Mapping[str, torch.Tensor], model: SDXLModel, form: str) -> dict[str, torch.Tensor]:
    """The tensors of a kohya state under the names of another format.

    Raises:
        AdapterError: an unknown format, or tensors that this format has no names for (other adapters than LoRA).
    """
    if form == "kohya":
        return dict(state)
    if form not in FORMATS:
        raise AdapterError(f"'{form}' is no file format for a LoRA; allowed are {', '.join(FORMATS)}.")
    places = targets_by_name(model)
    names = [key.removesuffix(DOWN) for key in state if key.endswith(DOWN)]
    extra = [key for key in state if not key.endswith((DOWN, UP, ALPHA))]
    if extra or not names:
        raise AdapterError(
            f"Only plain LoRA weights have names in the '{form}' format; '{(extra or list(state) or ['nothing'])[0]}' "
            "is something else. Save it in the kohya format."
        )
    written: dict[str, torch.Tensor] = {}
    for name in names:
        down, up, alpha = (state[name + key] for key in (DOWN, UP, ALPHA))
        if form == "diffusers":
            stem = diffusers_stem(places[name])
            scale = float(alpha) / down.shape[0]
            written[f"{stem}.lora_A.weight"] = down
            written[f"{stem}.lora_B.weight"] = up * scale
        else:
            stem = _comfyui_stem(places[name], model)
            written[f"{stem}{DOWN}"], written[f"{stem}{UP}"], written[f"{stem}{ALPHA}"] = down, up, alpha
    return written


def diffusers_stem(target: Target) -> str:
    """Module path with diffusers' part prefix; text encoders always with `text_model`, as in all published files."""
    path = target.path if target.part == "unet" else target.path.removeprefix("text_model.")
    return f"{_DIFFUSERS_PREFIX[target.part]}{path}"


def _comfyui_stem(target: Target, model: SDXLModel) -> str:
    if target.part == "unet":
        return f"diffusion_model.{unet_sgm_path(model.unet, target.path)}"
    path = target.path.removeprefix("text_model.")
    return f"text_encoders.{_COMFY_CLIP[target.part]}.transformer.text_model.{path}"
