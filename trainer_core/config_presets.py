"""Named sets of settings. A preset stands below the config file and the flags, and above the defaults.

`kohya` gives the defaults of sd-scripts (`sdxl_train_network.py`, option table of 2026-02-16) wherever they differ
from ours. What it cannot give is said in the notes of the run, not left out in silence.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """Settings by `section.field`, and what a person should know who chose them.

    `about`: the settings that a note is about; it is not said where all of them are set.
    """

    settings: dict[str, Any]
    notes: tuple[str, ...] = field(default=())
    about: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def notes_beside(self, chosen: Collection[str]) -> list[str]:
        """The notes for who sets `chosen` (`section.field`) beside the preset."""
        return [note for note in self.notes if note not in self.about or not set(self.about[note]) <= set(chosen)]


_SLOW = (
    "preset kohya: learning_rate 2e-06 and alpha 1 are sd-scripts' defaults and learn very slowly; "
    "most recipes set both"
)

_KOHYA = Preset(
    settings={
        "lora.rank": 4,
        "lora.alpha": 1.0,
        "optimizer.learning_rate": 2e-6,
        # Unset in sd-scripts means "as learning_rate": its LoRA trains the UNet and both text encoders by default.
        "optimizer.unet_lr": None,
        "optimizer.te1_lr": None,
        "optimizer.te2_lr": None,
        "dataset.caption_extensions": (".caption",),
        "dataset.compat": "kohya",
        "bucket.enabled": False,
        "bucket.min_size": 256,
        "bucket.max_size": 1024,
        "bucket.step": 64,
        "precision.compute": "fp32",
        "run.max_train_steps": 1600,
        "validation.enabled": False,
        "preview.sampler": "ddim",
        "preview.steps": 30,
        "preview.guidance": 7.5,
        "preview.width": 512,
        "preview.height": 512,
        "preview.at_start": False,
    },
    notes=(
        "preset kohya: transparent pictures are laid over dataset.background; sd-scripts keeps the hidden colour",
        _SLOW,
    ),
    about={_SLOW: ("optimizer.learning_rate", "lora.alpha")},
)

PRESETS: dict[str, Preset] = {"kohya": _KOHYA}
