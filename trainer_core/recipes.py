"""Starting points by purpose and by memory: what a person without settings of their own gets, and why.

The numbers are common practice for SDXL LoRAs (steps grow with the number of pictures, within limits), not
measurements of this project. A recipe fills in what was left open; it never replaces a setting that was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OWN = "own settings"

FULL_SIZE_PX = 768
"""Models with smaller pictures than this are toys: memory recipes leave their picture size alone."""


@dataclass(frozen=True)
class Purpose:
    """`steps_a_picture` times the number of pictures, kept between `fewest` and `most`."""

    rank: int
    learning_rate: float
    steps_a_picture: int
    fewest: int
    most: int
    words: str


PURPOSES: dict[str, Purpose] = {
    "character": Purpose(32, 1e-4, 80, 800, 3000, "a person or figure, 15 to 60 pictures"),
    "style": Purpose(32, 1e-4, 40, 1500, 6000, "a way of drawing or photographing, 30 to 200 pictures"),
    "concept": Purpose(16, 1e-4, 60, 600, 2500, "an object, garment or pose, 10 to 50 pictures"),
}

_MEMORY: dict[str, dict[str, Any]] = {
    "8 GB": {
        "dataset.batch_size": 1,
        "precision.gradient_checkpointing": True,
        "dataset.resolution": (FULL_SIZE_PX, FULL_SIZE_PX),
    },
    "12 GB": {"dataset.batch_size": 1, "precision.gradient_checkpointing": True},
    "16 GB": {"dataset.batch_size": 2, "precision.gradient_checkpointing": True},
    "24 GB": {"dataset.batch_size": 4, "precision.gradient_checkpointing": True},
}
MEMORY_SIZES = tuple(_MEMORY)


def purpose_settings(purpose: str, pictures: int) -> dict[str, Any]:
    """Settings (`section.field`) for `purpose` and a number of pictures; none for "own settings"."""
    if purpose == OWN:
        return {}
    recipe = PURPOSES[purpose]
    steps = min(max(recipe.steps_a_picture * pictures, recipe.fewest), recipe.most)
    return {
        "lora.rank": recipe.rank,
        "optimizer.learning_rate": recipe.learning_rate,
        "schedule.type": "cosine",
        "schedule.warmup_steps": 0.05,
        "run.max_train_steps": steps,
    }


def memory_settings(memory: str, native_size: int) -> dict[str, Any]:
    """Settings that fit a card of `memory`; none for "own settings". `native_size`: the model's picture side in px."""
    settings = dict(_MEMORY.get(memory, {}))
    if native_size <= FULL_SIZE_PX:
        settings.pop("dataset.resolution", None)
    return settings
