"""Write `docs/configuration.md` from the config's own metadata and the alias table.

Run `python tools/make_config_docs.py` after a change of a field or an option; a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer_core.config import SECTIONS  # noqa: E402
from trainer_core.config_fields import FIELDS, BadValue, FieldSpec, allowed  # noqa: E402
from trainer_core.config_presets import PRESETS  # noqa: E402
from trainer_core.options import OPTIONS  # noqa: E402
from trainer_core.options_help import shown_default  # noqa: E402
from trainer_core.options_kinds import Option  # noqa: E402

TARGET = ROOT / "docs" / "configuration.md"

INTRO = """# Configuration

<!-- Written by tools/make_config_docs.py; change the texts there, the tables in the config's metadata. -->

Settings come from four places; the first that says something wins:

1. flags on the command line: `--lora.rank 8`, or `--rank 8` where the short name is unambiguous;
2. the config file: `safe-scaler train run.toml` (TOML, or JSON for `.json`);
3. a preset: `--preset kohya`, or `preset = "kohya"` at the top of the file;
4. the defaults below.

Everything is checked before a model is loaded, and all problems come in one message, each with the setting, what was
received, why it cannot be, and what to do. A name that nobody knows is never ignored: the nearest known one is named.

```toml
[model]
path = 'D:\\models\\sd_xl_base_1.0.safetensors'   # single quotes: backslashes stay as they are
[dataset]
path = "pictures"
[lora]
rank = 16
[run]
max_train_steps = 1500
```

`safe-scaler train --help` lists the usual settings, `--help-all` everything. Switches are on when they stand alone and
take `=true` or `=false`; `none` unsets a setting that may be unset. Sizes are `1024` or `1024,768` (width, height).
The resolved config of a run is `config.json` in its folder; it carries a format version, older ones are brought up to
date when they are read, and a newer one is refused naming both versions.

## Files and command lines of other tools

A config file of sd-scripts (`--config_file`) is read as it is: its sections are flattened and its names translated by
the tables at the end of this page, which also hold what users of diffusers' scripts type. A name of another tool may
stand in a section of ours too. What cannot be done is refused by name, with the reason and the nearest thing that can;
options that ask for nothing (`v2 = false`, empty texts, sd-scripts' defaults) pass, because front ends write them all.
Some wishes are always met here (`--cache_latents`, `--xformers`): they are accepted and explained.

Where other tools have unsaid defaults that differ from ours, a note says so at the start of the run:

- alpha unset is rank / 2 here, 1 in sd-scripts, the rank in diffusers' scripts;
- text encoders are not trained unless asked for; sd-scripts trains them;
- dropout acts after `lora_down` (as in sd-scripts), PEFT's acts before it.

Two options that want the same setting to be two things are a problem, with these exceptions:
`--network_train_unet_only` and `--network_train_text_encoder_only` win over learning rates typed along with them, and
`--train_text_encoder` yields to them. `max_train_steps` and `max_train_epochs` end the run alike: setting one on the
command line takes back the other of the file or preset; both in one place are refused.

`--save_steps N` and its like write a checkpoint *and* a LoRA file every N steps. `--validation_steps N` is the cadence
of preview pictures, as in diffusers; the validation loss has `validation.every_steps`. `--num_validation_images N`
makes N pictures of the prompt, with seeds counting up. `--resume_from_checkpoint latest` goes on with the newest run of
`--output_dir`, or starts a new one and says so.

## From Python

```python
from pathlib import Path
from trainer_core.config_io import load_config, to_dict, from_dict

config, notes = load_config(Path("run.toml"), {"lora.rank": 8}, preset=None)  # raises ConfigError with all problems
assert from_dict(to_dict(config)) == config
```
"""


def table(section: str) -> list[str]:
    lines = [f"### [{section}]", "", "| setting | default | allowed | what it does |", "|---|---|---|---|"]
    for spec in FIELDS.values():
        if spec.section == section:
            lines.append(f"| `{spec.name}` | {cell(shown_default(spec))} | {cell(limits(spec))} | {cell(spec.help)} |")
    return [*lines, ""]


def limits(spec: FieldSpec) -> str:
    return allowed(spec) + (f" ({spec.unit})" if spec.unit else "")


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def presets() -> list[str]:
    lines = ["## Presets", ""]
    for name, preset in PRESETS.items():
        lines += [f"### {name}", "", "| setting | value |", "|---|---|"]
        for key, value in preset.settings.items():
            shown = " ".join(value) if isinstance(value, tuple) else "unset" if value is None else str(value).lower()
            lines.append(f"| `{key}` | {shown} |")
        lines += ["", *(f"- {note.removeprefix(f'preset {name}: ')}" for note in preset.notes), ""]
    return lines


#: Values to find out which settings an option sets; the first that it takes counts.
SAMPLES = (True, "1", "0.5", "text", "epsilon", "fp16", "linear", "euler", "lanczos", "conv_dim=1", "lr_end=1", "a=1")


#: Options that set no field.
IN_WORDS = {
    "config_file": "the config file, as the word after `train`",
    "network_module": "`networks.lora` is what is trained; others are refused",
    "save_model_as": "`safetensors`; others are refused",
    "resume": "go on with this run folder (`safe-scaler resume RUN`)",
    "resume_from_checkpoint": "go on with this run folder, or with the newest run (`latest`)",
    "num_validation_images": "pictures made of `--validation_prompt`",
}


def meaning(option: Option) -> str:
    for sample in SAMPLES:
        value = [sample] if option.takes == "many" else sample
        try:
            found = option.rule(value)
        except (BadValue, ValueError, TypeError, AttributeError):
            continue
        if found or option.also:
            return ", ".join(f"`{key}`" for key in {**found, **option.also} if not key.startswith("cli."))
    return ""


def aliases(source: str) -> list[str]:
    mine = sorted((option for option in OPTIONS.values() if option.source == source), key=lambda option: option.name)
    lines = [f"## Names of {source}", "", "| name | means here |", "|---|---|"]
    for option in mine:
        if not option.refused:
            parts = [part for part in (meaning(option), option.note) if part]
            lines.append(f"| `--{option.name}` | {cell('; '.join(parts) or IN_WORDS[option.name])} |")
    lines += ["", "Refused:", "", "| name | why | instead |", "|---|---|---|"]
    for option in mine:
        if option.refused:
            why, fix = refusal(option)
            lines.append(f"| `--{option.name}` | {cell(why)} | {cell(fix)} |")
    return [*lines, ""]


def refusal(option: Option) -> tuple[str, str]:
    try:
        option.rule(True if option.takes == "flag" else "asked")
    except BadValue as bad:
        return bad.why, bad.fix
    raise AssertionError(f"{option.name} is listed as refused and is not")


def document() -> str:
    lines = [INTRO, "## Settings", ""]
    for section in SECTIONS:
        lines += table(section)
    lines += presets()
    for source in ("sd-scripts", "diffusers"):
        lines += aliases(source)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(document(), encoding="utf-8", newline="\n")
    print(f"written: {TARGET}")
