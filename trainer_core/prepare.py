"""Making a run folder and changing its settings: everything before a worker starts. Loads no model and no diffusers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .checkpoints.manifest import newest_scalars
from .config import TrainConfig
from .config_io import from_dict, to_dict
from .config_rules import problems
from .errors import ConfigError
from .preflight import preflight
from .resume_rules import refusal, setting_differences
from .runs.folder import RunFolder, check_writable, free_name, new_run_id, release_name
from .runs.registry import config_hash


def create_run(
    config: TrainConfig,
    notes: list[str] | None = None,
    *,
    lora_dir: Path | None = None,
    lora_stem: str | None = None,
    extra: Mapping[str, Any] | None = None,
    light: bool = False,
) -> RunFolder:
    """Check the config, make the run folder and write the frozen config into it. No model is loaded.

    An unset seed is drawn here, once, and stored. `lora_dir`, `lora_stem`: folder and name of the final LoRA; unset =
    the output folder and `run.output_name`.
    `extra`: what a host keeps with the run, beside the config (it is no part of the config's hash). `light`: see
    `preflight`.

    Raises:
        ConfigError: with all problems of the config.
        ResourceError: the output folder cannot be written.
    """
    asked = config
    config = checked(asked, light=light)
    if config.run.drill:
        from .planted_fault import drill_settings

        config, told = drill_settings(config)
        notes = [*(notes or []), *told]
    config, told = _with_profile(config)
    notes = [*(notes or []), *told]
    output_dir = Path(config.run.output_dir).expanduser()
    check_writable(output_dir)
    run_id = new_run_id(datetime.now(timezone.utc))
    folder = RunFolder.create(output_dir, run_id)
    plain = to_dict(config)
    stem = lora_stem or config.run.output_name
    final = free_name(
        lora_dir or output_dir, stem, ".safetensors", owner=folder.path, form=config.checkpoint.save_format
    )
    folder.write_config(
        {
            **(extra or {}),
            "run_id": folder.run_id,
            "config": plain,
            "config_hash": config_hash(to_dict(asked)),  # without the drawn seed: the same request finds this run
            "final_lora": str(final.resolve()),
            "home": str(folder.path.resolve()),  # a run that finds itself elsewhere was moved or copied
            "lora_stem": stem,
            "notes": notes,
            "created": time.time(),
            "started_in": str(Path.cwd()),  # where relative paths of the settings begin
        }
    )
    return folder


def checked(config: TrainConfig, *, light: bool = False) -> TrainConfig:
    """`config` with a seed, when every rule holds here: the settings' own, and those of files and machine."""
    found = problems(config)
    if found := [*found, *preflight(config, {problem.field for problem in found}, light=light)]:
        raise ConfigError(found)
    if config.run.seed is None:
        config = replace(config, run=replace(config.run, seed=secrets.randbelow(2**32)))
    return config


def _with_profile(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """What `hardware.profile` chooses filled in, and what to tell about it."""
    if config.hardware.profile == "off":
        return config, []
    from .hardware.profiles import apply_profile

    config, told = apply_profile(config)
    if found := problems(config):
        raise ConfigError(found)
    return config, told


def change_run(run_dir: str | Path, changes: Callable[[TrainConfig], TrainConfig], *, light: bool = False) -> None:
    """Write changed settings into a run, for its next start. A changed output name or folder is the result's too.

    Raises:
        ConfigError: the changed settings break a rule.
        CheckpointError: they differ from the newest checkpoint's where an exact resume must not.
        ResourceError: another process trains the run. In each case the run is as it was.
    """
    folder = RunFolder(Path(run_dir))
    before = from_dict(folder.read_run()["config"])
    asked = changes(before)
    config, told = _with_profile(checked(asked, light=light))
    newest = newest_scalars(folder.checkpoints)
    if newest is not None and (bound := setting_differences(newest[1]["config"], config)[0]):
        raise refusal(newest[0], bound)
    with folder.lock():  # a process that trains the run now does so with the settings of its start
        stored = folder.read_run()
        stored["notes"] = [*stored.get("notes", []), *(line for line in told if line not in stored.get("notes", []))]
        stored["config"] = to_dict(config)
        if asked != before:  # the old request would be given another result than it asks for
            stored["config_hash"] = config_hash(to_dict(asked))
        folder.write_config(stored | _other_name(folder, stored, before, config))


def _other_name(
    folder: RunFolder, stored: Mapping[str, Any], before: TrainConfig, config: TrainConfig
) -> dict[str, Any]:
    """Name and place of the result, reserved, where another one is asked for now."""
    old = Path(stored["final_lora"])
    stem, place = stored.get("lora_stem") or before.run.output_name, old.parent
    name = stem if config.run.output_name == before.run.output_name else config.run.output_name
    if config.run.output_dir != before.run.output_dir:
        # A host such as ComfyUI has a folder of its own for results, which is not run.output_dir.
        began = Path(stored.get("started_in", "."))
        if (began / Path(before.run.output_dir).expanduser()).resolve() == old.parent:
            place = Path(config.run.output_dir).expanduser()
    if (name, place) == (stem, old.parent):
        return {}
    check_writable(place)
    new = free_name(place, name, old.suffix, owner=folder.path, form=config.checkpoint.save_format)
    release_name(old)
    return {"final_lora": str(new.resolve()), "lora_stem": name}
