"""Foreign network modules by dotted name: `lycoris.kohya` from PyPI, `networks.lora` and kin from sd-scripts.

The contract is duck typing (kohya.md 1.1, 1.2): the module has `create_network`, whose network has `apply_to`. All
`network_args` arrive as strings, and `dropout` is added as sd-scripts does. Modules keep state on their classes (target
lists that grow in place, presets); it is put back after every use, so that runs do not leak into each other.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import inspect
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config import LoraConfig, part_alpha, part_rank
from ..errors import AdapterError, ConfigError, Problem
from .foreign_network import BaseParameters, ForeignNetwork, base_parameters_of
from .naming import part_of_name
from .sgm_view import model_views

if TYPE_CHECKING:
    from ..models import SDXLModel

SD_SCRIPTS_VARIABLE = "SD_SCRIPTS_PATH"
_INSTALL = {"lycoris": "pip install lycoris-lora"}
_ADDED_BY_TRAINER = {"dropout"}


def create_kohya_network(
    model: SDXLModel, config: LoraConfig, *, trained_parts: Sequence[str], seed: int
) -> ForeignNetwork:
    """Make the network of a foreign module, attached and in training mode; weights float32.

    Raises:
        ConfigError: an argument that the module does not read.
        AdapterError: the module cannot be imported, breaks, or makes no adapters for a part that is trained. The
            message names the module and holds its own words.
    """
    module = import_network_module(config.network)
    arguments = parse_arguments(config.network_args)
    _refuse_unknown_arguments(module, arguments)
    for root in (model.unet, *model.text_encoders):
        root.requires_grad_(False)
    printed, before = io.StringIO(), base_parameters_of(model)
    with class_state_restored(module), seeded(seed), torch.inference_mode(False):
        with contextlib.redirect_stdout(printed):
            raw = _called(config.network, lambda: _create(module, model, config, arguments))
        _keep_parts(config.network, raw, trained_parts, before)
        network = ForeignNetwork(config.network, raw, model, before, draws=_draws(config, arguments))
    missing = [part for part in trained_parts if part not in network.parts]
    if missing:
        network.detach()
        raise AdapterError(f"'{config.network}' made no adapters for {', '.join(missing)}, which is to be trained.")
    network.messages = tuple(f"{config.network}: {line}" for line in printed.getvalue().splitlines() if line.strip())
    network.rebuild = lambda: create_kohya_network(model, config, trained_parts=trained_parts, seed=seed)
    network.train()
    return network


def import_network_module(name: str) -> ModuleType:
    """Import a foreign module; `networks.*` comes from the sd-scripts checkout that SD_SCRIPTS_PATH names.

    Raises:
        AdapterError: it is not there, or one of its own imports fails (all that is missing is named).
    """
    folder = os.environ.get(SD_SCRIPTS_VARIABLE) if name.startswith("networks.") else None
    if name.startswith("networks.") and not folder:
        raise AdapterError(
            f"'{name}' is part of sd-scripts. Set {SD_SCRIPTS_VARIABLE} to the folder of an sd-scripts checkout, or "
            "use lora.network = 'native', which trains the same LoRA."
        )
    if folder and not (Path(folder) / Path(*name.split("."))).with_suffix(".py").is_file():
        raise AdapterError(f"{SD_SCRIPTS_VARIABLE} is '{folder}', but there is no '{name.replace('.', '/')}.py' in it.")
    with _on_path(folder):
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            missing = getattr(error, "name", None) or str(error)
            install = _INSTALL.get(name.split(".")[0], f"install '{missing}'")
            raise AdapterError(
                f"The network module '{name}' cannot be imported: {error}. Missing: {missing}. Try: {install}."
            ) from error
    if not hasattr(module, "create_network"):
        raise AdapterError(f"'{name}' is no network module: it has no create_network().")
    return module


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


def _refuse_unknown_arguments(module: ModuleType, arguments: Mapping[str, str]) -> None:
    """Foreign modules take any keyword and ignore what they do not know; a typing error would be lost."""
    known = known_arguments(module)
    problems = []
    for key in arguments:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"Did you mean '{near[0]}'? " if near else ""
            fix = f"{hint}'{module.__name__}' reads: {', '.join(sorted(known))}."
            problems.append(Problem("lora.network_args", key, f"'{module.__name__}' does not read it", fix))
    if problems:
        raise ConfigError(problems)


def known_arguments(module: ModuleType) -> set[str]:
    """Names that `create_network` reads from its keyword arguments, found in its source text."""
    try:
        source = inspect.getsource(module.create_network)
    except (OSError, TypeError):
        return set()
    read = re.findall(r"kwargs(?:\.get\(|\.pop\(|\[)\s*[\"'](\w+)[\"']", source)
    named = inspect.signature(module.create_network).parameters
    own = {"multiplier", "network_dim", "network_alpha", "vae", "text_encoder", "unet", "kwargs", "neuron_dropout"}
    return {*read, *(set(named) - own), *_ADDED_BY_TRAINER}


def _create(module: ModuleType, model: SDXLModel, config: LoraConfig, arguments: Mapping[str, str]) -> Any:
    unet, encoders = model_views(model, _unet_class(module))
    main = "unet" if part_rank(config, "unet") else "te2"
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


def _unet_class(module: ModuleType) -> type[nn.Module]:
    """sd-scripts asks `isinstance(unet, SdxlUNet2DConditionModel)` to know that it is SDXL."""
    found = getattr(module, "SdxlUNet2DConditionModel", None)
    return found if isinstance(found, type) else nn.Module


def _keep_parts(name: str, raw: Any, parts: Sequence[str], before: BaseParameters) -> None:
    """Take the modules of parts that are not trained out again: foreign modules know 'text encoder' as one thing."""
    lists = [attribute for attribute in ("text_encoder_loras", "unet_loras", "loras") if hasattr(raw, attribute)]
    if not lists:
        raise AdapterError(f"'{name}' keeps its modules where they cannot be found (no unet_loras).")
    for child_name, child in list(raw.named_children()):
        if part_of_name(child_name) not in (*parts, None):
            _release(child, before)
            delattr(raw, child_name)
    for attribute in lists:
        kept = [lora for lora in getattr(raw, attribute) if part_of_name(lora.lora_name) in (*parts, None)]
        setattr(raw, attribute, kept)


def _release(lora: Any, before: BaseParameters) -> None:
    """Give the base layer its own forward and weights back."""
    owners = getattr(lora, "org_module", None)
    base = owners[0] if isinstance(owners, list | tuple) and owners else getattr(lora.org_forward, "__self__", None)
    if not isinstance(base, nn.Module):
        raise AdapterError(f"'{lora.lora_name}' does not say which layer it is on, so it cannot be taken off again.")
    for key in [key for key in base.__dict__ if key == "forward" or key.startswith("_lycoris_")]:
        del base.__dict__[key]
    base._parameters.update(before.get(base, {}))


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
def _on_path(folder: str | None) -> Iterator[None]:
    """The folder at the end of the import path inside the block, where it can shadow nothing."""
    if folder is None:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Foreign modules draw their first weights from torch's global stream: give it the run's seed, and put it back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
