"""What can be known about the network of a run before anything is loaded: settings of the kind, the foreign module and
its arguments, and target rules against the model's own layers (built without weights from its header)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..config import LoraConfig, ModelConfig
from ..errors import AdapterError, ConfigError, ModelFileError, Problem

if TYPE_CHECKING:
    from ..models import SDXLModel

_LAYER_SETTINGS = (
    "targets",
    "preset",
    "block_dims",
    "block_alphas",
    "conv_block_dims",
    "conv_block_alphas",
    "down_lr_weight",
    "mid_lr_weight",
    "up_lr_weight",
)


def network_problems(lora: LoraConfig, model: ModelConfig, trained_parts: Sequence[str]) -> list[Problem]:
    """Problems of `[lora]` that need no base weights. The model's layers are looked at only where rules choose among
    them, or where the run starts from a LoRA file."""
    from .create import check_kind
    from .target_rules import parse_rules

    try:
        parse_rules(lora.targets)
        check_kind(lora)
        if any(getattr(lora, name) != getattr(LoraConfig(), name) for name in _LAYER_SETTINGS):
            from .selection import select_targets

            select_targets(meta_model(model), lora, trained_parts)
    except ConfigError as error:
        return list(error.problems)
    except AdapterError as error:
        if lora.network != "native":
            return [Problem("lora.network", lora.network, str(error), "")]
        return [Problem("lora.targets", list(lora.targets) or lora.preset, str(error), "")]
    except ModelFileError as error:
        return [Problem("model.path", model.path, str(error), "")]
    return _start_problems(lora, model, trained_parts)


def _start_problems(lora: LoraConfig, model: ModelConfig, trained_parts: Sequence[str]) -> list[Problem]:
    """Whether the file that the run starts from fits its network. A damaged header is told by the caller."""
    if not lora.weights or lora.network != "native":
        return []
    from .lora_file import load_lora, read_lora_header
    from .network import create_lora_network
    from .warm_start import check_start

    path = Path(lora.weights).expanduser()
    try:
        read_lora_header(path)
    except AdapterError:
        return []
    try:
        file = load_lora(path)
        check_start(create_lora_network(meta_model(model), lora, trained_parts=trained_parts, seed=0), file)
    except AdapterError as error:
        return [Problem("lora.weights", lora.weights, str(error), "")]
    return []


_LORA_KINDS = ("native", "peft:lora", "peft:rslora", "networks.lora", "networks.lora_fa", "networks.dylora")


def format_problems(lora: LoraConfig, form: str) -> list[Problem]:
    """Other names than kohya's exist for plain LoRA weights only."""
    if form == "kohya" or lora.network in _LORA_KINDS:
        return []
    why = f"'{lora.network}' may make other weights than LoRA's, for which this format has no names"
    return [Problem("checkpoint.save_format", form, why, "Use kohya (safe-scaler convert can try it afterwards).")]


def meta_model(model: ModelConfig) -> SDXLModel:
    """UNet and text encoders of a base model without their weights: names, kinds and shapes only.

    Raises:
        ModelFileError: the model cannot be read.
    """
    from ..models.configs import find_configs
    from ..models.loading import builder, resolve_path
    from ..models.sources import find_source
    from ..models.weights import build_on_meta

    source = find_source(resolve_path(model.path))
    parts = ("unet", "te1", "te2")
    folder = None if model.config_dir is None else Path(model.config_dir)
    configs = find_configs(source, source, folder, parts)
    unet, te1, te2 = (build_on_meta(builder(part, configs.parts[part])) for part in parts)
    made: Any = SimpleNamespace(unet=unet, text_encoders=(te1, te2), configs=configs.parts)
    return made


def real_sdxl_names() -> SDXLModel:
    """The same for real SDXL, from the configs in the package."""
    from ..models.configs import shipped_config
    from ..models.loading import builder
    from ..models.weights import build_on_meta

    configs = {part: dict(shipped_config("sdxl", part) or {}) for part in ("unet", "te1", "te2")}
    unet, te1, te2 = (build_on_meta(builder(part, config)) for part, config in configs.items())
    made: Any = SimpleNamespace(unet=unet, text_encoders=(te1, te2), configs=configs)
    return made
