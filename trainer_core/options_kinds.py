"""How one typed option becomes settings: the building blocks of the alias tables.

An option turns its value into `{section.field: value}` (values still as typed, `config_fields.coerce` follows),
refuses it with a reason, or says that the wish is already met.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from .config_fields import FIELDS, BadValue, coerce, did_you_mean, share_from_percent

Settings = dict[str, Any]
Rule = Callable[[Any], Settings]

#: Targets that are no config field: the command line itself acts on them.
SPECIAL = ("cli.config_file", "cli.preset", "cli.resume", "cli.supervise", "cli.preview_count")

_OFF = ("", "none", "false", "[]", "()")


@dataclass(frozen=True)
class Option:
    """One name that can be typed, without its dashes.

    `takes`: "value", "flag" (no value, or =true / =false) or "many" (values up to the next option).
    `weight` settles two options that set the same field: the heavier one wins, equal ones must agree. `also` is set
    along with it unless another option sets the same field. `note` is said when the option is used; `refused` marks
    one that is never accepted with a value that asks for something.
    """

    name: str
    takes: str
    rule: Rule
    source: str
    note: str = ""
    weight: int = 0
    also: Settings = field(default_factory=dict)
    refused: bool = False


def truth(value: Any) -> bool:
    """A flag's value as bool; raises `BadValue` for anything that is not one."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("true", "yes", "on", "1", "false", "no", "off", "0", "none", ""):
        return word in ("true", "yes", "on", "1")
    raise BadValue("is a switch and takes no value", "Write it alone, or with =true or =false.")


def is_off(value: Any, neutral: tuple[str, ...] = ()) -> bool:
    """Whether `value` asks for nothing: false, empty, none, or one of the option's own `neutral` values."""
    word = str(value).strip().lower()
    if value is None or word in _OFF or word in neutral:
        return True
    try:
        return any(float(word) == float(other) for other in neutral)
    except ValueError:
        return False


def to(key: str) -> Rule:
    """The value goes to `key` unchanged; an empty text or none in a file means unset."""

    def rule(value: Any) -> Settings:
        return {} if value is None or value == "" else {key: value}

    return rule


def to_text(key: str) -> Rule:
    """Like `to` for texts whose empty value is a wish of its own."""

    def rule(value: Any) -> Settings:
        return {} if value is None else {key: value}

    return rule


def sets(settings: Mapping[str, Any]) -> Rule:
    """A switch that, when on, sets all of `settings`."""

    def rule(value: Any) -> Settings:
        return dict(settings) if truth(value) else {}

    return rule


def switch(key: str) -> Rule:
    """A switch that goes to `key` as true or false."""

    def rule(value: Any) -> Settings:
        return {key: truth(value)}

    return rule


def nothing(value: Any) -> Settings:
    """Accepted; what it asks for is always so (the option's note says how)."""
    return {}


def refuse(why: str, fix: str, *neutral: str) -> Rule:
    """Refuses every value that asks for something; `neutral` values (sd-scripts' defaults) pass without effect."""

    def rule(value: Any) -> Settings:
        if is_off(value, neutral):
            return {}
        raise BadValue(why, fix)

    return rule


def choice(key: str, meanings: Mapping[str, Any], why: str) -> Rule:
    """Translates the value by `meanings` (lower case); None as meaning leaves the field alone."""

    def rule(value: Any) -> Settings:
        word = "" if value is None else str(value).strip().lower()
        if word not in meanings:
            known = [name for name in meanings if name]
            raise BadValue(why, did_you_mean(word, known, f"Allowed: {', '.join(known)}."))
        return {} if meanings[word] is None else {key: meanings[word]}

    return rule


def words(value: Any) -> list[str]:
    """The value of a "many" option as list: a list stays one, a text is split at blanks."""
    if isinstance(value, list | tuple):
        return [str(item) for item in cast("list[object]", value)]
    return [] if value is None else str(value).split()


def arguments(name: str, rules: Mapping[str, Rule], refusals: Mapping[str, str]) -> Rule:
    """`k=v k=v ...` as in `--network_args` and `--optimizer_args`; unknown keys get the nearest known one.

    All wrong keys are reported in one `BadValue`.
    """

    def rule(value: Any) -> Settings:
        settings: Settings = {}
        wrong: list[str] = []
        for word in words(value):
            key, equals, text = word.partition("=")
            if not equals:
                wrong.append(f"{word!r} is not key=value")
            elif key in refusals:
                wrong.append(f"{key!r} {refusals[key]}")
            elif key not in rules:
                wrong.append(f"{key!r} is not known ({did_you_mean(key, rules, 'Known: ' + ', '.join(rules) + '.')})")
            else:
                for field_key, asked in rules[key](text).items():
                    try:
                        settings[field_key] = coerce(FIELDS[field_key], asked, text=True)
                    except BadValue as bad:
                        wrong.append(f"{key} {bad.why}")
        if wrong:
            raise BadValue("; ".join(wrong), f"Known in --{name}: {', '.join(rules)}.")
        return settings

    return rule


def share_or_steps(key: str) -> Rule:
    """Steps, a share below 1, or per cent with '%'."""

    def rule(value: Any) -> Settings:
        text = str(value).strip()
        if not text.endswith("%"):
            return {} if text == "" else {key: value}
        return {key: share_from_percent(text)}

    return rule
