"""PEFT folders (`adapter_config.json` and `adapter_model.safetensors`), one a part of the model.

The form is PEFT's own `save_pretrained`: keys `base_model.model.<module path>.lora_A.weight`, ranks and alphas in
the config with patterns for modules that differ from the most common value.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

from ..errors import AdapterError
from .from_file import targets_by_name
from .kohya_file import cast_for_file, save_lora
from .lora_file import ALPHA, DOWN, UP, LoraFile, read_lora_header, read_tensors
from .naming import kohya_name, unet_sgm_path
from .targets import PART_LABELS, part_root

if TYPE_CHECKING:
    from ..models import SDXLModel

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write_peft_folder(
    folder: str | Path, state: Mapping[str, torch.Tensor], model: SDXLModel, part: str, dtype: str = "fp32"
) -> Path:
    """Write the adapters of one part as a PEFT folder that must not exist yet.

    Raises:
        AdapterError: the state has no LoRA weights for this part, or the folder exists.
    """
    target = Path(folder)
    places = targets_by_name(model)
    names = [key.removesuffix(DOWN) for key in state if key.endswith(DOWN) and places[key[: -len(DOWN)]].part == part]
    if not names:
        raise AdapterError(f"There are no LoRA weights for {PART_LABELS[part]}; its PEFT folder would be empty.")
    if target.exists():
        raise AdapterError(f"'{target}' exists and is not overwritten. Choose another name.")
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        path = places[name].path
        tensors[f"{_PREFIX}{path}.lora_A.weight"] = state[name + DOWN]
        tensors[f"{_PREFIX}{path}.lora_B.weight"] = state[name + UP]
    paths = {name: places[name].path for name in names}
    ranks = {paths[name]: int(state[name + DOWN].shape[0]) for name in names}
    alphas = {paths[name]: float(state[name + ALPHA]) for name in names}
    cast_for_file(tensors, dtype)
    target.mkdir(parents=True)
    (target / CONFIG_NAME).write_text(json.dumps(_config(ranks, alphas), indent=2) + "\n", encoding="utf-8")
    save_lora(target / WEIGHTS_NAME, tensors, {"format": "pt"}, dtype)
    return target


def _config(ranks: Mapping[str, int], alphas: Mapping[str, float]) -> dict[str, Any]:
    rank, alpha = Counter(ranks.values()).most_common(1)[0][0], Counter(alphas.values()).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {f"^{_escaped(path)}": value for path, value in ranks.items() if value != rank},
        "alpha_pattern": {f"^{_escaped(path)}": value for path, value in alphas.items() if value != alpha},
        "target_modules": sorted(ranks),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "task_type": None,
        "base_model_name_or_path": None,
    }


def read_peft_folder(folder: str | Path, model: SDXLModel, part: str) -> LoraFile:
    """Read a PEFT LoRA folder made for one part ("unet", "te1", "te2") of the model.

    Raises:
        AdapterError: files are missing or damaged, it is another kind than LoRA, or modules have no place in the part.
    """
    source = Path(folder)
    config = _read_config(source / CONFIG_NAME)
    path = source / WEIGHTS_NAME
    read_lora_header(path)
    names = _names_of(model, part)
    tensors: dict[str, torch.Tensor] = {}
    for key, value in safetensors.torch.load_file(path).items():
        stem, _, side = key.removeprefix(_PREFIX).replace(".default", "").rpartition(".lora_")
        name = names.get(stem.removeprefix("text_model.") if part != "unet" else stem)
        if name is None or side not in ("A.weight", "B.weight"):
            raise AdapterError(f"'{path}': '{key}' has no place in {PART_LABELS[part]} of this model.")
        tensors[name + (DOWN if side == "A.weight" else UP)] = value
        if side == "A.weight":
            tensors[name + ALPHA] = torch.tensor(_alpha(config, stem, int(value.shape[0])))
    return read_tensors(path, tensors, {})


def _names_of(model: SDXLModel, part: str) -> dict[str, str]:
    root = part_root(model, part)
    if part != "unet":
        paths = (path.removeprefix("text_model.") for path, _ in root.named_modules() if path)
        return {path: kohya_name(part, path) for path in paths}
    sgm = ((path, unet_sgm_path(root, path)) for path, _ in root.named_modules() if path)
    return {path: kohya_name(part, name) for path, name in sgm if name is not None}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise AdapterError(f"There is no '{path}'. Give a folder that PEFT's save_pretrained wrote.") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise AdapterError(f"'{path}' cannot be read: {error}.") from error
    if config.get("peft_type") != "LORA" or config.get("use_dora"):
        kind = "DoRA" if config.get("use_dora") else config.get("peft_type")
        raise AdapterError(f"'{path}' is a PEFT adapter of the kind {kind}; only plain LoRA can be read.")
    return config


def _alpha(config: Mapping[str, Any], path: str, rank: int) -> float:
    alpha = float(config.get("lora_alpha") or rank)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        plain = pattern.removeprefix("^").replace("\\.", ".").removesuffix("$")
        if path == plain or (not pattern.startswith("^") and path.endswith(f".{plain}")):
            alpha = float(value)
    return alpha * (rank**0.5 if config.get("use_rslora") else 1.0)


def _escaped(path: str) -> str:
    return path.replace(".", "\\.")
