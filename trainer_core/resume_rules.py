"""Which settings may differ when a run is taken up again. Imports nothing heavy: nodes show differences beforehand."""

from __future__ import annotations

from typing import Any

from .config import TrainConfig, trained_parts
from .config_io import from_dict, to_dict
from .errors import CheckpointError

# Sections and fields that decide nothing about what has been trained so far; a change is allowed and logged.
_FREE_SECTIONS = frozenset(
    {"checkpoint", "hardware", "memory", "preview", "metadata", "safety", "schedule", "validation"}
)
_FREE_FIELDS = frozenset(
    {
        "run.max_train_steps",
        "run.max_train_epochs",
        "run.output_name",
        "run.output_dir",
        "run.device",
        "run.process_timeout",
        "optimizer.learning_rate",
        "optimizer.unet_lr",
        "optimizer.te1_lr",
        "optimizer.te2_lr",
        "optimizer.loraplus_ratio",
        "optimizer.loraplus_unet_ratio",
        "optimizer.loraplus_te_ratio",
        "optimizer.ema_validation",
        "optimizer.ema_preview",
        "optimizer.ema_export",
        "dataset.path",  # the digest of pictures and captions decides, by their paths inside the set
        "dataset.prior_path",
        "dataset.workers",
        "dataset.cache_dir",
        "dataset.cache_text",
        "dataset.verify",
        "gradient.max_norm",
        "gradient.clip",
        "precision.compute",
        "precision.loss_scale_growth_interval",
        "precision.min_loss_scale",
        "precision.max_loss_scale",
        "precision.max_rejected_steps",
        "precision.gradient_checkpointing",
        "model.path",  # the fingerprint in `resume.py` decides whether it is the same model
        "model.vae",
        "health.prometheus_port",
        "health.tensorboard",
        "health.export_json",
    }
)
# How, where and in what format the same step is computed.
_ROUNDING = frozenset({"memory.micro_batch", "dataset.workers", "precision.compute", "run.device", "hardware.compile"})
# validation.split decides which pictures are trained on.
_BOUND_FIELDS = frozenset({"validation.split", "validation.enabled", "validation.max_pictures"})


def setting_differences(before: dict[str, Any], now: TrainConfig) -> tuple[list[str], list[str]]:
    """Settings that differ from a stored config: (must not differ, may differ), each in words."""
    bound: list[str] = []
    free: list[str] = []
    current = to_dict(now)
    for section, fields in before.items():
        if not isinstance(fields, dict):
            continue
        for name, old in fields.items():
            new = current.get(section, {}).get(name)
            if _plain(old) == _plain(new):
                continue
            full = f"{section}.{name}"
            note = " (exact draws, rounding differs)" if full in _ROUNDING else ""
            text = f"{full}: {old!r} in the checkpoint, {new!r} now{note}"
            (free if _is_free(section, full) else bound).append(text)
    old_parts, new_parts = trained_parts(_rates_of(before)), trained_parts(now)
    if old_parts != new_parts:  # a learning rate may change, but not from or to 0
        bound.append(f"trained parts: {', '.join(old_parts)} in the checkpoint, {', '.join(new_parts)} now")
    return bound, free


def _rates_of(stored: dict[str, Any]) -> TrainConfig:
    """A config with the learning rates and ranks of a stored one, which decide what is trained."""
    return from_dict(
        {
            section: {name: value for name, value in stored.get(section, {}).items() if name.endswith(("rate", end))}
            for section, end in (("optimizer", "_lr"), ("lora", "rank"))
        }
    )


def refusal(name: str, bound: list[str]) -> CheckpointError:
    """The error of a run that cannot go on exactly from the checkpoint that `name` says."""
    return CheckpointError(
        f"The run cannot go on exactly from {name}, because this has changed:\n"
        + "\n".join(f"  - {line}" for line in bound)
        + "\nPut it back, or begin a new run with that LoRA: a warm start (lora.weights; in ComfyUI the node's mode).",
        differences=bound,
    )


def _is_free(section: str, full: str) -> bool:
    return full not in _BOUND_FIELDS and (section in _FREE_SECTIONS or full in _FREE_FIELDS)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
