"""Headless core of Safe-Scaler. This module is the facade: `nodes/` imports nothing below it.

Importing it is cheap (< 0.3 s): torch, diffusers and transformers are imported when a function needs them.
"""

from __future__ import annotations

from .errors import (
    AdapterError,
    CheckpointError,
    ConfigError,
    DatasetError,
    ModelFileError,
    NonFiniteError,
    Problem,
    ResourceError,
    TrainerError,
)

__version__ = "0.1.0"

__all__ = [
    "AdapterError",
    "CheckpointError",
    "ConfigError",
    "DatasetError",
    "ModelFileError",
    "NonFiniteError",
    "Problem",
    "ResourceError",
    "TrainerError",
    "__version__",
]
