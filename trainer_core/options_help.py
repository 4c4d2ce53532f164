"""Help texts of the command line and the tables of `docs/configuration.md`, made from the config's own metadata."""

from __future__ import annotations

from .config import SECTIONS
from .config_fields import FIELDS, FieldSpec, allowed
from .options import OPTIONS

_INTRO = """usage: safe-scaler train [CONFIG.toml] [--name value ...]

Trains an SDXL LoRA. Settings come from the flags, then the config file, then --preset, then the defaults.
Names are --section.field or --field; the names of sd-scripts and diffusers are understood too.

  --config FILE            config file (TOML or JSON), the same as CONFIG.toml
  --preset NAME            kohya: the defaults of sd-scripts
  --supervise              train in a process of its own that is started again if it dies
  --resume_from_checkpoint RUN|latest
                           go on with a run of --output_dir
  --help-all               every setting, and every name of sd-scripts and diffusers

first try:  safe-scaler train --model.path toy --dataset.path PICTURES --max_train_steps 200
"""


def short_name(spec: FieldSpec) -> str:
    """The shortest own name of a field: `field` where that is no other option's, else `section.field`."""
    option = OPTIONS.get(spec.name)
    if option is not None and spec.name not in SECTIONS and option.source == "safe-scaler":
        return spec.name
    return spec.key


def shown_default(spec: FieldSpec) -> str:
    """The default as a person would type it."""
    if spec.default is None:
        return "unset"
    if isinstance(spec.default, tuple):
        return " ".join(str(item) for item in spec.default) or "none"  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(spec.default, bool):
        return "on" if spec.default else "off"
    return str(spec.default) if spec.default != "" else "empty"


def train_help(*, everything: bool = False) -> str:
    """The text of `safe-scaler train --help`, or with `everything` that of `--help-all`."""
    lines = [_INTRO]
    for section in SECTIONS:
        lines.append(f"[{section}]")
        for spec in FIELDS.values():
            if spec.section == section and (everything or not spec.advanced):
                lines.append(f"  --{spec.key}  {spec.help}")
                lines.append(
                    f"      {allowed(spec)}{f' ({spec.unit})' if spec.unit else ''}; default {shown_default(spec)}"
                )
        lines.append("")
    if everything:
        lines += _alias_lines()
    return "\n".join(lines).rstrip() + "\n"


def _alias_lines() -> list[str]:
    lines: list[str] = []
    for source in ("sd-scripts", "diffusers"):
        understood = sorted(o.name for o in OPTIONS.values() if o.source == source and not o.refused)
        refused = sorted(o.name for o in OPTIONS.values() if o.source == source and o.refused)
        lines.append(f"names of {source} that are understood: {' '.join(understood)}")
        lines.append("")
        lines.append(f"names of {source} that are refused, each with its reason: {' '.join(refused)}")
        lines.append("")
    return lines
