"""The proof of files that foreign networks write (see `proof.py` for ours).

The file is tensor-equal to the network (after the cast); a network made anew by the same module, with the network's
weights loaded, computes the same; and the output differs from the base model's.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch

from ..errors import AdapterError
from .file_check import check_hash, compare_tensors
from .foreign_network import ForeignNetwork
from .kohya_file import cast_for_file
from .lora_file import read_lora_header
from .probe import probe_part, relative_difference
from .proof_result import FILE_DTYPES, ProofResult, check_result

if TYPE_CHECKING:
    from ..models import SDXLModel


def prove_foreign_file(
    path: str | Path, network: ForeignNetwork, model: SDXLModel, *, require_effect: bool = True
) -> ProofResult:
    """Read `path` back and prove it against the live network, which is left as it was.

    Raises:
        AdapterError: the file or its output differs, or (with `require_effect`) it changes nothing.
    """
    file = Path(path)
    header = read_lora_header(file)
    found = safetensors.torch.load_file(file)
    weights = {v.dtype for key, v in found.items() if not key.endswith(".alpha") and v.is_floating_point()}
    dtype = FILE_DTYPES.get(str(next(iter(weights))).removeprefix("torch."), "mixed") if len(weights) == 1 else "mixed"
    if dtype == "mixed":
        raise AdapterError(f"'{file}' failed its proof: its weights have the formats {sorted(map(str, weights))}.")
    compare_tensors(file, found, cast_for_file(network.export_state_dict(), dtype))
    check_hash(file, header.metadata)
    errors, effects = _compare_outputs(network, model)
    result = ProofResult(
        path=str(path),
        dtype=dtype,
        modules=len(network.modules),
        tensors=len(found),
        probe_errors=errors,
        changed_modules=len(network.modules) if any(effects.values()) else 0,
        does_something=any(effects.values()),
    )
    return check_result(result, require_effect=require_effect)


@torch.no_grad()
def _compare_outputs(network: ForeignNetwork, model: SDXLModel) -> tuple[dict[str, float], dict[str, bool]]:
    """(difference between the live and a newly made network, whether the output differs from the base) by part."""
    assert network.rebuild is not None, "the network was not made by create_kohya_network"
    training, multiplier, parts = network.container.training, network.multiplier, network.parts
    network.eval().set_multiplier(1.0)
    try:
        with torch.inference_mode(False):
            live = _outputs(model, parts)
            network.detach()
            base = _outputs(model, parts)
            again = network.rebuild()
            try:
                _load_again(again, network)
                again.eval().to(model.device)
                outputs = _outputs(model, parts)
            finally:
                again.detach()
    finally:
        network.attach()
        network.train(training).set_multiplier(multiplier)
    errors = {part: relative_difference(outputs[part], live[part]) for part in parts}
    return errors, {part: not torch.equal(live[part], base[part]) for part in parts}


def _load_again(again: ForeignNetwork, network: ForeignNetwork) -> None:
    """Load what the file holds, in float32, with the module's own loading. Kinds whose files have another form than
    what they hold (DyLoRA) cannot read their own files back; these get the held weights."""
    state = network.export_state_dict()
    if again.raw_reads(state):
        again.load_export(state)
    else:
        again.load_state_dict(network.state_dict())


def _outputs(model: SDXLModel, parts: tuple[str, ...]) -> Mapping[str, torch.Tensor]:
    # Foreign layers compute W + dW themselves, so the weights cannot be widened below them: a half-precision base is
    # probed under autocast, where equal weights give equal bits.
    narrow = model.dtype != torch.float32
    # DyLoRA draws a rank from Python's own random stream in every pass, also outside training.
    stream = random.getstate()
    random.seed(0)
    try:
        with torch.autocast(model.device.type, dtype=model.dtype if narrow else None, enabled=narrow):
            return {part: probe_part(model, part) for part in parts}
    finally:
        random.setstate(stream)
