"""What a run can be taken up from, where a person chooses: checkpoints, LoRA files, and what would differ."""

from __future__ import annotations

import re
from pathlib import Path

from .checkpoints.manifest import Damaged, read_scalars
from .config import TrainConfig
from .errors import CheckpointError, TrainerError
from .resume_rules import setting_differences
from .runs.folder import RunFolder
from .runs.record import open_readonly

_STEP = re.compile(r"-step(\d+)(?:-\d+)?\.safetensors$")


def resume_differences(folder: RunFolder, checkpoint: str, config: TrainConfig) -> tuple[list[str], list[str]]:
    """Settings of `config` that differ from a checkpoint's: (must not differ, may differ), each in words.

    CheckpointError when the checkpoint's state cannot be read.
    """
    try:
        before = read_scalars(folder.checkpoints / checkpoint)["config"]
    except Damaged as error:
        raise CheckpointError(f"The checkpoint {checkpoint} of run {folder.run_id} cannot be read: {error}.") from error
    return setting_differences(before, config)


def lora_files(folder: RunFolder) -> dict[int, Path]:
    """LoRA files of a run by step, in order of steps; the final one under the last step."""
    found: dict[int, Path] = {}
    for path in sorted(folder.loras.glob("*.safetensors")):
        if match := _STEP.search(path.name):
            found[int(match[1])] = path
    try:
        with open_readonly(folder.database_path) as record:
            saved = [event for event in record.events("LoraSaved") if event["data"].get("final")]
    except TrainerError:
        saved = []
    for event in saved:
        final = folder.path / str(event["data"]["file"])  # an absolute path replaces the folder
        if final.is_file():
            found[int(event["step"])] = final
    return dict(sorted(found.items()))


def lora_of_step(folder: RunFolder, step: int) -> Path:
    """The LoRA file of `step`. CheckpointError names the steps that have one."""
    files = lora_files(folder)
    if step in files:
        return files[step]
    known = ", ".join(str(number) for number in files) or "none"
    raise CheckpointError(
        f"Run {folder.run_id} has no LoRA file of step {step}, which a warm start begins with. Steps with a file: "
        f"{known}. Choose one of them, or an exact resume."
    )
