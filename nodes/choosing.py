"""Which run a Train node works on: a new one, the interrupted one of the same settings, or one that was asked for."""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import trainer_core as core
from . import host
from .handles import CheckpointHandle

CONTINUE, NEW = "continue", "new run"

PATIENCE_S = 60.0
"""How long Run waits for another process that still writes the run it would go on with."""

_LOOK_EVERY_S = 2.0

log = logging.getLogger(__name__)

_NOT_TOLD = ("run.output_name", "run.output_dir")


@dataclass(frozen=True)
class ChosenRun:
    """The folder to work on. `note` says in words what was chosen, when it is not simply a new run."""

    folder: core.RunFolder
    note: str = ""


def choose_run(
    config: core.TrainConfig, notes: list[str], extra: dict[str, Any], start: str, resume: CheckpointHandle | None
) -> ChosenRun:
    """`extra`: what is stored beside the config (data digest, workflow).

    Raises:
        ConfigError: a problem of the settings.
        CheckpointError: what the Resume node asks for does not fit the settings; each difference by name.
    """
    if start == NEW:
        note = "The linked checkpoint is not used, because start is 'new run'." if resume is not None else ""
        return ChosenRun(_create(config, [*notes, note] if note else notes, extra), note)
    if resume is not None:
        return _from_checkpoint(config, notes, extra, resume)
    found = _newest_of(config)
    if found is not None and found.state == "running":
        raise core.ResourceError(
            f"Run {found.run_id} of exactly these settings is still being written by another process (perhaps the "
            f"worker of a ComfyUI that was closed a moment ago), and that has not ended within {PATIENCE_S:.0f} s. "
            "Wait until it has saved and press Run again, or set start to 'new run'."
        )
    if found is None or not core.can_go_on(found):
        return ChosenRun(_create(config, notes, extra))
    if found.folder.read_config().get("data_digest") != extra.get("data_digest"):
        note = f"Run {found.run_id} of the same settings is not continued: pictures or captions have changed since."
        return ChosenRun(_create(config, [*notes, note], extra), note)
    newest = core.newest_whole(found.folder.checkpoints)  # a run that died has decided more steps than it saved
    step = found.step if newest is None else newest.step
    note = f"Continued run {found.run_id} from step {step}. Set start to 'new run' to train afresh."
    return ChosenRun(found.folder, note)


def _newest_of(config: core.TrainConfig) -> core.RunInfo | None:
    """The newest run of these settings; one that the worker of a ComfyUI restarted just now still saves is waited for.

    Cancel ends the wait, with ComfyUI's own exception.
    """
    wanted = core.config_hash(core.to_dict(config))
    until = time.monotonic() + PATIENCE_S
    while True:
        found = core.newest_with_hash(host.output_folder(), wanted)
        if found is None or found.state != "running" or time.monotonic() > until:
            return found
        host.raise_if_interrupted()
        log.info("run %s is still being written by another process: waiting for it to save", found.run_id)
        time.sleep(_LOOK_EVERY_S)


def _from_checkpoint(
    config: core.TrainConfig, notes: list[str], extra: dict[str, Any], resume: CheckpointHandle
) -> ChosenRun:
    source = core.RunFolder(resume.run_dir)
    if resume.mode == "warm start":
        lora = core.lora_of_step(source, resume.step)
        config = core.with_settings(config, {"lora.weights": str(lora)})
        note = f"Warm start from {lora.name} of run {source.run_id}: new optimizer, new schedule, step 0."
        return ChosenRun(_create(config, [*notes, note], extra), note)
    bound, free = core.resume_differences(source, resume.checkpoint, config)
    if bound:
        raise core.refusal(f"{resume.checkpoint} of run {source.run_id}", bound)
    changed = "".join(f"\n  changed since: {line}" for line in free if not line.startswith(_NOT_TOLD))
    state = core.describe_run(source).state
    if state == "running":
        raise core.CheckpointError(
            f"Run {source.run_id} is running now. Stop it first, then go on from its checkpoint."
        )
    steps = config.run.max_train_steps
    if steps is not None and resume.step >= steps:
        raise core.CheckpointError(
            f"Nothing is left to train: {resume.checkpoint} of run {source.run_id} is step {resume.step}, and steps is "
            f"{steps}. Set steps higher, or choose an earlier checkpoint."
        )
    if trouble := core.content_problem(source.checkpoints / resume.checkpoint):
        raise core.CheckpointError(
            f"The checkpoint {resume.checkpoint} of run {source.run_id} is damaged: {trouble}. Choose another one; "
            "'latest good checkpoint' passes damaged ones over."
        )
    newest = core.newest_whole(source.checkpoints)
    in_place = newest is not None and newest.name == resume.checkpoint and state != "finished"
    if in_place:
        core.change_run(source.path, lambda _: config, light=True)
        note = f"Exact resume of run {source.run_id} from {resume.checkpoint}.{changed}"
        return ChosenRun(source, note)
    note = f"Exact resume from {resume.checkpoint} of run {source.run_id}, in a new run; the old one stays.{changed}"
    folder = _create(config, [*notes, note], extra)
    shutil.copytree(source.checkpoints / resume.checkpoint, folder.checkpoints / resume.checkpoint)
    return ChosenRun(folder, note)


def _create(config: core.TrainConfig, notes: list[str], extra: dict[str, Any]) -> core.RunFolder:
    return core.create_run(
        config,
        notes,
        lora_dir=host.loras_folder(),
        lora_stem=free_stem(config.run.output_name, host.loras_folder()),
        extra=extra,
        light=True,
    )


def free_stem(stem: str, own: Path) -> str:
    """`stem`, or `stem-2` ..., so that no other LoRA folder of ComfyUI holds a file that would be found first."""
    number = 1
    while True:
        name = stem if number == 1 else f"{stem}-{number}"
        found = host.full_path("loras", f"{name}.safetensors")
        if found is None or found.resolve().parent == own.resolve():
            return name
        number += 1
