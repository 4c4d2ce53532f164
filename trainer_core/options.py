"""What a person may type, from the command line or a flat config file, resolved to settings.

One catalogue holds our own names (`--section.field`, and `--field` where that is unambiguous), the names that users of
sd-scripts and diffusers know, and those that are refused. Nothing is dropped in silence: a name is understood,
explained, or reported with the nearest one, and all problems come together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .config_fields import FIELDS, BadValue, FieldSpec, coerce, nearest
from .errors import Problem
from .options_kinds import SPECIAL, Option, Settings, is_off, switch, to, to_text
from .options_refused import REFUSED
from .options_table import UNDERSTOOD


def _own(spec: FieldSpec, name: str) -> Option:
    if spec.kind == "true or false":
        return Option(name, "flag", switch(spec.key), "safe-scaler")
    takes = "many" if spec.kind == "list of texts" else "value"
    return Option(name, takes, to_text(spec.key) if spec.kind == "text" else to(spec.key), "safe-scaler")


def _catalogue() -> dict[str, Option]:
    known: dict[str, Option] = {**UNDERSTOOD, **REFUSED}
    by_short: dict[str, list[FieldSpec]] = {}
    for spec in FIELDS.values():
        known[spec.key] = _own(spec, spec.key)
        by_short.setdefault(spec.name, []).append(spec)
    for name, specs in by_short.items():
        if len(specs) == 1 and name not in known:
            known[name] = _own(specs[0], name)
    return known


OPTIONS: dict[str, Option] = _catalogue()
_SHORT_NAMES: dict[str, list[str]] = {}
for _spec in FIELDS.values():
    _SHORT_NAMES.setdefault(_spec.name, []).append(_spec.key)


@dataclass
class Resolved:
    """Settings that were asked for. `settings`: by `section.field`, typed; `special`: by the names of `SPECIAL`
    without `cli.`; `used`: the options as typed (those that asked for something)."""

    settings: Settings = field(default_factory=dict)
    special: Settings = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)


def find(name: str) -> Option | None:
    """The option of that name; dashes and underscores are the same, `--` in front is ignored."""
    return OPTIONS.get(name.removeprefix("--").replace("-", "_"))


def unknown(shown: str, name: str, value: Any) -> Problem:
    """The problem of a name nobody knows, with the nearest known one."""
    plain = name.removeprefix("--").replace("-", "_")
    fields = _SHORT_NAMES.get(plain, [])
    if len(fields) > 1:
        return Problem(shown, value, "could mean several settings", "Write one of: " + ", ".join(fields) + ".")
    dashes = "--" if name.startswith("--") else ""
    close = nearest(plain, OPTIONS)
    fix = f"Did you mean {dashes}{close[0]}?" if close else "See docs/configuration.md for all names."
    return Problem(shown, value, "there is no such option", fix)


def parse_argv(argv: Sequence[str]) -> tuple[list[tuple[str, Any]], list[str], list[Problem]]:
    """Split a command line into (name, value) pairs, positional words, and problems.

    Both `--name value` and `--name=value` are read; switches may carry =true or =false, or be followed by one of the
    words true and false.
    """
    pairs: list[tuple[str, Any]] = []
    positional: list[str] = []
    problems: list[Problem] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not _is_name(word):
            positional.append(word)
            continue
        name, equals, attached = word.partition("=")
        option = find(name)
        if option is None:
            value = attached if equals else (words.pop(0) if words and not _is_name(words[0]) else "")
            problems.append(unknown(name, name, value))
        elif equals and option.takes != "many":
            pairs.append((name, attached))
        elif option.takes == "flag":
            pairs.append((name, words.pop(0) if words and words[0].lower() in ("true", "false") else True))
        elif option.takes == "many":
            pairs.append((name, _take_many(words, [attached] if equals else [])))
        elif words and not _is_name(words[0]):
            pairs.append((name, words.pop(0)))
        else:
            problems.append(Problem(name, "", "needs a value", f"Write {name} VALUE."))
    return pairs, positional, problems


def _is_name(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


def _take_many(words: list[str], taken: list[str]) -> list[str]:
    while words and not _is_name(words[0]):
        taken.append(words.pop(0))
    return taken


def resolve(pairs: Iterable[tuple[str, Any]], *, text: bool, where: str = "") -> Resolved:
    """Turn typed names and values into settings.

    `text`: values are strings from a command line (else typed, from a file). `where` is put behind names in messages,
    such as " in run.toml". Two options of equal weight that give one field two values are a problem.
    """
    result = Resolved()
    chosen: dict[str, tuple[int, str, Any]] = {}
    also: dict[str, tuple[str, Any]] = {}
    for name, raw in pairs:
        option = find(name)
        shown = f"{name}{where}"
        if option is None:
            result.problems.append(unknown(shown, name, raw))
            continue
        try:
            settings = option.rule(raw)
        except BadValue as bad:
            result.problems.append(Problem(shown, raw, bad.why, bad.fix))
            continue
        if not is_off(raw):
            result.used.append(option.name)
            also.update({key: (shown, value) for key, value in option.also.items()})
            if option.note:
                result.notes.append(f"{shown}: {option.note}")
        for key, value in settings.items():
            _choose(result, chosen, key, (option.weight, shown, value), text=text)
    for key, (shown, value) in also.items():
        if key not in chosen:
            chosen[key] = (0, shown, value)
    _settle(result, chosen, text=text)
    return result


def _choose(
    result: Resolved, chosen: dict[str, tuple[int, str, Any]], key: str, new: tuple[int, str, Any], *, text: bool
) -> None:
    """Keep the heavier of two wishes for one field; repeat of one option: the last; equal weight must agree."""
    old = chosen.get(key)
    if old is None or old[1] == new[1]:
        chosen[key] = new
        return
    same = _plain(key, old[2], text) == _plain(key, new[2], text)
    if old[0] == new[0] and not same:
        why = f"{old[1]} already set {key} to {old[2]!r}"
        result.problems.append(Problem(new[1], new[2], why, "Keep one of the two."))
        return
    winner, loser = (new, old) if new[0] > old[0] else (old, new)
    if not same:
        result.notes.append(f"{loser[1]} = {loser[2]!r} is not used: {winner[1]} sets {key} to {winner[2]!r}")
    chosen[key] = winner


def _plain(key: str, value: Any, text: bool) -> Any:
    """`value` as the field's type for a comparison, or as it stands where it cannot be."""
    if key not in FIELDS:
        return value
    try:
        return coerce(FIELDS[key], value, text=text)
    except BadValue:
        return value


