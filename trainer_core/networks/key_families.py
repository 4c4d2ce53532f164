"""The spellings of LoRA keys that SDXL tools write, turned into kohya's.

Families (comfyui.md section 8): kohya with SGM names; kohya with diffusers names (`lora_unet_down_blocks_...`);
`lycoris_...`; generic dotted (`diffusion_model.input_blocks...`); diffusers and PEFT (`unet.down_blocks...lora_A`),
also the old attention-processor form; raw PEFT (`base_model.model...`); text encoders in their four spellings. A
missing alpha means alpha = rank, except where diffusers' own metadata names one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import AdapterError
from ..models.sgm_keys import bare_text_name, unet_diffusers_to_sgm
from .naming import kohya_name, part_of_name

# Longest first: `_lora.down.weight` must not be taken for `.down.weight` of something else.
_SUFFIXES: tuple[tuple[str, str], ...] = (
    (".lora_linear_layer.down.weight", ".lora_down.weight"),
    (".lora_linear_layer.up.weight", ".lora_up.weight"),
    (".lora_A.default.weight", ".lora_down.weight"),
    (".lora_B.default.weight", ".lora_up.weight"),
    ("_lora.down.weight", ".lora_down.weight"),
    ("_lora.up.weight", ".lora_up.weight"),
    (".lora.down.weight", ".lora_down.weight"),
    (".lora.up.weight", ".lora_up.weight"),
    (".lora_down.weight", ".lora_down.weight"),
    (".lora_up.weight", ".lora_up.weight"),
    (".lora_A.weight", ".lora_down.weight"),
    (".lora_B.weight", ".lora_up.weight"),
    ("_lora.alpha", ".alpha"),
    (".alpha", ".alpha"),
)

_TEXT_PREFIXES: tuple[tuple[str, str], ...] = (
    ("text_encoders.clip_l.transformer.", "te1"),
    ("text_encoders.clip_g.transformer.", "te2"),
    ("text_encoder_2.", "te2"),
    ("text_encoder.", "te1"),
)
_OLD_TEXT_NAMES = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
_UNDERSCORED_BLOCK = re.compile(r"(down|up)_blocks_(\d+)_(attentions|resnets|downsamplers|upsamplers)_(\d+)(?:_(.+))?$")
_UNDERSCORED_MID = re.compile(r"mid_block_(attentions|resnets)_(\d+)(?:_(.+))?$")


@dataclass(frozen=True)
class KohyaTensors:
    """Tensors under kohya's keys, how many modules came in which spelling, and the keys nobody knows."""

    tensors: Mapping[str, torch.Tensor]
    families: Mapping[str, int]
    unknown: tuple[str, ...]


def is_lora_key(key: str) -> bool:
    """Whether a key ends like a LoRA weight in any spelling."""
    return any(key.endswith(suffix) for suffix, _ in _SUFFIXES if suffix != ".alpha")


