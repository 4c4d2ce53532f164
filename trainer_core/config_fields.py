"""Every config field as data (`FIELDS`), and the one place where a received value becomes a field's type.

Keys are `section.field`, as in TOML's `[section] field = ...` and the command line's `--section.field`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from .config import SECTIONS, STEPS_OR_SHARE

#: Type annotation (without `None`) -> the word for it in messages and help.
_KINDS: dict[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    tuple[int, int]: "size",
    tuple[str, ...]: "list of texts",
}
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


class BadValue(Exception):
    """A value that cannot be this field's; `why` and `fix` become a `Problem`."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(f"{why}. {fix}")
        self.why = why
        self.fix = fix


@dataclass(frozen=True)
class FieldSpec:
    """What is known of one config field. `kind` is one of the words of `_KINDS`."""

    section: str
    name: str
    kind: str
    optional: bool
    default: Any
    help: str
    min: float | None
    max: float | None
    choices: tuple[Any, ...]
    unit: str
    advanced: bool

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"


def _spec(section: str, field: dataclasses.Field[Any], annotation: Any) -> FieldSpec:
    members: tuple[Any, ...] = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    kinds = [_KINDS[member] for member in members if member is not type(None)]
    return FieldSpec(
        section=section,
        name=field.name,
        kind=kinds[0],
        optional=type(None) in members,
        default=field.default,
        **{key: field.metadata[key] for key in ("help", "min", "max", "choices", "unit", "advanced")},
    )


def _all_specs() -> dict[str, FieldSpec]:
    found: dict[str, FieldSpec] = {}
    for section, cls in SECTIONS.items():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            spec = _spec(section, field, hints[field.name])
            found[spec.key] = spec
    return found


FIELDS: dict[str, FieldSpec] = _all_specs()


def nearest(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Up to `count` names of `known` that resemble `word`, best first; empty when none does."""
    return difflib.get_close_matches(word, list(known), n=count, cutoff=0.6)


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """'Did you mean X?', or `otherwise` where nothing resembles `word`."""
    close = nearest(word, known)
    return f"Did you mean {close[0]}?" if close else otherwise


def allowed(spec: FieldSpec) -> str:
    """What may stand in the field, in words: 'a number from 0 to 1', 'one of: l2, l1'."""
    if spec.choices:
        return "one of: " + ", ".join(str(choice) for choice in spec.choices)
    text = {
        "text": "a text",
        "whole number": "a whole number",
        "number": "a number",
        "true or false": "true or false",
        "size": "a size such as 1024 or 1024,768 (width, height)",
        "list of texts": "a list of texts",
    }[spec.kind]
    if spec.min is not None and spec.max is not None:
        return f"{text} from {spec.min:g} to {spec.max:g}"
    if spec.min is not None:
        return f"{text} of at least {spec.min:g}"
    return text if spec.max is None else f"{text} of at most {spec.max:g}"


def coerce(spec: FieldSpec, value: Any, *, text: bool = False) -> Any:
    """`value` as the type of the field, ranges unchecked (that is `config_rules`).

    With `text` (command line) numbers and truth values are read from strings, and `none` unsets an optional field;
    without it (TOML, JSON) a string where a number belongs is an error. Raises `BadValue`.
    """
    unset = text and isinstance(value, str) and value.strip().lower() == "none"
    if spec.optional and (value is None or unset):
        return None
    if value is None:
        raise _wrong_type(spec, value)
    convert = {
        "text": _text,
        "whole number": _whole,
        "number": _number,
        "true or false": _truth,
        "size": _size,
        "list of texts": _texts,
    }[spec.kind]
    return convert(spec, value, text)


def _wrong_type(spec: FieldSpec, value: Any) -> BadValue:
    if isinstance(value, dict):
        return BadValue("this is one setting, not a section", f"Write {allowed(spec)}.")
    return BadValue(f"must be {allowed(spec)}, not {_type_name(value)}", f"Write {allowed(spec)}.")


def _type_name(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    names: dict[type, str] = {
        bool: "true/false",
        str: "a text",
        int: "a whole number",
        float: "a fraction",
        list: "a list",
        tuple: "a list",
        type(None): "nothing",
    }
    kind = cast("type[object]", type(value))
    return names.get(kind, kind.__name__)


def _text(spec: FieldSpec, value: Any, text: bool) -> str:
    if isinstance(value, bool) and {"true", "false"} <= set(spec.choices):
        return "true" if value else "false"
    if not isinstance(value, str):
        raise _wrong_type(spec, value)
    return _without_zero_byte(value)


def _without_zero_byte(value: str) -> str:
    """No file name, no argument of a process and no cell of a database can hold one."""
    if "\0" in value:
        raise BadValue("holds a zero byte", "Take it out.")
    return value


def _truth(spec: FieldSpec, value: Any, text: bool) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if text and isinstance(value, str) else ""
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise _wrong_type(spec, value)


def _number(spec: FieldSpec, value: Any, text: bool) -> float:
    if spec.unit == STEPS_OR_SHARE and isinstance(value, str) and value.strip().endswith("%"):
        return share_from_percent(value)
    if text and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise _wrong_type(spec, value) from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_type(spec, value)
    try:
        return float(value)
    except OverflowError:
        raise BadValue("is too large for a number", f"Write {allowed(spec)}.") from None


def share_from_percent(value: str) -> float:
    """0.1 from "10%". 100% would be the number 1, which means one step, and is refused with its like."""
    try:
        share = float(value.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise BadValue("is no share from 0% to below 100%", "Write steps (100), a share (0.1) or per cent (10%).")
    return share


def _whole(spec: FieldSpec, value: Any, text: bool) -> int:
    number = _any_whole(spec, value, text)
    if not -(2**63) <= number < 2**63:  # neither numpy nor the record of a run can hold it
        raise BadValue("is too large for a whole number", f"Write {allowed(spec)}.")
    return number


def _any_whole(spec: FieldSpec, value: Any, text: bool) -> int:
    if text and isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            value = _number(spec, value, text)
    if isinstance(value, float) and value.is_integer():  # 1e3 is a usual way to write 1000
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(spec, value)
    return value


def _size(spec: FieldSpec, value: Any, text: bool) -> tuple[int, int]:
    """Width and height from 1024, '1024', '1024,768', '1024x768' or [1024, 768]."""
    parts: Sequence[Any]
    if isinstance(value, str):
        parts = value.lower().strip("()[] ").replace("x", ",").split(",")
    elif isinstance(value, list | tuple):
        parts = cast("Sequence[Any]", value)
    else:
        parts = [value]
    if len(parts) not in (1, 2):
        raise _wrong_type(spec, value)
    try:
        sides = [_whole(spec, part.strip() if isinstance(part, str) else part, True) for part in parts]
    except BadValue:
        raise _wrong_type(spec, value) from None
    return sides[0], sides[-1]


def _texts(spec: FieldSpec, value: Any, text: bool) -> tuple[str, ...]:
    if isinstance(value, str):
        return (_without_zero_byte(value),)
    if not isinstance(value, list | tuple):
        raise _wrong_type(spec, value)
    items = cast("Sequence[Any]", value)
    if not all(isinstance(item, str) for item in items):
        raise _wrong_type(spec, value)
    return tuple(_without_zero_byte(item) for item in items)


def or_unset(spec: FieldSpec) -> str:
    """What leaving the field out means: elsewhere 0 or -1 is often written for it."""
    if spec.default is not None:
        return ""
    meaning = spec.help.partition("unset = ")[2].partition(", 0 = ")[0].partition(" (")[0]
    return f", or leave it out ({meaning})" if meaning else ", or leave it out"
