"""Which device and number format a run uses."""

from __future__ import annotations

import torch

from .errors import ConfigError, Problem


def choose_device(asked: str) -> torch.device:
    """The device for `run.device`; "auto" takes a CUDA (or ROCm) GPU, then Apple's, then the CPU.

    Raises:
        ConfigError: the device asked for does not exist here.
    """
    if asked == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise ConfigError(
            [Problem("run.device", asked, "this is not a device name", "Use auto, cpu, cuda, cuda:0 or mps.")]
        ) from None
    if not _exists(device):
        count = torch.cuda.device_count()
        raise ConfigError(
            [
                Problem(
                    "run.device",
                    asked,
                    f"this torch ({torch.__version__}) sees {count} CUDA devices",
                    "Use auto, or look at `safe-scaler doctor`.",
                )
            ]
        )
    return device


def choose_compute(asked: str, device: torch.device) -> str:
    """fp32, bf16 or fp16 for `precision.compute`; "auto" takes bf16 where the GPU has it, fp16 on older ones, and
    fp32 on a CPU or on Apple's GPU."""
    if asked != "auto":
        return asked
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "fp32"


def _exists(device: torch.device) -> bool:
    if device.type == "cuda":
        return (device.index or 0) < torch.cuda.device_count()
    if device.type == "mps":
        return torch.backends.mps.is_available()
    return device.type == "cpu"
