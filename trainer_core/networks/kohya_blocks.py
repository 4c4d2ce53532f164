"""kohya's per-block strings (kohya.md 1.3): `block_dims`, `block_alphas`, `conv_block_dims`, `down_lr_weight` ..."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..config import LoraConfig
from ..errors import ConfigError, Problem
from .layer_kinds import BLOCK_COUNT

_SIDE = 9
_MIDDLE = 3

# kohya's named curves over the nine blocks of one side; the same for `down` and `up`.
_CURVES: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda x: math.sin(math.pi / 2 * (1 - x)),
    "sine": lambda x: math.sin(math.pi / 2 * x),
    "linear": lambda x: x,
    "reverse_linear": lambda x: 1 - x,
    "zeros": lambda x: 0.0,
}


@dataclass(frozen=True)
class BlockLists:
    """Per-block values by kohya's index 0 to 22; None where a list is not given."""

    dims: tuple[int, ...] | None = None
    alphas: tuple[float, ...] | None = None
    conv_dims: tuple[int, ...] | None = None
    conv_alphas: tuple[float, ...] | None = None
    lr_factors: tuple[float, ...] | None = None


def parse_block_lists(config: LoraConfig) -> BlockLists:
    """Read all per-block strings of a config.

    Raises:
        ConfigError: with every list that has a wrong length, a word nobody knows, or a partner missing.
    """
    problems: list[Problem] = []

    def read(name: str, whole: bool = False) -> tuple[float, ...] | None:
        text = getattr(config, name)
        try:
            return _numbers(text, BLOCK_COUNT, whole=whole) if text else None
        except ValueError as error:
            problems.append(Problem(f"lora.{name}", text, str(error), f"Write {BLOCK_COUNT} numbers with commas."))
            return None

    dims, conv_dims = read("block_dims", whole=True), read("conv_block_dims", whole=True)
    alphas, conv_alphas = read("block_alphas"), read("conv_block_alphas")
    for name, partner in (("block_alphas", "block_dims"), ("conv_block_alphas", "conv_block_dims")):
        if getattr(config, name) and not getattr(config, partner):
            fix = f"Set lora.{partner} too, or remove lora.{name}."
            problems.append(Problem(f"lora.{name}", getattr(config, name), f"it needs {partner}", fix))
    factors = _lr_factors(config, problems)
    if problems:
        raise ConfigError(problems)
    return BlockLists(
        None if dims is None else tuple(map(int, dims)),
        alphas,
        None if conv_dims is None else tuple(map(int, conv_dims)),
        conv_alphas,
        factors,
    )


def _lr_factors(config: LoraConfig, problems: list[Problem]) -> tuple[float, ...] | None:
    if not (config.down_lr_weight or config.mid_lr_weight or config.up_lr_weight):
        return None
    sides: list[tuple[float, ...]] = []
    for name, count in (("down_lr_weight", _SIDE), ("mid_lr_weight", _MIDDLE), ("up_lr_weight", _SIDE)):
        text = getattr(config, name)
        try:
            sides.append(_side(text, count))
        except ValueError as error:
            fix = f"Write {count} numbers with commas" + (
                "." if count == _MIDDLE else f", or one of {', '.join(_CURVES)}, with +OFFSET if wanted."
            )
            problems.append(Problem(f"lora.{name}", text, str(error), fix))
            sides.append((1.0,) * count)
    threshold = config.block_lr_zero_threshold
    down, mid, up = (tuple(0.0 if value <= threshold else value for value in side) for side in sides)
    return (1.0, *down, *mid, *up, 1.0)


def _side(text: str, count: int) -> tuple[float, ...]:
    """One side's factors: a list (short ones filled with 1 as kohya does), or a named curve with an offset."""
    if not text:
        return (1.0,) * count
    name, _, offset = text.replace(" ", "").partition("+")
    if name in _CURVES and count == _SIDE:
        base = _numbers(offset, 1)[0] if offset else 0.0
        return tuple(_CURVES[name](i / (count - 1)) + base for i in range(count))
    values = _numbers(text, None)
    if len(values) > count:
        raise ValueError(f"it has {len(values)} numbers, at most {count} are used")
    return values + (1.0,) * (count - len(values))


def _numbers(text: str, count: int | None, *, whole: bool = False) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError("it is no list of numbers") from None
    if count is not None and len(values) != count:
        raise ValueError(f"it has {len(values)} numbers, {count} are needed")
    if any(value < 0 or not math.isfinite(value) or (whole and value != int(value)) for value in values):
        raise ValueError("it holds a number that is not allowed")
    return values
