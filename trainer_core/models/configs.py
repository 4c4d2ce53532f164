"""The configs of an SDXL model's parts: from a folder, from header metadata, from the shapes, or the shipped ones.

Shapes tell widths, depths and counts, but not the number of attention heads, the groups of a norm, the native size or
the latent scaling factor. Those come from the first of: `config_dir`, what the files say themselves, a shipped config
(real SDXL, the toy) that fits all shapes, SDXL's own rules (64 features a head, 32 groups); the last case is said in
`ModelConfigs.notes`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelFileError
from .sources import FOLDERS, Source

ASSETS = Path(__file__).resolve().parent.parent / "assets"
SHIPPED = {"sdxl": ASSETS / "sdxl", "toy": ASSETS / "toy_sdxl"}
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelConfigs:
    """One config (a plain dict as in diffusers' / transformers' JSON files) a part, and where each came from."""

    parts: Mapping[str, Mapping[str, Any]]
    scheduler: Mapping[str, Any]
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()


def shipped_config(model: str, part: str) -> dict[str, Any] | None:
    return read_config(SHIPPED[model], part)


def read_config(folder: Path, part: str) -> dict[str, Any] | None:
    """The JSON config of a part in a diffusers-like folder, None when there is none."""
    path = (
        folder / "scheduler" / "scheduler_config.json"
        if part == "scheduler"
        else folder / FOLDERS[part] / "config.json"
    )
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelFileError(
            f"'{path}' cannot be read as JSON: {error}. Restore it or leave config_dir out.", path
        ) from error


def find_configs(
    source: Source, vae: Source, config_dir: Path | None, parts: Sequence[str] = tuple(FOLDERS)
) -> ModelConfigs:
    """Configs for the asked parts; `vae` is the source of the VAE that will be used (often `source` itself)."""
    if config_dir is not None and not config_dir.is_dir():
        raise ModelFileError(
            f"config_dir '{config_dir}' is not a folder. Give a folder with unet/config.json and so on.", config_dir
        )
    found: dict[str, Mapping[str, Any]] = {}
    origins: dict[str, str] = {}
    notes: list[str] = []
    for part in parts:
        owner = vae if part == "vae" else source
        found[part], origins[part] = _find_config(part, owner, config_dir, notes)
    if origins.get("unet") == "shapes":
        width = addition_time_width(found["unet"], int(found["te2"]["projection_dim"]))
        found["unet"] = {**found["unet"], "addition_time_embed_dim": width}
    scheduler = read_config(config_dir, "scheduler") if config_dir else None
    scheduler = scheduler or dict(source.configs.get("scheduler", {})) or shipped_config("sdxl", "scheduler") or {}
    return ModelConfigs(found, scheduler, origins, tuple(notes))


def _find_config(part: str, owner: Source, config_dir: Path | None, notes: list[str]) -> tuple[Mapping[str, Any], str]:
    given = read_config(config_dir, part) if config_dir else None
    if given is not None:
        return given, f"config_dir '{config_dir}'"
    if part in owner.configs:
        return owner.configs[part], "the model's own config"
    facts = shape_facts(part, {name: slot.shape for name, slot in owner.parts[part].items()}, owner.path)
    for model in SHIPPED:
        config = shipped_config(model, part)
        if config is not None and fits(config, facts):
            return config, f"shipped config '{model}'"
    return _derived(part, facts, notes), "shapes"


def fits(config: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    return all(config.get(key) == value for key, value in facts.items())


def shape_facts(part: str, shapes: Shapes, path: Path) -> dict[str, Any]:
    """What the shapes of a part tell, under the names of its config's fields."""
    readers = {"unet": _unet_facts, "vae": _vae_facts, "te1": _text_facts, "te2": _text_facts}
    try:
        return readers[part](shapes)
    except (KeyError, IndexError) as error:
        raise ModelFileError(
            f"'{path}' is no complete SDXL model: the {FOLDERS[part]} lacks the tensor {error}. Get the file again.",
            path,
        ) from error


