"""Resume From Checkpoint: names a place to go on from. Reads manifests only; Train compares the settings."""

from __future__ import annotations

from typing import Any

from .. import trainer_core as core
from .boundary import contained
from .handles import CHECKPOINT, CheckpointHandle
from .run_lists import LATEST, Entry, checkpoint_entries, find_entry, latest_good
from .widgets import Declaration, choice

EXACT, WARM = "exact", "warm start"
_MOST_SETTINGS = 40


class SafeScalerResume:
    CATEGORY = "Safe-Scaler"
    DESCRIPTION = (
        "Goes on from a checkpoint of an earlier run: exactly (bit by bit as if it had never stopped), or as a warm "
        "start that begins a new run with that step's LoRA."
    )
    FUNCTION = "execute"
    RETURN_TYPES = (CHECKPOINT, "STRING")
    RETURN_NAMES = ("checkpoint", "description")
    OUTPUT_TOOLTIPS = (
        "The checkpoint, for the resume input of Train.",
        "The run behind it: its state and the settings it was trained with.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Declaration]]:
        lines = [entry.line for entry in checkpoint_entries()]
        return {
            "required": {
                "checkpoint": choice(
                    [LATEST, *lines],
                    "Run, step, state of checkpoint and run, name. 'latest' takes the one that was written last.",
                ),
                "mode": choice(
                    [EXACT, WARM],
                    "exact = optimizer, schedule and data order go on; Train's settings must agree. "
                    "warm start = a new run that begins with the LoRA.",
                ),
            }
        }

    @classmethod
    def VALIDATE_INPUTS(cls, checkpoint: str | None = None) -> bool | str:
        return True  # a list that was read before the last run ended is not refused; execute says what is gone

    @classmethod
    def IS_CHANGED(cls, checkpoint: str = LATEST, **_: Any) -> str:
        if checkpoint != LATEST:
            return checkpoint
        found = latest_good()
        return "" if found is None else f"{found.run.run_id} {found.checkpoint}"

    @contained
    def execute(self, checkpoint: str, mode: str) -> dict[str, Any]:
        entry = find_entry(checkpoint)
        if entry.problem:
            raise core.CheckpointError(
                f"The checkpoint {entry.checkpoint} of run {entry.run.run_id} is damaged: {entry.problem}. "
                "Choose another one; 'latest good checkpoint' passes damaged ones over."
            )
        text = describe(entry)
        handle = CheckpointHandle(entry.run.folder.path, entry.checkpoint, entry.step, mode)
        return {"ui": {"text": [text]}, "result": (handle, text)}


def describe(entry: Entry) -> str:
    """The run and the settings that are not the defaults."""
    data = core.from_dict(entry.run.folder.read_config()["config"])
    default = core.to_dict(core.TrainConfig())
    changed = [
        f"  {section}.{name} = {value}"
        for section, fields in core.to_dict(data).items()
        if isinstance(fields, dict)
        for name, value in fields.items()
        if value != default[section][name]
    ]
    total = f" of {entry.run.total_steps}" if entry.run.total_steps else ""
    head = f"Run {entry.run.run_id} ({entry.run.state}), step {entry.step}{total}. Settings:"
    return "\n".join([head, *changed[:_MOST_SETTINGS]])
