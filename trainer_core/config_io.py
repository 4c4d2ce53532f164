"""Reading and writing a `TrainConfig`: TOML, JSON, plain dicts, command-line flags and presets.

Order: flags > file > preset > default. Wrong names, types, values and contradictions of all of them are raised
together in one `ConfigError`, before anything is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from .config import FORMAT_VERSION, SECTIONS, TrainConfig
from .config_fields import FIELDS, BadValue, coerce, did_you_mean
from .config_presets import PRESETS
from .config_rules import advice, problems
from .errors import ConfigError, Problem
from .options import find, habit_notes, resolve
from .plain_text import parse_json, parse_toml
from .preflight import preflight

#: Version n -> a pure function from data of version n to data of version n + 1.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}

#: Either of these ends the run; setting one in a higher layer takes back the other of a lower layer.
_RIVALS = (("run.max_train_steps", "run.max_train_epochs"),)
_TOP_LEVEL = ("format_version", "pack_version", "preset")


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """JSON-safe form with `format_version`; `from_dict` reads it back to an equal config."""
    plain = cast("dict[str, Any]", _plain(dataclasses.asdict(config)))
    return {"format_version": FORMAT_VERSION, **plain}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    return value


def from_dict(data: Mapping[str, Any]) -> TrainConfig:
    """A config from its sections; missing fields keep their defaults.

    Raises `ConfigError` with every unknown name (and its nearest known one) and every wrong type. Ranges and
    contradictions are not judged here: `config_rules.problems` does.
    """
    found: list[Problem] = []
    settings = _sectioned(migrate(data), found)
    if found:
        raise ConfigError(found)
    return _build(settings)


def migrate(
    data: Mapping[str, Any],
    migrations: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = MIGRATIONS,
    current: int = FORMAT_VERSION,
) -> dict[str, Any]:
    """`data` in the current format. No `format_version` means current; a newer one raises `ConfigError`."""
    result = dict(data)
    version = result.get("format_version", current)
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ConfigError(
            [
                Problem(
                    "format_version", version, "must be a whole number of at least 1", f"This version writes {current}."
                )
            ]
        )
    if version > current:
        why = f"this config has format version {version}, this program reads up to version {current}"
        raise ConfigError([Problem("format_version", version, why, "Update Safe-Scaler, or save the config again.")])
    for step in range(version, current):
        result = migrations[step](result)
    result["format_version"] = current
    return result


def load_config(
    file: Path | None,
    flags: Mapping[str, Any],
    preset: str | None = None,
    *,
    earlier: Sequence[Problem] = (),
    check: bool = True,
    light: bool = False,
) -> tuple[TrainConfig, list[str]]:
    """The config of a run and notes a person should read.

    `flags`: values by `section.field`, already of the fields' types. `preset` wins over a `preset` in the file.
    With `check`, the rules of `config_rules` are applied too (`light`: see `preflight`). Raises `ConfigError` with all
    problems at once, those found `earlier` (on the command line) first.
    """
    found: list[Problem] = list(earlier)
    notes: list[str] = []
    return _finish(_layers(file, flags, preset, found, notes), found, notes, check=check, light=light)


def asked_settings(
    file: Path | None, flags: Mapping[str, Any], preset: str | None = None, *, earlier: Sequence[Problem] = ()
) -> tuple[dict[str, Any], list[str]]:
    """What file, flags and preset ask for, by `section.field`, without defaults: the changes to a run that goes on.

    Arguments, notes and errors as of `load_config`; rules are not checked.
    """
    found: list[Problem] = list(earlier)
    notes: list[str] = []
    settings = merge(_layers(file, flags, preset, found, notes))
    if found:
        raise ConfigError(found)
    return settings, notes


def _layers(
    file: Path | None, flags: Mapping[str, Any], preset: str | None, found: list[Problem], notes: list[str]
) -> list[dict[str, Any]]:
    """Settings of preset, file and flags, lowest first; what is wrong with them goes into `found`."""
    from_file: dict[str, Any] = {}
    if file is not None:
        data = read_file(file)
        preset = preset or _file_preset(data, found)
        from_file = _file_settings(data, file, found, notes)
    flag_problems: list[Problem] = []
    from_flags = _flag_settings(flags, flag_problems)
    layers = [_preset_settings(preset, {**from_file, **from_flags}, found, notes), from_file, from_flags]
    found += flag_problems
    return layers


def _finish(
    layers: Sequence[Mapping[str, Any]], found: list[Problem], notes: list[str], *, check: bool, light: bool
) -> tuple[TrainConfig, list[str]]:
    config = _build(merge(layers))
    if check:
        told = {problem.field.split(" ")[0].removeprefix("--") for problem in found}
        found.extend(problem for problem in problems(config) if problem.field not in told)
        found.extend(preflight(config, told | {problem.field for problem in found}, light=light))
    if found:
        raise ConfigError(found)
    return config, [*notes, *(advice(config) if check else [])]


def merge(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lower layers first; a rival of a field set in a higher layer is dropped from the lower ones."""
    settings: dict[str, Any] = {}
    for layer in layers:
        for pair in _RIVALS:
            for one, other in (pair, pair[::-1]):
                if layer.get(one) is not None and other not in layer:
                    settings.pop(other, None)
        settings.update(layer)
    return settings


