"""The nodes of the pack. Ids, input names and the order of outputs are the format of saved workflows: never renamed."""

from __future__ import annotations

from . import api
from .dataset import SafeScalerDataset
from .following import relay
from .load_sdxl import SafeScalerLoadSDXL
from .monitor import SafeScalerGradientMonitor
from .preview_lora import SafeScalerPreview
from .report import SafeScalerReport
from .resume import SafeScalerResume
from .targets import SafeScalerTargets
from .train import SafeScalerTrain

NODE_CLASS_MAPPINGS: dict[str, type] = {
    "SafeScalerLoadSDXL": SafeScalerLoadSDXL,
    "SafeScalerDataset": SafeScalerDataset,
    "SafeScalerTargets": SafeScalerTargets,
    "SafeScalerGradientMonitor": SafeScalerGradientMonitor,
    "SafeScalerTrain": SafeScalerTrain,
    "SafeScalerResume": SafeScalerResume,
    "SafeScalerReport": SafeScalerReport,
    "SafeScalerPreview": SafeScalerPreview,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {
    "SafeScalerLoadSDXL": "Load SDXL",
    "SafeScalerDataset": "Training Dataset",
    "SafeScalerTargets": "Configure LoRA Targets",
    "SafeScalerGradientMonitor": "Gradient Health Monitor",
    "SafeScalerTrain": "Safe-Scaler Train",
    "SafeScalerResume": "Resume From Checkpoint",
    "SafeScalerReport": "Training Report",
    "SafeScalerPreview": "Preview LoRA",
}

api.register(relay.set_interval)
