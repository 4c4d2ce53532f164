"""A network made from a LoRA file: its modules, ranks and alphas as the file has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import AdapterError
from .lora import LoraModule, factor_shapes
from .lora_file import DOWN, UP, LoraFile
from .naming import module_names, part_of_name
from .network import LoraNetwork
from .targets import PART_LABELS, PART_ORDER, Target, part_root

if TYPE_CHECKING:
    from ..models import SDXLModel


def network_from_file(model: SDXLModel, file: LoraFile) -> LoraNetwork:
    """The network that `file` describes, on `model`'s layers but not attached; weights are widened to float32.

    Raises:
        AdapterError: modules of the file have no place in the model, or weights do not fit the layer there.
    """
    places = targets_by_name(model)
    if unknown := sorted(name for name in file.ranks if name not in places):
        raise AdapterError(
            f"'{file.path}': {len(unknown)} of {len(file.ranks)} modules have no place in this model, such as "
            f"'{unknown[0]}'. The file was made for another model."
        )
    in_order = sorted(file.ranks, key=lambda name: PART_ORDER.index(places[name].part))
    with torch.inference_mode(False), torch.no_grad():
        modules = [_module_from_file(places[name], file) for name in in_order]
    return LoraNetwork(modules)


def targets_by_name(model: SDXLModel) -> dict[str, Target]:
    """Every layer of `model` that could carry an adapter, by its name in files."""
    return {
        names[path]: Target(part, path, names[path], module)
        for part in PART_ORDER
        for root in (part_root(model, part),)
        for names in (module_names(part, root),)
        for path, module in root.named_modules()
        if path in names and isinstance(module, nn.Linear | nn.Conv2d)
    }


def _module_from_file(target: Target, file: LoraFile) -> LoraModule:
    rank = file.ranks[target.name]
    weights = (file.state[target.name + DOWN], file.state[target.name + UP])
    for weight, shape in zip(weights, factor_shapes(target.module, rank, target.path), strict=True):
        if tuple(weight.shape) != shape:
            raise AdapterError(
                f"'{file.path}': '{target.name}' has a weight of shape {tuple(weight.shape)}; "
                f"{PART_LABELS[part_of_name(target.name) or 'unet']} needs {shape} there. "
                "The file was made for another model."
            )
    module = LoraModule(target, rank, file.alphas[target.name])
    module.lora_down.weight.copy_(weights[0])
    module.lora_up.weight.copy_(weights[1])
    return module
