"""The network that a config asks for: ours, PEFT's, or a foreign kohya module's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from ..config import LoraConfig
from ..errors import ConfigError, Problem
from .foreign_network import ForeignNetwork
from .network import LoraNetwork, create_lora_network, refuse_combinations

if TYPE_CHECKING:
    from ..models import SDXLModel

NATIVE = "native"
PEFT_PREFIX = "peft:"

_NATIVE_ONLY = (
    "preset",
    "targets",
    "init",
    "clamp",
    "rs_lora",
    "block_dims",
    "block_alphas",
    "conv_block_dims",
    "conv_block_alphas",
    "down_lr_weight",
    "mid_lr_weight",
    "up_lr_weight",
    "block_lr_zero_threshold",
)
_PEFT_REFUSES = ("init", "clamp", "rs_lora", "rank_dropout", "module_dropout")


def create_network(
    model: SDXLModel, config: LoraConfig, *, trained_parts: Sequence[str], seed: int
) -> LoraNetwork | ForeignNetwork:
    """Make the network of `config`, attach it and switch it to training mode.

    Raises:
        ConfigError: a setting that this kind of network does not have.
        AdapterError: nothing can be trained, or a foreign module is missing or breaks.
    """
    check_kind(config)
    if config.network == NATIVE:
        return create_lora_network(model, config, trained_parts=trained_parts, seed=seed)
    if config.network.startswith(PEFT_PREFIX):
        from .peft_adapter import create_peft_network

        return create_peft_network(model, config, trained_parts=trained_parts, seed=seed)
    from .kohya_module import create_kohya_network

    return create_kohya_network(model, config, trained_parts=trained_parts, seed=seed)


def check_kind(config: LoraConfig) -> None:
    """Refuse what is known to be wrong about the kind of network, without a model.

    Raises:
        ConfigError: a setting or an argument that this kind of network does not have.
        AdapterError: a foreign module is missing.
    """
    if config.network == NATIVE:
        _refuse(config, ("network_args",))
        refuse_combinations(config)
    elif config.network.startswith(PEFT_PREFIX):
        from .peft_adapter import check_peft_settings

        _refuse(config, _PEFT_REFUSES)
        check_peft_settings(config)
    else:
        from .kohya_module import check_kohya_settings

        _refuse(config, _NATIVE_ONLY)
        check_kohya_settings(config)


def _refuse(config: LoraConfig, names: Sequence[str]) -> None:
    defaults = {field.name: field.default for field in fields(LoraConfig)}
    problems = [
        Problem(
            f"lora.{name}",
            getattr(config, name),
            f"network '{config.network}' does not have it",
            "Unset it" + (", or give it in lora.network_args." if name != "network_args" else "."),
        )
        for name in names
        if getattr(config, name) != defaults[name]
    ]
    if problems:
        raise ConfigError(problems)
