"""Starting a new run from an existing LoRA of any key family and any ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch

from ..errors import AdapterError
from .foreign_network import ForeignNetwork
from .interface import Network, known_network
from .lora import LoraModule
from .lora_file import DOWN, UP, LoraFile, load_lora, read_lora_header
from .network import LoraNetwork
from .resize import truncate


@dataclass
class _Counts:
    taken: int = 0
    padded: Counter[int] = field(default_factory=Counter)
    cut: Counter[int] = field(default_factory=Counter)
    worst_loss: float = 0.0


def warm_start(network: Network, path: str | Path) -> str:
    """Give `network` the weights of a LoRA file, so that it starts by computing what the file computes.

    The file's scale (alpha / rank) is kept module by module. A smaller rank is filled up with fresh weights that change
    nothing at first; a larger one is cut to the best approximation. Modules that the file does not have stay fresh;
    modules that only the file has are an error, because their effect would be lost.

    Returns:
        One sentence saying what was taken over.

    Raises:
        AdapterError: the file cannot be read, fits nothing, holds modules that are not trained here, has modules
            without effect (alpha 0) or shapes of another model. The network is unchanged then.
    """
    network = known_network(network)
    if isinstance(network, ForeignNetwork):
        return _into_foreign(network, Path(path))
    file = load_lora(path)
    check_start(network, file)
    counts = _Counts()
    with torch.no_grad():
        for name in file.ranks:
            _take(network.modules[name], file, counts)
    return _sentence(network, file, counts)


def _into_foreign(network: ForeignNetwork, path: Path) -> str:
    read_lora_header(path)
    tensors = safetensors.torch.load_file(path)
    if bad := [key for key, value in tensors.items() if not torch.isfinite(value).all()]:
        raise AdapterError(f"'{path}' holds NaN or infinity in {len(bad)} tensors, such as '{bad[0]}'.")
    wanted = network.export_state_dict()
    known = {key: value for key, value in tensors.items() if key in wanted}
    if not known:
        raise AdapterError(
            f"'{path}' matches nothing: none of its {len(tensors)} tensors is among the {len(wanted)} of "
            f"'{network.name}'. Was it made by another module or algorithm?"
        )
    if extra := sorted(tensors.keys() - wanted.keys()):
        raise AdapterError(
            f"'{path}' holds {len(extra)} of {len(tensors)} tensors that '{network.name}' has no place for, such as "
            f"'{extra[0]}'; their effect would be lost."
        )
    if not network.raw_reads(tensors):
        raise AdapterError(f"'{network.name}' cannot read the files of its own kind back, so it cannot start from one.")
    network.load_export(known)
    return f"Started from '{path}': {len(known)} of {len(wanted)} tensors of '{network.name}' taken over."


def check_start(network: LoraNetwork, file: LoraFile) -> None:
    """Whether the network can start from the file; works on networks without weights (meta device) too.

    Raises:
        AdapterError: as `warm_start`.
    """
    common = [name for name in file.ranks if name in network.modules]
    if not common:
        raise AdapterError(
            f"'{file.path}' matches nothing: none of its {len(file.ranks)} modules is among the "
            f"{len(network.modules)} that are trained. File: {', '.join(sorted(file.ranks)[:2])}; network: "
            f"{', '.join(sorted(network.modules)[:2])}. Train the parts that the file holds ({', '.join(file.parts)})."
        )
    if extra := sorted(file.ranks.keys() - network.modules.keys()):
        raise AdapterError(
            f"'{file.path}' holds {len(extra)} of {len(file.ranks)} modules that are not trained in this run, such as "
            f"'{extra[0]}'; their effect would be lost. Train the parts {', '.join(file.parts)}"
            + (" with conv_rank above 0" if any(_is_conv_name(name) for name in extra) else "")
            + ", or merge the file into the base model first."
        )
    if zero := [name for name, alpha in file.alphas.items() if alpha == 0]:
        raise AdapterError(
            f"'{file.path}' has alpha 0 in {len(zero)} of {len(file.ranks)} modules, such as '{zero[0]}': they have no "
            "effect and could not be trained on (scale 0). Repair the file's alphas first."
        )
    for name in common:
        module = network.modules[name]
        pairs = (
            (file.state[name + DOWN], module.lora_down.weight, 0),
            (file.state[name + UP], module.lora_up.weight, 1),
        )
        for value, own, rank_axis in pairs:
            if _without(value.shape, rank_axis) != _without(own.shape, rank_axis):
                raise AdapterError(
                    f"'{file.path}': '{name}' has a weight of shape {tuple(value.shape)}, here {tuple(own.shape)}. "
                    "The file was made for another model."
                )


def _take(module: LoraModule, file: LoraFile, counts: _Counts) -> None:
    name, rank = module.name, file.ranks[module.name]
    down, up = (file.state[name + key].float() for key in (DOWN, UP))
    if rank > module.rank:
        factors = truncate(down, up, module.rank)
        down, up = factors.down, factors.up
        counts.cut[rank] += 1
        counts.worst_loss = max(counts.worst_loss, factors.lost)
    elif rank < module.rank:
        counts.padded[rank] += 1
    counts.taken += 1
    kept = down.shape[0]
    module.lora_down.weight[:kept] = down.to(module.lora_down.weight.device)
    module.lora_up.weight.zero_()
    module.lora_up.weight[:, :kept] = up.to(module.lora_up.weight.device)
    module.set_alpha(file.scales[name] * module.rank)


def _sentence(network: LoraNetwork, file: LoraFile, counts: _Counts) -> str:
    parts = [
        f"Started from '{file.path}': {counts.taken} of {len(network.modules)} modules taken over with the file's scale"
    ]
    if counts.padded:
        parts.append(f"{counts.padded.total()} were filled up from rank {_ranks(counts.padded)}")
    if counts.cut:
        parts.append(
            f"{counts.cut.total()} were cut from rank {_ranks(counts.cut)} (at worst "
            f"{100 * counts.worst_loss:.2g} % of a module's change was lost)"
        )
    if fresh := len(network.modules) - counts.taken:
        parts.append(f"{fresh} that the file does not have start fresh")
    return ", ".join(parts) + "."


def _ranks(counter: Counter[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(counter))


def _without(shape: torch.Size, axis: int) -> tuple[int, ...]:
    return tuple(side for position, side in enumerate(shape) if position != axis)


def _is_conv_name(name: str) -> bool:
    return any(
        part in name for part in ("_in_layers_", "_out_layers_", "_emb_layers_", "_skip_connection", "_op", "_2_conv")
    )
