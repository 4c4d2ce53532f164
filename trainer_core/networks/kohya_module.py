"""Foreign network modules by dotted name: `lycoris.kohya` from PyPI, `networks.lora` and kin from sd-scripts.

The contract is duck typing (kohya.md 1.1, 1.2): the module has `create_network`, whose network has `apply_to`. All
`network_args` arrive as strings, and `dropout` is added as sd-scripts does. Modules keep state on their classes (target
lists that grow in place, presets); it is put back after every use, so that runs do not leak into each other.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config import LoraConfig, part_alpha, part_rank
from ..errors import AdapterError, ConfigError, Problem
from .foreign_imports import import_network_module, refuse_unknown_arguments
from .foreign_network import BaseParameters, ForeignNetwork, base_parameters_of
from .naming import foreign_part
from .sgm_view import model_views
from .targets import PART_LABELS, PART_ORDER, part_root

if TYPE_CHECKING:
    from ..models import SDXLModel

_MODULE_LISTS = ("text_encoder_loras", "unet_loras", "unet_ofts", "loras")
"""Where networks of sd-scripts and LyCORIS keep their modules."""


def create_kohya_network(
    model: SDXLModel, config: LoraConfig, *, trained_parts: Sequence[str], seed: int
) -> ForeignNetwork:
    """Make the network of a foreign module, attached and in training mode; weights float32.

    Raises:
        ConfigError: an argument that the module does not read.
        AdapterError: the module cannot be imported, breaks, or makes no adapters for a part that is trained. The
            message names the module and holds its own words.
    """
    module, arguments = check_kohya_settings(config)
    for root in (model.unet, *model.text_encoders):
        root.requires_grad_(False)
    printed, before = io.StringIO(), base_parameters_of(model)
    with class_state_restored(module), seeded(seed), torch.inference_mode(False):
        with contextlib.redirect_stdout(printed):
            raw = _called(config.network, lambda: _create(module, model, config, arguments))
        _keep_parts(config.network, raw, model, trained_parts, before)
        with contextlib.redirect_stdout(printed):
            rates = _called(config.network, lambda: _rate_factors(raw))
        draws = _draws(config, arguments)
        network = ForeignNetwork(config.network, raw, model, before, draws=draws, rates=rates)
    missing = [part for part in trained_parts if part not in network.parts]
    if missing:
        network.detach()
        raise AdapterError(f"'{config.network}' made no adapters for {', '.join(missing)}, which is to be trained.")
    network.messages = tuple(f"{config.network}: {line}" for line in printed.getvalue().splitlines() if line.strip())
    network.rebuild = lambda: create_kohya_network(model, config, trained_parts=trained_parts, seed=seed)
    network.train()
    return network


def check_kohya_settings(config: LoraConfig) -> tuple[ModuleType, dict[str, str]]:
    """(the foreign module, its arguments). Raises as `create_kohya_network`, as far as no model is needed."""
    module = import_network_module(config.network, config.sd_scripts_path)
    arguments = parse_arguments(config.network_args)
    refuse_unknown_arguments(module, arguments)
    _refuse_other_ranks(config, _main_part(config))
    return module, arguments


def _main_part(config: LoraConfig) -> str:
    return "unet" if part_rank(config, "unet") else "te2"


def parse_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """`key=value` texts as sd-scripts reads them: split at the first `=`, values stay texts."""
    parsed: dict[str, str] = {}
    problems: list[Problem] = []
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            problems.append(Problem("lora.network_args", text, "it is not key=value", "Write key=value."))
        parsed[key.strip()] = value
    if problems:
        raise ConfigError(problems)
    return parsed


def _create(module: ModuleType, model: SDXLModel, config: LoraConfig, arguments: Mapping[str, str]) -> Any:
    unet, encoders = model_views(model, _unet_class(module))
    main = _main_part(config)
    dropout = config.dropout or None
    # sd-scripts adds `dropout` itself, because LyCORIS reads it there.
    extra: dict[str, Any] = {"dropout": dropout, **arguments}
    for key in ("rank_dropout", "module_dropout"):
        if getattr(config, key):
            extra.setdefault(key, str(getattr(config, key)))
    if config.conv_rank:
        extra.setdefault("conv_dim", str(config.conv_rank))
        alpha = config.conv_rank / 2 if config.conv_alpha is None else config.conv_alpha
        extra.setdefault("conv_alpha", str(alpha))
    raw = module.create_network(
        1.0,
        part_rank(config, main),
        part_alpha(config, main),
        model.vae,
        encoders,
        unet,
        neuron_dropout=dropout,
        **extra,
    )
    if raw is None:
        raise AdapterError(f"'{module.__name__}' gave no network back for these arguments.")
    raw.apply_to(encoders, unet, True, True)
    return raw


def _refuse_other_ranks(config: LoraConfig, main: str) -> None:
    """kohya's contract has one rank and one alpha for all parts."""
    wanted = (part_rank(config, main), part_alpha(config, main))
    problems = [
        Problem(
            f"lora.{part}_rank",
            f"rank {part_rank(config, part)}, alpha {part_alpha(config, part)}",
            f"'{config.network}' has one rank and alpha for all parts ({wanted[0]} and {wanted[1]:g} here)",
            "Give all parts the same, or 0 to leave one out.",
        )
        for part in PART_ORDER
        if part_rank(config, part) and (part_rank(config, part), part_alpha(config, part)) != wanted
    ]
    if problems:
        raise ConfigError(problems)


