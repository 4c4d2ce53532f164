"""Graphs in ComfyUI's API form, on the toy model and its pictures."""

from __future__ import annotations

from typing import Any

Graph = dict[str, dict[str, Any]]

TOY = "toy (built in, for a first try)"


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def load() -> dict[str, Any]:
    return node("SafeScalerLoadSDXL", checkpoint=TOY, precision="fp32")


def dataset(folder: str = "toy", **more: Any) -> dict[str, Any]:
    inputs = {"folder": folder, "trigger_word": "", "resolution": 0, "repeats": 1, "validation_split": 0.1}
    return node("SafeScalerDataset", **{**inputs, "model": ["1", 0], **more})


def targets(**more: Any) -> dict[str, Any]:
    inputs = {
        "rank": 4, "alpha": 0.0, "layers": "default", "unet_rate": -1.0,
        "text_encoder_1_rate": 0.0, "text_encoder_2_rate": 0.0,
    }  # fmt: skip
    return node("SafeScalerTargets", **{**inputs, **more})


def train(**more: Any) -> dict[str, Any]:
    """Twelve steps of batch 2 with checkpoints every four, nothing measured or sampled on the way."""
    inputs = {
        "model": ["1", 0], "dataset": ["2", 0], "targets": ["3", 0], "purpose": "own settings", "vram": "own settings",
        "output_name": "test", "steps": 12, "learning_rate": 1e-3, "train_seed": 7, "preview_prompts": "none",
        "preview_every": 0, "save_every": 4, "device": "cpu", "batch_size": 2, "validate_every": 0,
        "more_settings": "validation.enabled = false\ncheckpoint.keep_last = 9",
    }  # fmt: skip
    return node("SafeScalerTrain", **{**inputs, **more})


def small_graph(folder: str = "toy", **more: Any) -> Graph:
    """Load SDXL (1) -> Training Dataset (2) -> Configure LoRA Targets (3) -> Train (4); `more` are Train's inputs."""
    return {"1": load(), "2": dataset(folder), "3": targets(), "4": train(**more)}
