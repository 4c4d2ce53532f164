"""Proof that an exported LoRA file holds what was trained: read back, compared, applied and compared again.

Rules (design, section 5): float32 files are tensor-equal, others equal after the cast; one fixed float32 probe of the
re-applied file is within 1e-5 of the live network's output norm; the file does something, that is, some `lora_up` is
not zero outside text encoder 1's last layer (its output is not used, kohya.md fact 11).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..draws import Draws
from ..errors import AdapterError
from .float_view import computing_in_float32
from .from_file import network_from_file
from .kohya_file import cast_for_file
from .lora_file import LoraFile, load_lora, read_lora_header
from .naming import part_of_name, text_layer_of_name
from .targets import part_root

if TYPE_CHECKING:
    from ..models import SDXLModel
    from .lora import LoraModule
    from .network import LoraNetwork

PROBE_TOLERANCE = 1e-5
PROBE_CAPTION = "a photo of a red square next to a blue circle"
_PROBE_SEED = 20_260_101
_PROBE_SIDE = 16
_FILE_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class ProofResult:
    """What was proven about a file. `probe_errors` are relative to the norm of the live network's output."""

    path: str
    dtype: str
    modules: int
    tensors: int
    probe_errors: Mapping[str, float]
    changed_modules: int
    does_something: bool

    @property
    def probe_error(self) -> float:
        return max(self.probe_errors.values(), default=0.0)

    @property
    def text(self) -> str:
        """One line for log and report."""
        cast = "equal" if self.dtype == "fp32" else f"equal after the cast to {self.dtype}"
        effect = f"{self.changed_modules} of {self.modules} modules changed"
        return (
            f"Proven '{Path(self.path).name}': {self.tensors} tensors {cast}; output of the re-applied file within "
            f"{self.probe_error:.1e} of the live network; "
            f"{effect if self.does_something else f'it changes nothing ({effect})'}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the run record."""
        return {**asdict(self), "probe_error": self.probe_error, "text": self.text}


def prove_lora_file(
    path: str | Path, network: LoraNetwork, model: SDXLModel, *, require_effect: bool = True
) -> ProofResult:
    """Read `path` back and prove it against the live `network` on `model`. The network is left as it was.

    Raises:
        AdapterError: the file differs from the network, its output differs, or (with `require_effect`) it changes
            nothing.
    """
    file = load_lora(path)
    dtype = _FILE_DTYPES[file.dtypes[0]] if len(file.dtypes) == 1 else "mixed"
    expected = cast_for_file(network.state_dict(), dtype) if dtype != "mixed" else {}
    _compare_tensors(file, expected)
    _check_hash(file)
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
    if not result.probe_error <= PROBE_TOLERANCE:
        raise AdapterError(
            f"'{path}' failed its proof: applied to the model again, it computes something else than the network that "
            f"was trained (relative difference {result.probe_error:.2e}, allowed {PROBE_TOLERANCE:.0e}). "
            "Do not use this file; report this with the log."
        )
    if require_effect and not result.does_something:
        raise AdapterError(
            f"'{path}' changes nothing: every lora_up weight that could have an effect is still zero. "
            "No step was applied, or no gradient reached the adapters. Look for rejected steps in the log, and check "
            "the learning rate."
        )
    return result


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


def _compare_tensors(file: LoraFile, expected: Mapping[str, torch.Tensor]) -> None:
    missing, unknown = sorted(expected.keys() - file.state.keys()), sorted(file.state.keys() - expected.keys())
    different = [key for key in expected.keys() & file.state.keys() if not torch.equal(expected[key], file.state[key])]
    if missing or unknown or different:
        names = (missing or unknown or sorted(different))[0]
        raise AdapterError(
            f"'{file.path}' failed its proof: of {len(expected)} tensors {len(missing)} are missing, "
            f"{len(unknown)} were not in the network and {len(different)} differ, such as '{names}'. "
            "Do not use this file."
        )


def _check_hash(file: LoraFile) -> None:
    claimed = file.metadata.get("sshs_model_hash")
    if claimed is not None and claimed != body_hash(file.path):
        raise AdapterError(
            f"'{file.path}' failed its proof: its content does not match its own sshs_model_hash. Do not use this file."
        )


def body_hash(path: Path) -> str:
    """SHA-256 of a safetensors file's bytes after the header."""
    header = read_lora_header(path)
    start = min((entry.begin for entry in header.entries.values()), default=header.size)
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        stream.seek(start)
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


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
    return {part: _relative_difference(again[part], live[part]) for part in live}


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
            return {part: _probe(model, part) for part in network.parts}
    finally:
        network.detach()


def _probe(model: SDXLModel, part: str) -> torch.Tensor:
    """Output of one part for fixed inputs, as one flat float32 vector."""
    if part != "unet":
        from ..models import encode_captions

        embeds = encode_captions(model, [PROBE_CAPTION])
        width = int(model.text_encoders[0].config.hidden_size)
        if part == "te1":
            return embeds.context_BTD[..., :width].float().flatten()
        return torch.cat([embeds.context_BTD[..., width:].float().flatten(), embeds.pooled_BD.float().flatten()])
    config: Any = model.unet.config
    device = model.unet.device
    draws = Draws(_PROBE_SEED)
    time_width = 6 * config.addition_time_embed_dim
    shapes = {
        "noisy": (1, config.in_channels, _PROBE_SIDE, _PROBE_SIDE),
        "context": (1, 77, config.cross_attention_dim),
        "pooled": (1, config.projection_class_embeddings_input_dim - time_width),
    }
    noisy, context, pooled = (draws.normal(0, name, "proof", shape).to(device) for name, shape in shapes.items())
    side = float(_PROBE_SIDE * 8)
    time_ids = torch.tensor([[side, side, 0.0, 0.0, side, side]], device=device)
    output = model.denoise(noisy, torch.tensor([500], device=device), context, pooled, time_ids)
    return output.float().flatten()


def _relative_difference(value: torch.Tensor, reference: torch.Tensor) -> float:
    norm = float(reference.norm())
    return float((value - reference).norm()) / norm if norm > 0 else float(value.norm())