def _unet_class(module: ModuleType) -> type[nn.Module]:
    """sd-scripts asks `isinstance(unet, SdxlUNet2DConditionModel)` to know that it is SDXL."""
    found = getattr(module, "SdxlUNet2DConditionModel", None)
    return found if isinstance(found, type) else nn.Module


def _keep_parts(name: str, raw: Any, model: SDXLModel, parts: Sequence[str], before: BaseParameters) -> None:
    """Take the modules of parts that are not trained out again: foreign modules know 'text encoder' as one thing.

    Which part a module belongs to is seen from the layer it is on: names may be wrong (DyLoRA of sd-scripts gives both
    text encoders the same ones).
    """
    owners = {module: part for part in PART_ORDER for module in part_root(model, part).modules()}
    lists = [attribute for attribute in _MODULE_LISTS if hasattr(raw, attribute)]
    if not lists:
        raise AdapterError(f"'{name}' keeps its modules where they cannot be found (no unet_loras).")
    released: set[nn.Module] = set()
    for attribute in lists:
        kept = []
        for lora in getattr(raw, attribute):
            part, called = owners.get(_base_of(lora)), _name_of(lora)
            if part is None or part not in parts:
                _release(lora, before)
                released.add(lora)
                continue
            if foreign_part(called) != part:
                raise AdapterError(
                    f"'{name}' calls its adapter on a layer of {PART_LABELS[part]} '{called}', which is no name of "
                    "SDXL there: its files could not be loaded. Leave the text encoders out (lora.te1_rank = 0, "
                    "lora.te2_rank = 0)."
                )
            kept.append(lora)
        setattr(raw, attribute, kept)
    for child_name in [child_name for child_name, child in raw.named_children() if child in released]:
        delattr(raw, child_name)


def _name_of(lora: Any) -> str:
    return str(getattr(lora, "lora_name", None) or getattr(lora, "oft_name", ""))


def _base_of(lora: Any) -> nn.Module:
    """The layer that a foreign adapter is on."""
    owners = getattr(lora, "org_module", None)
    base = owners[0] if isinstance(owners, list | tuple) and owners else getattr(lora.org_forward, "__self__", None)
    if not isinstance(base, nn.Module):
        raise AdapterError(f"'{_name_of(lora)}' does not say which layer it is on, so it cannot be taken off again.")
    return base


def _release(lora: Any, before: BaseParameters) -> None:
    """Give the base layer its own forward and weights back."""
    base = _base_of(lora)
    for key in [key for key in base.__dict__ if key == "forward" or key.startswith("_lycoris_")]:
        del base.__dict__[key]
    base._parameters.update(before.get(base, {}))


def _rate_factors(raw: Any) -> dict[nn.Parameter, float] | None:
    """What the module itself would train, and at which share of the part's rate: its optimizer groups (LoRA+, block
    rates, weights it keeps fixed such as LoRA-FA's `lora_down`). None when it has no such method."""
    prepare = getattr(raw, "prepare_optimizer_params", None)
    if prepare is None:
        return None
    try:
        groups = prepare(1.0, 1.0, 1.0)
    except TypeError:  # the older form, which sd-scripts falls back to as well
        groups = prepare(1.0, 1.0)
    if isinstance(groups, tuple):
        groups = groups[0]
    return {parameter: float(group.get("lr", 1.0)) for group in groups for parameter in group["params"]}


def _called(name: str, call: Any) -> Any:
    try:
        return call()
    except AdapterError:
        raise
    except (
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        AssertionError,
        RuntimeError,
        NotImplementedError,
    ) as error:
        raise AdapterError(
            f"The network module '{name}' broke while it made its network: {type(error).__name__}: {error}. "
            "Check lora.network_args."
        ) from error


def _draws(config: LoraConfig, arguments: Mapping[str, str]) -> bool:
    rates = [config.dropout, config.rank_dropout, config.module_dropout]
    rates += [float(arguments[key] or 0) for key in ("dropout", "rank_dropout", "module_dropout") if key in arguments]
    return any(rate > 0 for rate in rates) or arguments.get("algo") == "dylora" or "dylora" in config.network


@contextmanager
def class_state_restored(module: ModuleType) -> Iterator[None]:
    """Put back all plain values on the module's classes after the block."""
    classes = [value for value in vars(module).values() if isinstance(value, type) and _belongs(value, module)]
    before = {cls: {key: value for key, value in vars(cls).items() if _is_plain(key, value)} for cls in classes}
    saved = {cls: copy.deepcopy(values) for cls, values in before.items()}
    try:
        yield
    finally:
        for cls, values in before.items():
            for key, value in values.items():
                if isinstance(value, list):
                    value[:] = saved[cls][key]
                elif isinstance(value, dict):
                    value.clear()
                    value.update(saved[cls][key])
                setattr(cls, key, value)
            for key in [key for key in vars(cls) if _is_plain(key, vars(cls)[key]) and key not in values]:
                delattr(cls, key)


def _belongs(cls: type, module: ModuleType) -> bool:
    return cls.__module__.split(".")[0] == module.__name__.split(".")[0]


def _is_plain(key: str, value: object) -> bool:
    return not key.startswith("__") and isinstance(value, bool | int | float | str | list | dict | tuple)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Foreign modules draw their first weights from torch's global stream: give it the run's seed, and put it back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