def to_kohya(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> KohyaTensors:
    """Rename all LoRA tensors to kohya's keys. Two keys for one place count as unknown."""
    renamed: dict[str, torch.Tensor] = {}
    modules: dict[str, set[str]] = {}
    unknown: list[str] = []
    for key, value in tensors.items():
        stem, suffix = _split(key)
        found = None if suffix is None else name_and_family(stem)
        if found is None or f"{found[0]}{suffix}" in renamed:
            unknown.append(key)
            continue
        renamed[f"{found[0]}{suffix}"] = value
        modules.setdefault(found[1], set()).add(found[0])
    _add_diffusers_alphas(renamed, metadata or {})
    return KohyaTensors(renamed, {family: len(names) for family, names in modules.items()}, tuple(unknown))


def name_and_family(stem: str) -> tuple[str, str] | None:
    """(kohya's name, family) of a module as some tool spells it, None when no family fits."""
    for family, convert in _FAMILIES.items():
        name = convert(stem)
        if name is not None and part_of_name(name) is not None:
            return name, family
    return None


def _split(key: str) -> tuple[str, str | None]:
    return next(((key[: -len(end)], kohya) for end, kohya in _SUFFIXES if key.endswith(end)), (key, None))


def _kohya_sgm(stem: str) -> str | None:
    return stem if part_of_name(stem) else None


def _kohya_diffusers(stem: str) -> str | None:
    return _from_underscored(stem.removeprefix("lora_unet_")) if stem.startswith("lora_unet_") else None


def _lycoris(stem: str) -> str | None:
    return _from_underscored(stem.removeprefix("lycoris_")) if stem.startswith("lycoris_") else None


def _kohya_one_encoder(stem: str) -> str | None:
    # ComfyUI takes `lora_te_` for text encoder 1 of SDXL.
    return f"lora_te1_{stem.removeprefix('lora_te_')}" if stem.startswith("lora_te_") else None


def _generic(stem: str) -> str | None:
    return kohya_name("unet", stem.removeprefix("diffusion_model.")) if stem.startswith("diffusion_model.") else None


def _text(stem: str) -> str | None:
    for prefix, part in _TEXT_PREFIXES:
        if stem.startswith(prefix):
            path = bare_text_name(stem.removeprefix(prefix))
            head, _, last = path.rpartition(".")
            return kohya_name(part, f"{head}.{_OLD_TEXT_NAMES.get(last, last)}")
    return None


def _diffusers(stem: str) -> str | None:
    path = stem.removeprefix("base_model.model.").removeprefix("unet.").replace(".processor.", ".")
    if path.endswith(".to_out"):
        path += ".0"
    if path.endswith(".to_out_lora"):
        path = f"{path.removesuffix('_lora')}.0"
    sgm = unet_diffusers_to_sgm(path)
    return None if sgm is None else kohya_name("unet", sgm)


_FAMILIES: Mapping[str, Callable[[str], str | None]] = {
    "kohya": _kohya_sgm,
    "kohya with diffusers names": _kohya_diffusers,
    "lycoris": _lycoris,
    "kohya with one text encoder": _kohya_one_encoder,
    "generic": _generic,
    "diffusers text encoder": _text,
    "diffusers": _diffusers,
}


def _from_underscored(name: str) -> str | None:
    """Kohya's name of `down_blocks_1_attentions_0_...`: the head gets its dots back, the inside is the same in SGM."""
    if match := _UNDERSCORED_BLOCK.match(name):
        head = f"{match[1]}_blocks.{match[2]}.{match[3]}.{match[4]}"
        inner = match[5]
    elif match := _UNDERSCORED_MID.match(name):
        head, inner = f"mid_block.{match[1]}.{match[2]}", match[3]
    else:
        head, inner = _TOP_LEVEL.get(name, name), None
    sgm = unet_diffusers_to_sgm(f"{head}.{inner}" if inner else head)
    return None if sgm is None else kohya_name("unet", sgm)


_TOP_LEVEL = {
    f"{embedding}_linear_{i}": f"{embedding}.linear_{i}"
    for embedding in ("time_embedding", "add_embedding")
    for i in (1, 2)
}


def _add_diffusers_alphas(renamed: dict[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Fill in alphas from the `lora_adapter_metadata` that diffusers' `save_lora_weights` writes.

    AdapterError when these are damaged: another alpha would load the file at another strength, without a word.
    """
    try:
        _fill_alphas(renamed, dict(json.loads(metadata.get("lora_adapter_metadata", "{}"))))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise AdapterError(
            f"its metadata 'lora_adapter_metadata', which hold the alphas, are damaged ({error}). Get the file again."
        ) from error


def _fill_alphas(renamed: dict[str, torch.Tensor], table: Mapping[str, Any]) -> None:
    prefixes = {"unet": "unet.", "te1": "text_encoder.", "te2": "text_encoder_2."}
    patterns = {
        part: _alpha_pattern(part, table.get(f"{prefix}alpha_pattern") or {}) for part, prefix in prefixes.items()
    }
    for key in [key for key in renamed if key.endswith(".lora_down.weight")]:
        name = key.removesuffix(".lora_down.weight")
        part = part_of_name(name) or "unet"
        alpha = patterns[part].get(name, table.get(f"{prefixes[part]}lora_alpha"))
        if alpha is not None and f"{name}.alpha" not in renamed:
            rank = renamed[key].shape[0]
            # PEFT's rsLoRA divides by sqrt(rank); in kohya's form that is a larger alpha.
            scale = rank**0.5 if table.get(f"{prefixes[part]}use_rslora") else 1.0
            renamed[f"{name}.alpha"] = torch.tensor(float(alpha) * scale)


def _alpha_pattern(part: str, pattern: Mapping[str, float]) -> dict[str, float]:
    """Alphas by kohya name from PEFT's `alpha_pattern`, whose keys are module paths."""
    prefix = {"unet": "unet.", "te1": "text_encoder.", "te2": "text_encoder_2."}[part]
    found = {name_and_family(f"{prefix}{path.lstrip('^')}"): alpha for path, alpha in pattern.items()}
    return {key[0]: alpha for key, alpha in found.items() if key is not None}
