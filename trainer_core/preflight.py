"""What can be known about a run without loading it: headers of model, VAE and starting LoRA, cache folder, device.

`config_rules` looks at settings alone; this looks at the machine and at the first bytes of the files, so that a wrong
file, a rule that matches no layer or a missing GPU is refused with the other problems and leaves no run folder behind.
Takes well under a second; a few where rules choose among the layers of a full-size model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from .config import TrainConfig, trained_parts
from .config_rules_training import weight_problems
from .errors import AdapterError, ConfigError, ModelFileError, Problem


def preflight(config: TrainConfig, known_bad: Collection[str] = (), *, light: bool = False) -> list[Problem]:
    """Problems of the files and the machine. Settings in `known_bad` (`section.field`) are not looked at again.

    `light`: without the checks that build a model's layers, for a host (ComfyUI) that must not have diffusers and peft
    in its process. The run itself meets those problems when it starts.
    """
    found: list[Problem] = []
    for keys, check in _CHECKS:
        if not keys & set(known_bad) and not (light and check in _HEAVY):
            found.extend(check(config))
    return found


def _model(config: TrainConfig) -> Iterator[Problem]:
    from .models import check_vae, inspect_model

    wanted = config.model
    try:
        info = inspect_model(wanted.path, config_dir=wanted.config_dir)
    except ModelFileError as error:
        yield Problem("model.path", wanted.path, str(error), "")
        return
    if wanted.prediction_type == "auto":  # a set one is judged by config_rules
        yield from weight_problems(config.objective, info.prediction_type)
    try:
        check_vae(wanted.path, wanted.vae, config_dir=wanted.config_dir)
    except ModelFileError as error:
        yield Problem("model.vae", wanted.vae, str(error), "")


def _starting_lora(config: TrainConfig) -> Iterator[Problem]:
    if not config.lora.weights:
        return
    from .networks.lora_file import read_lora_header

    try:
        read_lora_header(Path(config.lora.weights).expanduser())
    except AdapterError as error:
        yield Problem("lora.weights", config.lora.weights, str(error), "")


def _cache_folder(config: TrainConfig) -> Iterator[Problem]:
    """Write a file where the caches will lie: permissions do not tell of read-only disks and shares."""
    if not config.dataset.cache_dir:
        return  # below the output folder, which is tried before the run folder is made
    path = Path(config.dataset.cache_dir).expanduser().absolute()
    existing = next((p for p in (path, *path.parents) if p.is_dir()), path)
    try:
        with tempfile.TemporaryFile(dir=existing, prefix=".write-test-") as probe:
            probe.write(b"x" * 4096)
            probe.flush()
    except OSError as error:
        why = f"{existing} cannot be written: {error.strerror or error}"
        yield Problem("dataset.cache_dir", config.dataset.cache_dir, why, "Give a folder of your own, or unset it.")


def _network(config: TrainConfig) -> Iterator[Problem]:
    from .networks.offline_check import format_problems, network_problems

    yield from network_problems(config.lora, config.model, trained_parts(config))
    yield from format_problems(config.lora, config.checkpoint.save_format)


def _device(config: TrainConfig) -> Iterator[Problem]:
    from .device import choose_device

    try:
        choose_device(config.run.device)
    except ConfigError as error:
        yield from error.problems


def _compile(config: TrainConfig) -> Iterator[Problem]:
    from .cli_together import launched

    kind = config.hardware.compile
    if kind != "off" and launched() > 1:
        why = f"goes with one process, and the launcher started {launched()}: they compile at different steps"
        yield Problem("hardware.compile", kind, why, "Write off, or train in one process.")


_CHECKS: tuple[tuple[set[str], Callable[[TrainConfig], Iterator[Problem]]], ...] = (
    ({"model.path", "model.vae", "model.config_dir"}, _model),
    ({"lora.weights"}, _starting_lora),
    ({"model.path", "model.config_dir", "lora.targets", "lora.network", "lora.network_args"}, _network),
    ({"dataset.cache_dir"}, _cache_folder),
    ({"run.device"}, _device),
    ({"hardware.compile"}, _compile),
)

_HEAVY = (_network,)