def _count(shapes: Shapes, before: str) -> int:
    """How many numbered children stand under `before` (`before.0.`, `before.1.`, ...)."""
    return len({name[len(before) + 1 :].split(".")[0] for name in shapes if name.startswith(f"{before}.")})


def _unet_facts(shapes: Shapes) -> dict[str, Any]:
    levels = _count(shapes, "down_blocks")
    widths = [shapes[f"down_blocks.{i}.resnets.0.conv1.weight"][0] for i in range(levels)]
    depths = [_count(shapes, f"down_blocks.{i}.attentions.0.transformer_blocks") for i in range(levels)]
    last = f"down_blocks.{levels - 1}.attentions.0.transformer_blocks.0.attn2.to_k.weight"
    return {
        "in_channels": shapes["conv_in.weight"][1],
        "out_channels": shapes["conv_out.weight"][0],
        "block_out_channels": widths,
        "layers_per_block": _count(shapes, "down_blocks.0.resnets"),
        "transformer_layers_per_block": [max(depth, 1) for depth in depths],
        "down_block_types": ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths],
        "up_block_types": ["CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in reversed(depths)],
        "cross_attention_dim": shapes[last][1],
        "projection_class_embeddings_input_dim": shapes["add_embedding.linear_1.weight"][1],
    }


def _vae_facts(shapes: Shapes) -> dict[str, Any]:
    levels = _count(shapes, "encoder.down_blocks")
    return {
        "block_out_channels": [shapes[f"encoder.down_blocks.{i}.resnets.0.conv1.weight"][0] for i in range(levels)],
        "layers_per_block": _count(shapes, "encoder.down_blocks.0.resnets"),
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
    }


def _text_facts(shapes: Shapes) -> dict[str, Any]:
    vocabulary, width = shapes["embeddings.token_embedding.weight"]
    facts = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shapes["encoder.layers.0.mlp.fc1.weight"][0],
        "num_hidden_layers": _count(shapes, "encoder.layers"),
        "max_position_embeddings": shapes["embeddings.position_embedding.weight"][0],
    }
    projection = shapes.get("text_projection.weight")
    return facts if projection is None else {**facts, "projection_dim": projection[0]}


def _derived(part: str, facts: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """SDXL's config with the facts put in and SDXL's rules for what shapes cannot tell."""
    config = {**(shipped_config("sdxl", part) or {}), **facts}
    guesses: list[str] = []
    widths: list[int] = config.get("block_out_channels", [])
    if part == "unet":
        config["attention_head_dim"] = [max(1, width // 64) for width in widths]
        guesses += [f"attention heads {config['attention_head_dim']}", f"native size {config['sample_size'] * 8} px"]
    if part in ("te1", "te2"):
        config["num_attention_heads"] = max(1, config["hidden_size"] // 64)
        guesses.append(f"{config['num_attention_heads']} attention heads")
    if widths:
        config["norm_num_groups"] = _groups(widths)
        guesses.append(f"{config['norm_num_groups']} norm groups")
    if part == "vae":
        guesses.append(f"latent scaling factor {config['scaling_factor']}")
    notes.append(
        f"The {FOLDERS[part]} has other sizes than SDXL's; what shapes cannot tell was taken by SDXL's rules: "
        f"{', '.join(guesses)}. Give config_dir (a folder with {FOLDERS[part]}/config.json) if that is not right."
    )
    return config


def _groups(widths: list[int]) -> int:
    """The largest power of two up to 32 (SDXL's value) that divides every width."""
    groups = 32
    while groups > 1 and any(width % groups for width in widths):
        groups //= 2
    return groups


def addition_time_width(unet: Mapping[str, Any], pooled_width: int) -> int:
    """Width of each of the six embedded size numbers: what the pooled vector leaves of the projection's input."""
    return (int(unet["projection_class_embeddings_input_dim"]) - pooled_width) // 6
