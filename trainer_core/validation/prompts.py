"""Prompts of preview pictures, in the line form that sd-scripts users know.

One prompt a line: the text, then flags, each after " --": `--n` negative prompt, `--w` width, `--h` height, `--s`
sampling steps, `--l` guidance scale, `--d` seed, `--ss` sampler. Flags are read in any case; lines that start with `#`
and empty lines are passed over. Three deviations from sd-scripts, on purpose: an unknown flag is an error and is
not passed over, a prompt without `--d` gets a fixed seed (so that previews of different steps can be compared), and
sizes the model cannot make are rounded down with a warning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..config import PreviewConfig
from ..errors import ConfigError, Problem

FLAGS = {
    "n": "negative prompt",
    "w": "width",
    "h": "height",
    "s": "sampling steps",
    "l": "guidance scale",
    "d": "seed",
    "ss": "sampler",
}
_FOREIGN_FLAGS = {
    "g": "embedded guidance of Flux and SD3",
    "cn": "a ControlNet picture",
    "ctr": "renoising",
    "rcfg": "renormalised guidance",
    "fs": "the flow shift of flow models",
}
SAMPLER_NAMES = {
    "euler": "euler",
    "k_euler": "euler",
    "euler_a": "euler_a",
    "k_euler_a": "euler_a",
    "euler_ancestral": "euler_a",
    "dpmpp_2m": "dpmpp_2m",
    "dpm++_2m": "dpmpp_2m",
    "dpmsolver++": "dpmpp_2m",
    "ddim": "ddim",
}
"""Sampler names that are understood, sd-scripts' and ComfyUI's among them, and ours."""
_MAX_SIDE = 8192
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class PreviewPrompt:
    """One preview picture: what to draw, and how. Width and height in pixels."""

    text: str
    negative: str
    width: int
    height: int
    steps: int
    guidance: float
    seed: int
    sampler: str


@dataclass(frozen=True, kw_only=True)
class SizeRule:
    """What sizes a model can make. `native`: its own side; `multiple`: VAE factor x the UNet's own shrinking."""

    native: int
    multiple: int

    def fit(self, side: int) -> int:
        """`side` rounded down to the multiple, and at least one multiple."""
        return max(self.multiple, side // self.multiple * self.multiple)


class _Failure(Exception):
    """One bad flag or file: why it cannot be, and what to do."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.why = why
        self.fix = fix


def size_rule(model: Any) -> SizeRule:
    """The size rule of a loaded `SDXLModel`: sides are multiples of VAE factor x 2 ** (UNet levels - 1); SDXL: 32."""
    levels = len(model.unet.config.block_out_channels)
    return SizeRule(native=model.native_size, multiple=model.vae_factor * 2 ** (levels - 1))


def read_prompts(config: PreviewConfig, rule: SizeRule) -> tuple[list[PreviewPrompt], list[str]]:
    """All prompts of the config (its own, then those of `prompt_file`) and warnings in plain words.

    Raises:
        ConfigError: one problem for every bad flag or value and for an unreadable prompt file.
    """
    lines, problems = _lines(config)
    prompts: list[PreviewPrompt] = []
    warnings: list[str] = []
    for where, line in lines:
        try:
            prompt, said = parse_prompt_line(line, config, rule, index=len(prompts))
        except ConfigError as error:
            problems.extend(Problem(where, problem.value, problem.why, problem.fix) for problem in error.problems)
        else:
            prompts.append(prompt)
            warnings.extend(said)
    if problems:
        raise ConfigError(problems)
    return prompts, warnings


def prompt_problems(config: PreviewConfig) -> list[Problem]:
    """What is wrong with the prompts of a config; needs no model, so it is known before one is loaded."""
    try:
        read_prompts(config, SizeRule(native=1024, multiple=8))
    except ConfigError as error:
        return list(error.problems)
    return []


def parse_prompt_line(
    line: str, config: PreviewConfig, rule: SizeRule, *, index: int = 0
) -> tuple[PreviewPrompt, list[str]]:
    """One line as a prompt with the config's values where it has no flag, and warnings.

    `index` is the prompt's place: without `--d` its seed is the config's seed + index.

    Raises:
        ConfigError: one problem for every bad flag or value.
    """
    text, *pieces = re.split(r"(?:^|\s)--", line.strip())
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for piece in pieces:
        name, _, value = piece.strip().partition(" ")
        try:
            flag = _known_flag(name, piece)
            if flag in values:
                raise _Failure("this flag is given twice", f"Keep one --{flag}.")
            values[flag] = _READERS[flag](value.strip())
        except _Failure as failure:
            problems.append(Problem("preview.prompts", f"--{piece.strip()}", failure.why, failure.fix))
    if problems:
        raise ConfigError(problems)
    width, height, warnings = _size(values, config, rule, shown=text.strip())
    prompt = PreviewPrompt(
        text=text.strip(),
        negative=values.get("n", config.negative),
        width=width,
        height=height,
        steps=values.get("s", config.steps),
        guidance=values.get("l", config.guidance),
        seed=values.get("d", min(config.seed + index, _MAX_SEED)),
        sampler=values.get("ss", config.sampler),
    )
    return prompt, warnings


def _size(values: dict[str, Any], config: PreviewConfig, rule: SizeRule, *, shown: str) -> tuple[int, int, list[str]]:
    wanted = (values.get("w", config.width or rule.native), values.get("h", config.height or rule.native))
    made = (rule.fit(wanted[0]), rule.fit(wanted[1]))
    if made == wanted:
        return *made, []
    return *made, [
        f"The preview of '{_short(shown)}' is made at {made[0]}x{made[1]} instead of {wanted[0]}x{wanted[1]}: "
        f"this model makes pictures whose sides are multiples of {rule.multiple}."
    ]


def _lines(config: PreviewConfig) -> tuple[list[tuple[str, str]], list[Problem]]:
    """Lines that hold a prompt, each with the config field it came from, and problems of the prompt file."""
    found = [("preview.prompts", line) for text in config.prompts for line in text.splitlines()]
    problems: list[Problem] = []
    if config.prompt_file:
        try:
            text = _prompt_file_text(Path(config.prompt_file))
        except _Failure as failure:
            problems.append(Problem("preview.prompt_file", config.prompt_file, failure.why, failure.fix))
        else:
            found += [("preview.prompt_file", line) for line in text.splitlines()]
    return [(where, line) for where, line in found if line.strip() and not line.lstrip().startswith("#")], problems


def _prompt_file_text(path: Path) -> str:
    if path.suffix.lower() in (".json", ".toml"):
        raise _Failure(f"{path.suffix} prompt files are not read", "Use a text file with one prompt a line.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise _Failure("the file is not UTF-8 text", "Save it as UTF-8.") from None
    except OSError as error:
        raise _Failure(f"the file cannot be read ({error.strerror or error})", "Check the path.") from None


def _known_flag(name: str, piece: str) -> str:
    flag = name.lower()
    if flag in FLAGS:
        return flag
    if flag in _FOREIGN_FLAGS:
        raise _Failure(f"--{flag} ({_FOREIGN_FLAGS[flag]}) has no meaning for SDXL previews", "Leave it out.")
    allowed = ", ".join(f"--{key} ({what})" for key, what in FLAGS.items())
    near = get_close_matches(flag, [*FLAGS, *FLAGS.values()], n=1, cutoff=0.7)
    by_word = {what: key for key, what in FLAGS.items()}
    hint = f"Did you mean --{by_word.get(near[0], near[0])}? " if near else ""
    raise _Failure(
        f"'--{name or piece.strip()}' is no preview flag", f"{hint}Allowed: {allowed}. Text must not contain ' --'."
    )


def _number(value: str, kind: type[int] | type[float], low: float, high: float, what: str) -> Any:
    try:
        number = kind(value)
    except ValueError:
        number = None
    if number is None or not low <= number <= high:  # NaN fails the comparison too
        noun = "a whole number" if kind is int else "a number"
        why = f"{what} must be {noun} from {kind(low)} to {kind(high)}"
        raise _Failure(why, "Correct the value or leave the flag out.")
    return number


def _sampler(value: str) -> str:
    name = value.lower().replace(" ", "_")
    if name in SAMPLER_NAMES:
        return SAMPLER_NAMES[name]
    near = get_close_matches(name, list(SAMPLER_NAMES), n=1, cutoff=0.5)
    ours = ", ".join(dict.fromkeys(SAMPLER_NAMES.values()))
    hint = f" The nearest is {SAMPLER_NAMES[near[0]]}." if near else ""
    raise _Failure(f"the sampler '{value}' is not supported", f"Allowed: {ours}.{hint}")


def _short(text: str, length: int = 60) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


_READERS: dict[str, Any] = {
    "n": str,
    "w": lambda value: _number(value, int, 8, _MAX_SIDE, "the width"),
    "h": lambda value: _number(value, int, 8, _MAX_SIDE, "the height"),
    "s": lambda value: _number(value, int, 1, 1000, "the number of sampling steps"),
    "l": lambda value: _number(value, float, 0, 100, "the guidance scale"),
    "d": lambda value: _number(value, int, 0, _MAX_SEED, "the seed"),
    "ss": _sampler,
}