def with_settings(config: TrainConfig, settings: Mapping[str, Any]) -> TrainConfig:
    """`config` with some fields, named by `section.field`, replaced; rivals are taken back as in `merge`."""
    current = {key: getattr(getattr(config, spec.section), spec.name) for key, spec in FIELDS.items()}
    return _build({**{key: spec.default for key, spec in FIELDS.items()}, **merge([current, settings])})


def _build(settings: Mapping[str, Any]) -> TrainConfig:
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    return TrainConfig(**{name: SECTIONS[name](**values) for name, values in sections.items()})


def read_file(file: Path) -> dict[str, Any]:
    """The table in a TOML or JSON file (by ending; JSON for `.json`). Raises `ConfigError` saying what is wrong."""
    shown = str(file)
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError([Problem("config", shown, "there is no such file", "Check the path.")]) from None
    except UnicodeDecodeError as error:
        why = f"is not UTF-8 text (byte {error.start})"
        raise ConfigError([Problem("config", shown, why, "Save it as UTF-8.")]) from None
    except OSError as error:
        raise ConfigError([Problem("config", shown, f"cannot be read: {error.strerror}", "Check the path.")]) from None
    try:
        data: Any = parse_json(text) if file.suffix.lower() == ".json" else parse_toml(text)
    except ValueError as error:
        hint = "Backslashes: write paths in 'single quotes' or with forward slashes." if "\\" in text else "Correct it."
        raise ConfigError([Problem("config", shown, f"is not valid: {error}", hint)]) from None
    if not isinstance(data, dict):
        raise ConfigError(
            [Problem("config", shown, "holds no settings", "Write sections, such as [model] and [lora].")]
        )
    return cast("dict[str, Any]", data)


def _file_preset(data: Mapping[str, Any], found: list[Problem]) -> str | None:
    name = data.get("preset")
    if name is None or isinstance(name, str):
        return name
    found.append(Problem("preset", name, "must be a text", f"Known: {', '.join(PRESETS)}."))
    return None


def _preset_settings(
    name: str | None, chosen: Collection[str], found: list[Problem], notes: list[str]
) -> dict[str, Any]:
    if name is None:
        return {}
    if name not in PRESETS:
        fix = did_you_mean(name, PRESETS, f"Known: {', '.join(PRESETS)}.")
        found.append(Problem("preset", name, "there is no such preset", fix))
        return {}
    notes.extend(PRESETS[name].notes_beside(chosen))
    return dict(PRESETS[name].settings)


