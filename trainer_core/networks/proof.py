"""Proof that an exported LoRA file holds what was trained: read back, compared, applied and compared again.

Rules (design, section 5): float32 files are tensor-equal, others equal after the cast; one fixed float32 probe of the
re-applied file is within 1e-5 of the live network's output norm; the file does something, that is, some `lora_up` is
not zero outside text encoder 1's last layer (its output is not used, kohya.md fact 11).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .file_check import check_hash, compare_tensors
from .float_view import computing_in_float32
from .foreign_network import ForeignNetwork
from .foreign_proof import prove_foreign_file
from .from_file import network_from_file
from .kohya_file import cast_for_file
from .lora_file import LoraFile, load_lora
from .naming import part_of_name, text_layer_of_name
from .probe import probe_part, relative_difference
from .proof_result import FILE_DTYPES, ProofResult, check_result
from .targets import part_root

if TYPE_CHECKING:
    from ..models import SDXLModel
    from .lora import LoraModule
    from .network import LoraNetwork


def prove_lora_file(
    path: str | Path, network: LoraNetwork | ForeignNetwork, model: SDXLModel, *, require_effect: bool = True
) -> ProofResult:
    """Read `path` back and prove it against the live `network` on `model`. The network is left as it was.

    Raises:
        AdapterError: the file differs from the network, its output differs, or (with `require_effect`) it changes
            nothing.
    """
    if isinstance(network, ForeignNetwork):
        return prove_foreign_file(path, network, model, require_effect=require_effect)
    file = load_lora(path)
    dtype = FILE_DTYPES[file.dtypes[0]] if len(file.dtypes) == 1 else "mixed"
    expected = cast_for_file(network.state_dict(), dtype) if dtype != "mixed" else {}
    compare_tensors(file.path, file.state, expected)
    check_hash(file.path, file.metadata)
    changed = changed_modules(file, model)
    result = ProofResult(
        path=str(path),
        dtype=dtype,
        modules=len(file.ranks),
        tensors=len(file.state),
        probe_errors=_probe_errors(file, network, model, expected),
        changed_modules=len(changed[0]),
        does_something=bool(changed[1]),
    )
    return check_result(result, require_effect=require_effect)


def changed_modules(file: LoraFile, model: SDXLModel | None = None) -> tuple[list[str], list[str]]:
    """(modules that change their layer, those of them that can have an effect).

    Text encoder 1's last layer has none in SDXL. Without a model its index is the highest one in the file.
    """
    if model is None:
        layers = [text_layer_of_name(name) for name in file.ranks if part_of_name(name) == "te1"]
        last = max((layer for layer in layers if layer is not None), default=-1)
    else:
        last = int(model.text_encoders[0].config.num_hidden_layers) - 1
    changed = [name for name in file.ranks if file.changes(name)]
    return changed, [name for name in changed if part_of_name(name) != "te1" or text_layer_of_name(name) != last]


@torch.no_grad()
def _probe_errors(
    file: LoraFile, network: LoraNetwork, model: SDXLModel, expected: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Relative difference by part between the live network (rounded as the file is) and the re-applied file."""
    reapplied = network_from_file(model, file).eval()
    training, multiplier = network.container.training, network.multiplier
    network.detach()
    try:
        with torch.inference_mode(False), computing_in_float32([part_root(model, part) for part in network.parts]):
            network.eval().set_multiplier(1.0)
            with _rounded(network, expected):
                live = _attached_outputs(network, model)
            again = _attached_outputs(reapplied, model)
    finally:
        network.attach()
        network.train(training).set_multiplier(multiplier)
    return {part: relative_difference(again[part], live[part]) for part in live}


@contextmanager
def _rounded(network: LoraNetwork, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The live weights replaced by `values` inside the block; the very same tensors are put back afterwards."""
    own = {module: _live_tensors(module) for module in network.modules.values()}
    try:
        for name, module in network.modules.items():
            for tensor in own[module]:
                tensor.data = tensor.data.clone()
            module.import_tensors({key: values[f"{name}.{key}"] for key in ("lora_down.weight", "lora_up.weight")})
        yield
    finally:
        for tensors in own.values():
            for tensor, data in tensors.items():
                tensor.data = data


def _live_tensors(module: LoraModule) -> dict[torch.Tensor, torch.Tensor]:
    """Weights of a module (and what it subtracts) with their data, to be put back."""
    tensors = (module.lora_down.weight, module.lora_up.weight, module.subtracted_down, module.subtracted_up)
    return {tensor: tensor.data for tensor in tensors if tensor is not None}


def _attached_outputs(network: LoraNetwork, model: SDXLModel) -> dict[str, torch.Tensor]:
    network.attach()
    try:
        with torch.autocast(model.unet.device.type, enabled=False):
            return {part: probe_part(model, part) for part in network.parts}
    finally:
        network.detach()
