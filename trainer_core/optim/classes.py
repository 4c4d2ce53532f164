"""The class of an optimizer, and the arguments it is made with."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch

from ..config import OptimizerConfig
from ..config_fields import BadValue, did_you_mean
from ..config_optimizers import OptimizerKind, find_kind, install_command, parse_arguments, unknown_optimizer
from ..errors import ConfigError, Problem

_OURS = ("params", "lr")


def optimizer_class(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """The class `optimizer.type` means.

    Raises:
        ConfigError: unknown name, library not installed (with the command that installs it), or no optimizer class.
    """
    kind = _kind(config)
    command = install_command(kind)
    if command is not None:
        why = f"needs the library {kind.package}, which is not installed"
        raise _refusal("optimizer.type", config.type, why, f"Install it: {command}")
    name = kind.path.rpartition(".")[2]
    try:
        module = import_module(kind.module)
    except ImportError as error:
        why = f"{kind.module} cannot be imported: {error}"
        raise _refusal("optimizer.type", config.type, why, "Check the name, or install the library again.") from None
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        names = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer)]
        fix = did_you_mean(name, names, "Write an optimizer's dotted name, such as pytorch_optimizer.Lion.")
        raise _refusal("optimizer.type", config.type, f"{kind.module} has no optimizer {name}", fix)
    _refuse_closures(config, found)
    return found


def optimizer_arguments(config: OptimizerConfig, cls: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """Arguments for `cls` apart from parameters and rate: our own, then beta1, beta2, eps, weight_decay, then args.

    Raises:
        ConfigError: an argument the class does not take, given twice, or missing.
    """
    kind = _kind(config)
    try:
        typed = parse_arguments(config.args, kind.renamed)
    except BadValue as bad:
        raise _refusal("optimizer.args", list(config.args), bad.why, bad.fix) from None
    parameters = inspect.signature(cls.__init__).parameters
    fields = _from_fields(config, parameters)
    _check(config, kind, parameters, typed, fields)
    return {**kind.arguments, **{name: value for name, (value, _) in fields.items()}, **typed}


def _kind(config: OptimizerConfig) -> OptimizerKind:
    kind = find_kind(config.type)
    if kind is None:
        raise ConfigError([unknown_optimizer(config.type)])
    return kind


def _from_fields(config: OptimizerConfig, parameters: dict[str, inspect.Parameter] | Any) -> dict[str, tuple[Any, str]]:
    """Arguments that come from config fields which are set: name -> (value, field)."""
    found: dict[str, tuple[Any, str]] = {}
    if config.beta1 is not None or config.beta2 is not None:
        own = parameters["betas"].default if "betas" in parameters else (0.9, 0.999)
        own = own if isinstance(own, tuple | list) else (0.9, 0.999)
        given = (config.beta1, config.beta2, *own[2:])
        betas = tuple(own[i] if value is None else value for i, value in enumerate(given))
        found["betas"] = (betas, "optimizer.beta1" if config.beta1 is not None else "optimizer.beta2")
    for name in ("eps", "weight_decay"):
        value = getattr(config, name)
        if value is not None:
            found[name] = (value, f"optimizer.{name}")
    return found


def _check(
    config: OptimizerConfig,
    kind: OptimizerKind,
    parameters: Any,
    typed: dict[str, Any],
    fields: dict[str, tuple[Any, str]],
) -> None:
    found: list[Problem] = []
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    names = [n for n, p in parameters.items() if n != "self" and p.kind is not inspect.Parameter.VAR_KEYWORD]
    known = ", ".join(n for n in names if n not in _OURS)
    for name, value in typed.items():
        word = f"{name}={value}"
        if name in _OURS:
            why = "is not an argument here" if name == "params" else "is set by optimizer.learning_rate and its like"
            found.append(Problem("optimizer.args", word, why, f"Leave {name} out."))
        elif name not in names and not anything:
            fix = did_you_mean(name, names, f"{kind.name} takes: {known}.")
            found.append(Problem("optimizer.args", word, f"{kind.name} has no argument {name}", fix))
        elif name in fields and fields[name][0] != value:
            why = f"{fields[name][1]} already sets it to {fields[name][0]}"
            found.append(Problem("optimizer.args", word, why, "Keep one of the two."))
    for name, (value, setting) in fields.items():
        if name not in names and not anything:
            fix = f"Unset {setting}; {kind.name} takes: {known}."
            found.append(Problem(setting, value, f"{kind.name} has no argument {name}", fix))
    needed = [
        n
        for n in names
        if n not in _OURS
        and parameters[n].default is inspect.Parameter.empty
        and parameters[n].kind is not inspect.Parameter.VAR_POSITIONAL
        and n not in typed
        and n not in fields
        and n not in kind.arguments
    ]
    if needed:
        why = f"{kind.name} also needs {', '.join(needed)}"
        found.append(Problem("optimizer.args", list(config.args), why, f"Write {needed[0]}=VALUE."))
    if found:
        raise ConfigError(found)


def _refuse_closures(config: OptimizerConfig, cls: type[torch.optim.Optimizer]) -> None:
    """Some optimizers run the model again inside their step; a step here is judged once, before the update."""
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        why = "runs the model several times a step, which the guarded step does not allow"
        raise _refusal("optimizer.type", config.type, why, "Use adamw, or another optimizer without a closure.")


def _refusal(field: str, value: Any, why: str, fix: str) -> ConfigError:
    return ConfigError([Problem(field, value, why, fix)])