def _flag_settings(flags: Mapping[str, Any], found: list[Problem]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, value in flags.items():
        _take(key, value, key, settings, found)
    return settings


def _take(key: str, value: Any, shown: str, settings: dict[str, Any], found: list[Problem]) -> None:
    if key not in FIELDS:
        fix = did_you_mean(key, FIELDS, "See docs/configuration.md for all names.")
        found.append(Problem(shown, value, "there is no such setting", fix))
        return
    try:
        settings[key] = coerce(FIELDS[key], value)
    except BadValue as bad:
        found.append(Problem(shown, value, bad.why, bad.fix))


def _sectioned(data: Mapping[str, Any], found: list[Problem]) -> dict[str, Any]:
    """Settings of a file in our own form: every key a section, every name in it a field."""
    settings: dict[str, Any] = {}
    for section, content in data.items():
        if section in _TOP_LEVEL:
            continue
        if section not in SECTIONS or not isinstance(content, dict):
            fix = did_you_mean(section, SECTIONS, f"Sections: {', '.join(SECTIONS)}.")
            found.append(Problem(section, content, "there is no such section", fix))
            continue
        for name, value in cast("dict[str, Any]", content).items():
            key = f"{section}.{name}"
            if key in FIELDS:
                _take(key, value, key, settings, found)
            else:
                close = did_you_mean(name, _names(section), f"Known in [{section}]: {', '.join(_names(section))}.")
                found.append(Problem(key, value, "there is no such setting", close))
    return settings


def _names(section: str) -> list[str]:
    return [spec.name for spec in FIELDS.values() if spec.section == section]


def _file_settings(data: Mapping[str, Any], file: Path, found: list[Problem], notes: list[str]) -> dict[str, Any]:
    """Settings of a config file, ours or sd-scripts' flat form, or both mixed.

    Names that are fields of their section are taken as ours. All other names (at top level, in sections with foreign
    names, or sd-scripts' names in a section of ours) go through the alias table, as sd-scripts flattens its files.
    """
    if "datasets" in data or "general" in data:
        why = "this is a data-set config of sd-scripts, not a training config"
        found.append(Problem("config", str(file), why, f"Give it as --dataset.config_file '{file}'."))
        return {}
    own: dict[str, Any] = {}
    typed: list[tuple[str, Any]] = []
    for key, content in migrate(data).items():
        if key in _TOP_LEVEL:
            continue
        if not isinstance(content, dict):
            if key in SECTIONS:
                why = "is the name of a section, not of a setting"
                found.append(
                    Problem(key, content, why, f"Write [{key}] and below it lines such as {_names(key)[0]} = ...")
                )
            else:
                typed.append((key, content))
            continue
        table = cast("dict[str, Any]", content)
        _sort_table(key, table, own, typed)
    settings: dict[str, Any] = {}
    for key, value in own.items():
        _take(key, value, key, settings, found)
    aliased = resolve(typed, text=False, where=f" in {file.name}")
    found.extend(aliased.problems)
    notes.extend(aliased.notes)
    for key, value in aliased.settings.items():
        if key in settings and settings[key] != value:
            found.append(Problem(key, value, f"is set twice in {file.name}, also to {settings[key]!r}", "Keep one."))
        settings[key] = value
    for name in aliased.special:
        why = "belongs on the command line, not into a config file"
        found.append(Problem(f"{name} in {file.name}", aliased.special[name], why, "Take it out of the file."))
    notes.extend(habit_notes(aliased.used, settings))
    return settings


def _sort_table(section: str, table: dict[str, Any], own: dict[str, Any], typed: list[tuple[str, Any]]) -> None:
    """Fields of the section into `own`; everything else is a name for the alias table."""
    for name, value in table.items():
        if f"{section}.{name}" in FIELDS:
            own[f"{section}.{name}"] = value
        elif section in SECTIONS and find(name) is None:
            typed.append((f"{section}.{name}", value))  # reported as a wrong name of that section
        else:
            typed.append((name, value))
