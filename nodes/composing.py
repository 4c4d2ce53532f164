"""From a Train node's inputs to a checked config: memory recipe < purpose < linked nodes < Train < extra lines."""

from __future__ import annotations

from typing import Any

from .. import trainer_core as core
from . import host
from .handles import DatasetHandle, ModelHandle, MonitorHandle, TargetsHandle

NO_PREVIEWS = "none"
_CAPTION_PREVIEWS = 2

DIRECT = {
    "output_name": "run.output_name",
    "train_seed": "run.seed",
    "device": "run.device",
    "accumulation": "gradient.accumulation",
    "optimizer": "optimizer.type",
    "min_snr_gamma": "objective.min_snr_gamma",
    "noise_offset": "objective.noise_offset",
    "ema_decay": "optimizer.ema_decay",
    "save_every": "checkpoint.every_steps",
    "lora_every": "checkpoint.lora_every_steps",
    "lora_precision": "checkpoint.save_precision",
    "validate_every": "validation.every_steps",
    "preview_every": "preview.every_steps",
    "preview_steps": "preview.steps",
}
"""Inputs that set a config field as they are."""

IF_SET = {
    "steps": "run.max_train_steps",
    "learning_rate": "optimizer.learning_rate",
    "batch_size": "dataset.batch_size",
}
"""Inputs where 0 leaves the choice to the recipes."""

BY_PURPOSE = "by purpose"


def compose(
    inputs: dict[str, Any],
    model: ModelHandle,
    dataset: DatasetHandle,
    targets: TargetsHandle,
    monitor: MonitorHandle | None,
) -> tuple[core.TrainConfig, list[str]]:
    """The run's config and notes on what was chosen for the user. ConfigError with all problems at once."""
    extra, problems = core.read_lines(inputs.get("more_settings", ""))
    purpose = core.purpose_settings(inputs["purpose"], dataset.pictures)
    memory = core.memory_settings(inputs["vram"], model.native_size)
    settings: dict[str, Any] = {}
    for layer in (memory, purpose, model.settings, dataset.settings, targets.settings):
        settings.update(layer)
    settings.update(monitor.settings if monitor else {})
    settings.update(_own(inputs, dataset))
    settings.update(extra)
    settings["run.output_dir"] = str(host.output_folder())
    config, notes = core.load_config(None, settings, earlier=problems, light=True)
    return config, [*_chosen(inputs, {**memory, **purpose}, settings), *notes]


def _own(inputs: dict[str, Any], dataset: DatasetHandle) -> dict[str, Any]:
    settings = {key: inputs[name] for name, key in DIRECT.items() if name in inputs}
    settings.update({key: inputs[name] for name, key in IF_SET.items() if inputs.get(name)})
    if not settings.get("objective.min_snr_gamma"):
        settings.pop("objective.min_snr_gamma", None)
    if inputs.get("schedule", BY_PURPOSE) != BY_PURPOSE:
        settings["schedule.type"] = inputs["schedule"]
    settings["preview.prompts"] = preview_prompts(inputs.get("preview_prompts", ""), dataset)
    settings["metadata.minimal"] = inputs.get("metadata", "full") == "minimal"
    return settings


def preview_prompts(text: str, dataset: DatasetHandle) -> tuple[str, ...]:
    """Prompts one a line; nothing written = the first captions of the data set; the word none = no previews."""
    if text.strip().lower() == NO_PREVIEWS:
        return ()
    written = tuple(line.strip() for line in text.splitlines() if line.strip())
    return written or tuple(caption for caption in dataset.captions if caption.strip(" ,"))[:_CAPTION_PREVIEWS]


def _chosen(inputs: dict[str, Any], recipe: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """What the recipes decided, in one sentence."""
    used = [f"{key} = {value}" for key, value in recipe.items() if settings.get(key) == value]
    if not used:
        return []
    return [f"Chosen for purpose {inputs['purpose']!r} and {inputs['vram']!r} of memory: {', '.join(used)}."]
