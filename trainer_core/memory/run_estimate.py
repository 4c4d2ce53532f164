"""The estimate of one run, part by part, kept in its folder as `memory.json` for the report.

Everything but the activations is counted on the loaded model. Activations are estimated for SDXL on a GPU, and counted
for every model in the first forward of the run (the probe's, where there is one).
"""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..networks.layer_kinds import place_of
from ..networks.target_presets import PRESETS
from ..networks.targets import find_targets
from ..runs.platform import DurableIO
from .activations import Held
from .before_loading import asked_of
from .estimate import RANKS, SDXL_SETS, SDXL_UNET, model_need, sdxl_need, set_of

if TYPE_CHECKING:
    from ..config import TrainConfig
    from ..trainer import TrainerParts

FILE_NAME = "memory.json"

log = logging.getLogger(__name__)

_PRESETS = dict(zip(SDXL_SETS, ("attention", "attention_mlp", "full"), strict=True))


def keep_estimate(folder: Path, parts: TrainerParts, config: TrainConfig) -> None:
    """Write the estimate of an assembled run into its folder; the first forward adds the counted activations. A full
    disk costs the report a table, and no run."""
    path = folder / FILE_NAME
    if _write(path, estimate_run(parts, config)) and parts.memory is not None:
        parts.memory.on_counted = partial(_add_counted, path)


def estimate_run(parts: TrainerParts, config: TrainConfig) -> dict[str, Any]:
    """JSON-safe: `parts` (name, bytes), `capacity` of the device in bytes or None, the largest batch, and `ranks`: for
    each target set of the UNet its layers and adapter numbers for each unit of rank, to be shown at the ranks of
    `columns`; `unet` is the count of the UNet's own numbers."""
    model, unet = parts.model, parts.model.unet
    largest = parts.plan.largest_batch()
    width, height = parts.plan.items[largest[0].item_index].bucket
    trained = [parameter for _, parameter in parts.network.named_parameters()]
    cached = config.dataset.cache_text == "true" or parts.loader.texts is not None
    need = model_need(model, trained, 0, text_cached=cached, average=config.optimizer.ema_decay > 0)
    total = sum(p.numel() for p in unet.parameters() if not p.requires_grad)
    rows = [("base model", need.base), ("text encoders", need.text), ("VAE", need.vae)]
    rows.append(("adapter, gradients, optimizer", need.adapter))
    capacity = None
    if parts.device.type == "cuda":
        capacity = torch.cuda.get_device_properties(parts.device).total_memory
        if total == SDXL_UNET:
            asked = asked_of(config, parts.precision.compute, model.native_size)
            whole = sdxl_need(**{**asked, "area": width * height})
            rows += [("activations", whole.activations), ("working space and context", whole.overhead)]
    return {
        "parts": [[name, round(size)] for name, size in rows if size],
        "activations": "estimated" if len(rows) > 4 else "counted in the first forward",
        "capacity": capacity,
        "largest": {"pictures": len(largest), "width": width, "height": height},
        "unet": total,
        "trained": sum(parameter.numel() for parameter in trained),
        "columns": list(RANKS),
        "ranks": [[name, *_set(unet, preset)] for name, preset in _PRESETS.items()],
    }


def _set(unet: torch.nn.Module, name: str) -> tuple[int, int]:
    preset = PRESETS[name]
    targets = find_targets(unet, "unet", conv=preset.conv)
    return set_of(target.module for target in targets if preset.contains(place_of(target)))


def _add_counted(path: Path, held: Held) -> None:
    """Activations that the first forward kept for backward."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read: %s", path, error)
        return
    _write(path, {**facts, "counted": {"tensors": held.tensors, "bytes": held.bytes}})


def _write(path: Path, facts: dict[str, Any]) -> bool:
    try:
        DurableIO().replace_file(path, (json.dumps(facts, indent=1) + "\n").encode("utf-8"))
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error)
        return False
    return True
