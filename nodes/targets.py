"""Configure LoRA Targets: which layers get adapters, how big they are, and how fast each part learns."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from .. import trainer_core as core
from . import host
from .boundary import contained
from .graph_pictures import shown_files
from .handles import MODEL, TARGETS, ModelHandle, TargetsHandle
from .widgets import Declaration, setting, socket, text

AS_MAIN = -1.0
"""A rate of a part that follows the main learning rate."""

_PLAIN = {
    "layers": "lora.preset",
    "conv_rank": "lora.conv_rank",
    "dropout": "lora.dropout",
    "rank_dropout": "lora.rank_dropout",
    "module_dropout": "lora.module_dropout",
    "rs_lora": "lora.rs_lora",
    "init": "lora.init",
    "block_dims": "lora.block_dims",
    "network": "lora.network",
}


class SafeScalerTargets:
    CATEGORY = "Safe-Scaler"
    DESCRIPTION = (
        "Chooses the layers that get adapters, their ranks, and the learning rate of each part. With a linked model it "
        "shows which layers these are."
    )
    FUNCTION = "execute"
    RETURN_TYPES = (TARGETS, "STRING")
    RETURN_NAMES = ("targets", "coverage")
    OUTPUT_TOOLTIPS = (
        "The layers to train, for Safe-Scaler Train.",
        "Layers and adapters of every block as a table; empty when no model is linked.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Declaration]]:
        rate = "Learning rate of {}; -1 = the main learning rate, 0 = not trained."
        return {
            "required": {
                "rank": setting(
                    "lora.rank", 0, low=0, tooltip="Rank of the adapters; 0 = by the purpose chosen in Train."
                ),
                "alpha": setting("lora.alpha", 0.0, low=0, tooltip="Scale = alpha / rank; 0 = half the rank."),
                "layers": setting("lora.preset"),
                "unet_rate": setting("optimizer.unet_lr", AS_MAIN, low=-1, tooltip=rate.format("the UNet")),
                "text_encoder_1_rate": setting(
                    "optimizer.te1_lr", 0.0, low=-1, tooltip=rate.format("text encoder 1 (CLIP-L)")
                ),
                "text_encoder_2_rate": setting(
                    "optimizer.te2_lr", 0.0, low=-1, tooltip=rate.format("text encoder 2 (CLIP-G)")
                ),
            },
            "optional": {
                "model": socket(MODEL, "The base model; with it the node shows which layers get adapters."),
                "conv_rank": setting("lora.conv_rank"),
                "dropout": setting("lora.dropout"),
                "rank_dropout": setting("lora.rank_dropout"),
                "module_dropout": setting("lora.module_dropout"),
                "rs_lora": setting("lora.rs_lora"),
                "init": setting("lora.init"),
                "rules": text(
                    "",
                    "Rules for single blocks, one a line, such as: IN07-IN08 cross rank=32 alpha=16 lr=0.5",
                    lines=True,
                    advanced=True,
                ),
                "block_dims": setting("lora.block_dims"),
                "network": setting("lora.network"),
                "network_args": text(
                    "", "Arguments of a foreign network module, one key=value a line.", lines=True, advanced=True
                ),
            },
        }

    @contained
    def execute(self, model: ModelHandle | None = None, **inputs: Any) -> dict[str, Any]:
        handle = TargetsHandle(title=_title(inputs), settings=target_settings(inputs))
        if model is None:
            return {"ui": {"text": [handle.title]}, "result": (handle, "")}
        table, picture = _coverage(model, handle)
        return {"ui": {"text": [table], "images": shown_files([picture])}, "result": (handle, table)}


def _coverage(model: ModelHandle, targets: TargetsHandle) -> tuple[str, Path]:
    """Table and picture of where the adapters sit, made in a process of its own (it needs diffusers)."""
    from .following import work

    main_rate = {"optimizer.learning_rate": 1e-4}  # which parts are trained depends on their own rates alone
    config, _ = core.load_config(None, {**model.settings, **targets.settings, **main_rate}, check=False)
    folder = host.temp_folder() / "safe_scaler" / f"coverage-{secrets.token_hex(6)}"
    job = core.create_coverage_job(folder, config)
    outcome = work(job.path)
    host.raise_if_interrupted()
    if outcome.status != "finished":
        raise core.TrainerError(outcome.message)
    return str(core.read_coverage(job)["text"]), job.path / core.COVERAGE_PICTURE


def target_settings(inputs: dict[str, Any]) -> dict[str, Any]:
    """Config values by `section.field` of the node's inputs."""
    settings = {key: inputs[name] for name, key in _PLAIN.items() if name in inputs}
    if inputs["rank"]:
        settings["lora.rank"] = inputs["rank"]
    if inputs["alpha"]:
        settings["lora.alpha"] = inputs["alpha"]
    for name, part in (("unet_rate", "unet"), ("text_encoder_1_rate", "te1"), ("text_encoder_2_rate", "te2")):
        settings[f"optimizer.{part}_lr"] = None if inputs[name] < 0 else inputs[name]
    for name, key in (("rules", "lora.targets"), ("network_args", "lora.network_args")):
        if lines := _lines(inputs.get(name, "")):
            settings[key] = lines
    return settings


def _lines(value: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in value.splitlines() if line.strip())


def _title(inputs: dict[str, Any]) -> str:
    rank = f"rank {inputs['rank']}" if inputs["rank"] else "rank by purpose"
    return f"{inputs['layers']}, {rank}"
