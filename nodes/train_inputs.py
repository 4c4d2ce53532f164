"""The widgets of the Train node. Their order is part of saved workflows: new ones go to the end."""

from __future__ import annotations

from .. import trainer_core as core
from . import host
from .choosing import CONTINUE, NEW
from .composing import BY_PURPOSE, NO_PREVIEWS
from .widgets import Declaration, choice, setting, text

OWN = "own settings"


def required_inputs() -> dict[str, Declaration]:
    """What everybody looks at."""
    purposes = "; ".join(f"{name}: {purpose.words}" for name, purpose in core.PURPOSES.items())
    return {
        "purpose": choice(
            [*core.PURPOSES, OWN],
            f"Fills in steps, rank and learning rate where they are 0, from the number of pictures. {purposes}.",
        ),
        "vram": choice(
            [*core.MEMORY_SIZES, OWN],
            "Memory of the graphics card: decides batch size and recomputation where you have not.",
            default="12 GB",
        ),
        "output_name": text("my_lora", "Name of the LoRA file. A taken name becomes -2, -3; nothing is overwritten."),
        "steps": setting("run.max_train_steps", 0, low=0, tooltip="Training steps; 0 = by purpose."),
        "learning_rate": setting("optimizer.learning_rate", 0.0, tooltip="Main learning rate; 0 = by purpose."),
        "train_seed": setting("run.seed", 0, tooltip="Seed of every draw: the same seed gives the same LoRA."),
        "preview_prompts": text(
            "",
            "Prompts sampled during training, one a line, with flags such as --w 1024 --d 7. "
            f"Empty = the first captions of the data set; {NO_PREVIEWS} = no previews.",
            lines=True,
        ),
        "preview_every": setting("preview.every_steps", 200),
        "save_every": setting("checkpoint.every_steps", 250),
    }


def optional_inputs() -> dict[str, Declaration]:
    """The advanced group; everything has a default that fits."""
    return {
        "start": choice(
            [CONTINUE, NEW],
            "continue = go on with the stopped or interrupted run of the same settings, if there is one; "
            "new run = train afresh.",
        ),
        "device": choice(["auto", *host.devices()], "Which device trains; auto = the first GPU.", advanced=True),
        "batch_size": setting("dataset.batch_size", 0, low=0, tooltip="Pictures in one micro-batch; 0 = by memory."),
        "accumulation": setting("gradient.accumulation"),
        "optimizer": setting("optimizer.type"),
        "schedule": choice(
            [BY_PURPOSE, *core.FIELDS["schedule.type"].choices], "Learning-rate schedule.", advanced=True
        ),
        "min_snr_gamma": setting("objective.min_snr_gamma", 0.0, tooltip="Min-SNR weighting; 5 is usual, 0 = off."),
        "noise_offset": setting("objective.noise_offset"),
        "ema_decay": setting("optimizer.ema_decay"),
        "validate_every": setting("validation.every_steps", 100),
        "preview_steps": setting("preview.steps"),
        "lora_every": setting("checkpoint.lora_every_steps"),
        "lora_precision": setting("checkpoint.save_precision"),
        "metadata": choice(
            ["full", "minimal"],
            "What is written into the LoRA file; minimal = no captions, no folder names.",
            advanced=True,
        ),
        "more_settings": text(
            "",
            "Any other setting, one a line: section.field = value (docs/configuration.md). These win over all others.",
            lines=True,
            advanced=True,
        ),
    }
