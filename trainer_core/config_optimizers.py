"""Which optimizers can be named, where their classes live, and how their arguments are written.

Nothing here imports torch or an optimizer library; `optim/classes.py` does. Names are read in any case. A name with a
dot is the class of an installed library.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from .config import OptimizerConfig
from .config_fields import BadValue, did_you_mean
from .errors import Problem


def _nothing() -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer. `path`: dotted class; `package`: what pip installs it ("" = always there).

    `arguments`: ours where they differ from the class's own defaults. `renamed`: argument names that sd-scripts users
    type and what this class calls them. `rate_free`: it finds the learning rate itself, learning_rate is a factor on
    that. `schedule_free`: it needs no schedule and trains on other weights than it is judged by.
    """

    name: str
    path: str
    package: str = ""
    arguments: Mapping[str, Any] = field(default_factory=_nothing)
    renamed: Mapping[str, str] = field(default_factory=_nothing)
    rate_free: bool = False
    schedule_free: bool = False

    @property
    def module(self) -> str:
        return self.path.rpartition(".")[0]


_BNB = "bitsandbytes"
_PO = "pytorch-optimizer"
_FREE = "schedulefree"
_NESTEROV = {"momentum": 0.9, "nesterov": True}
_DADAPT_NAMES = {"decouple": "weight_decouple", "use_bias_correction": "bias_correction"}


def _dadapt(name: str, cls: str) -> OptimizerKind:
    return OptimizerKind(name, f"pytorch_optimizer.{cls}", _PO, renamed=_DADAPT_NAMES, rate_free=True)


#: sd-scripts' names first, then what only we have.
CATALOGUE: dict[str, OptimizerKind] = {
    kind.name: kind
    for kind in (
        OptimizerKind("adamw", "torch.optim.AdamW"),
        OptimizerKind("adamw8bit", "bitsandbytes.optim.AdamW8bit", _BNB),
        OptimizerKind("pagedadamw8bit", "bitsandbytes.optim.PagedAdamW8bit", _BNB),
        OptimizerKind("pagedadamw", "bitsandbytes.optim.PagedAdamW", _BNB),
        OptimizerKind("pagedadamw32bit", "bitsandbytes.optim.PagedAdamW32bit", _BNB),
        OptimizerKind("lion", "pytorch_optimizer.Lion", _PO),
        OptimizerKind("lion8bit", "bitsandbytes.optim.Lion8bit", _BNB),
        OptimizerKind("pagedlion8bit", "bitsandbytes.optim.PagedLion8bit", _BNB),
        OptimizerKind("sgdnesterov", "torch.optim.SGD", arguments=_NESTEROV),
        OptimizerKind("sgdnesterov8bit", "bitsandbytes.optim.SGD8bit", _BNB, arguments=_NESTEROV),
        _dadapt("dadaptation", "DAdaptAdam"),
        _dadapt("dadaptadam", "DAdaptAdam"),
        _dadapt("dadaptadagrad", "DAdaptAdaGrad"),
        _dadapt("dadaptadan", "DAdaptAdan"),
        _dadapt("dadaptlion", "DAdaptLion"),
        _dadapt("dadaptsgd", "DAdaptSGD"),
        OptimizerKind("prodigy", "prodigyopt.Prodigy", "prodigyopt", rate_free=True),
        OptimizerKind(
            "adafactor",
            "transformers.optimization.Adafactor",
            # So that learning_rate is the learning rate: its own defaults throw the rates of all parts away
            # (relative_step) and multiply by the size of a weight, which is 0 for lora_up (scale_parameter).
            arguments={"relative_step": False, "scale_parameter": False, "warmup_init": False},
        ),
        OptimizerKind("adamwschedulefree", "schedulefree.AdamWScheduleFree", _FREE, schedule_free=True),
        OptimizerKind("radamschedulefree", "schedulefree.RAdamScheduleFree", _FREE, schedule_free=True),
        OptimizerKind("sgdschedulefree", "schedulefree.SGDScheduleFree", _FREE, schedule_free=True),
        OptimizerKind("came", "pytorch_optimizer.CAME", _PO),
    )
}


def find_kind(typed: str) -> OptimizerKind | None:
    """The optimizer that `typed` means; None when nobody knows it."""
    if "." not in typed:
        return CATALOGUE.get(typed.strip().lower().replace("-", "").replace("_", ""))
    name = typed.rpartition(".")[2]
    for known in CATALOGUE.values():
        if known.path == typed:
            return known
    return OptimizerKind(
        typed,
        typed,
        typed.partition(".")[0],
        rate_free=name.startswith(("DAdapt", "Prodigy")),
        schedule_free="ScheduleFree" in name,
    )


def unknown_optimizer(typed: str) -> Problem:
    """The problem of a name nobody knows."""
    fix = f"Known: {', '.join(CATALOGUE)}; or the dotted name of a class in an installed library."
    return Problem("optimizer.type", typed, "there is no such optimizer", did_you_mean(typed.lower(), CATALOGUE, fix))


def install_command(kind: OptimizerKind) -> str | None:
    """What to type when the library of `kind` is not installed here; None when it is."""
    if not kind.package or find_spec(kind.module.partition(".")[0]) is not None:
        return None
    return f"{sys.executable} -m pip install {kind.package}"


def parse_arguments(words: Sequence[str], renamed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`name=value` words as arguments. Values are Python literals; true, false, none and bare words are read too.

    Raises `BadValue` naming every word that is none.
    """
    found: dict[str, Any] = {}
    wrong: list[str] = []
    for word in words:
        name, equals, text = word.partition("=")
        name = (renamed or {}).get(name.strip(), name.strip())
        if not equals or not name.isidentifier():
            wrong.append(f"{word!r} is not name=value")
        elif name in found:
            wrong.append(f"{name!r} is given twice")
        else:
            found[name] = _literal(text.strip())
    if wrong:
        raise BadValue("; ".join(wrong), "Write each argument as name=value, such as weight_decay=0.01.")
    return found


def describe(config: OptimizerConfig) -> str:
    """`module.Class(name=value,…)` as it stands in LoRA files; the class alone when no argument was given."""
    kind = find_kind(config.type)
    if kind is None:
        return config.type
    path = "torch.optim.adamw.AdamW" if kind.name == "adamw" else kind.path
    names = ("beta1", "beta2", "eps", "weight_decay")
    given = {name: value for name in names if (value := getattr(config, name)) is not None}
    words = [*(f"{name}={value}" for name, value in {**kind.arguments, **given}.items()), *config.args]
    return f"{path}({','.join(words)})" if words else path


def _literal(text: str) -> Any:
    plain = {"true": True, "false": False, "none": None}
    if text.lower() in plain:
        return plain[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