def _settle(result: Resolved, chosen: Mapping[str, tuple[int, str, Any]], *, text: bool) -> None:
    for key, (_, shown, value) in chosen.items():
        if key in SPECIAL:
            result.special[key.removeprefix("cli.")] = value
            continue
        try:
            result.settings[key] = coerce(FIELDS[key], value, text=text)
        except BadValue as bad:
            result.problems.append(Problem(shown, value, bad.why, bad.fix))
    _repeat_prompt(result)


def _repeat_prompt(result: Resolved) -> None:
    """`--num_validation_images N` asks for N pictures of the one prompt; preview seeds count up by themselves."""
    count = result.special.pop("preview_count", None)
    prompts = result.settings.get("preview.prompts", ())
    if count is None:
        return
    try:
        number = int(count)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        why = "must be a whole number of at least 1"
        result.problems.append(Problem("num_validation_images", count, why, "Write how many pictures you want."))
    elif prompts:
        result.settings["preview.prompts"] = tuple(prompts) * number
    else:
        result.notes.append("num_validation_images has no effect: there is no --validation_prompt")


def habit_notes(used: Iterable[str], settings: Mapping[str, Any]) -> list[str]:
    """Where the names that were typed come from a tool whose unsaid defaults differ from ours: what differs."""
    names = set(used)
    sources = {OPTIONS[name].source for name in names if name in OPTIONS}
    notes: list[str] = []
    rank = names & {"network_dim", "lora_rank", "rank"}
    if rank and "lora.alpha" not in settings:
        theirs = "sd-scripts would take 1" if "network_dim" in rank else "diffusers would take the rank"
        notes.append(f"alpha is not set and becomes rank / 2 here; {theirs}")
    rates = {"optimizer.te1_lr", "optimizer.te2_lr"}
    if (
        "sd-scripts" in sources
        and names & {"network_module", "network_dim", "text_encoder_lr"}
        and not rates & set(settings)
    ):
        notes.append(
            "the text encoders are not trained; sd-scripts would train them too: "
            "--text_encoder_lr RATE does so here, --network_train_unet_only says that it is meant"
        )
    if "optimizer_type" in names and settings.get("optimizer.type") == "adafactor":
        notes.append("adafactor takes learning_rate as it is here; sd-scripts would find its own (relative_step)")
    return notes
