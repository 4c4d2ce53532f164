"""A file of every kind of network on a handful of real SDXL's layers, for the loaders that judge them.

Names and shapes are SDXL's. Only these layers have weights (random), all others are on the meta device, so that a kind
costs little. Every file comes with the layers' outputs under the live network. Imported as `judge_cases`, see
conftest.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import safetensors.torch
import torch
from torch import nn

import trainer_core
from trainer_core.config import LoraConfig
from trainer_core.draws import Draws
from trainer_core.networks import create_network, save_lora
from trainer_core.networks.network import LoraNetwork
from trainer_core.networks.selection import all_places

PARTS = ("unet", "te1", "te2")
CONFIGS = Path(trainer_core.__file__).parent / "assets" / "sdxl"
PAGE = Path(__file__).parents[3] / "docs" / "networks.md"
SAME = 1e-4
"""Outputs of two programs for the same file differ by less than this, relative to their norm, in float32."""

_BLOCK = "lora_unet_input_blocks_4_1"
LINEAR = (
    f"{_BLOCK}_proj_in",
    f"{_BLOCK}_transformer_blocks_0_attn1_to_q",  # as many inputs as outputs
    f"{_BLOCK}_transformer_blocks_0_attn2_to_k",  # 2048 -> 640
    "lora_te1_text_model_encoder_layers_0_self_attn_q_proj",
    "lora_te2_text_model_encoder_layers_0_self_attn_q_proj",
)
CONV = ("lora_unet_input_blocks_4_0_in_layers_2", "lora_unet_input_blocks_4_0_skip_connection")  # 3x3 and 1x1
LAYERS = (*LINEAR, *CONV)

# The same layers as LyCORIS' presets name them: by module path, matched from its beginning.
_PRESET = r"""
enable_conv = true
unet_target_module = []
unet_target_name = [
  "input_blocks\\.4\\.1\\.proj_in$", "input_blocks\\.4\\.1\\.transformer_blocks\\.0\\.attn1\\.to_q$",
  "input_blocks\\.4\\.1\\.transformer_blocks\\.0\\.attn2\\.to_k$", "input_blocks\\.4\\.0\\.in_layers\\.2$",
  "input_blocks\\.4\\.0\\.skip_connection$",
]
text_encoder_target_module = []
text_encoder_target_name = ["text_model\\.encoder\\.layers\\.0\\.self_attn\\.q_proj$"]
"""


def _only(names: tuple[str, ...], *more: str) -> dict[str, Any]:
    return {"targets": ("* rank=0", f"path:{','.join(names)} rank=4 alpha=2", *more)}


def _lycoris(algo: str, *more: str) -> dict[str, Any]:
    return {"network": "lycoris.kohya", "alpha": 2.0, "network_args": (f"algo={algo}", *more)}


KINDS: dict[str, dict[str, Any]] = {
    "native LoRA, linear": _only(LINEAR),
    "native LoRA, with convolutions": _only(LAYERS),
    "native, ranks by block": _only(LAYERS, f"path:{LINEAR[3]} rank=2", f"path:{LINEAR[2]},{CONV[0]} rank=3 alpha=1"),
    "native, PiSSA": {"init": "pissa", **_only(LAYERS)},
    "native, rsLoRA": {"rs_lora": True, **_only(LAYERS)},
    **{f"peft:{kind}": {"network": f"peft:{kind}", **_only(LAYERS)} for kind in ("lora", "rslora", "dora", "loha")},
    "peft:lokr": {"network": "peft:lokr", **_only(LAYERS)},
    "peft:oft": {"network": "peft:oft", **_only((*LINEAR, CONV[1]))},  # refused on wide convolutions
    "lycoris.kohya: locon": _lycoris("locon"),
    "lycoris.kohya: DoRA": _lycoris("locon", "dora_wd=True"),
    "lycoris.kohya: loha": _lycoris("loha"),
    "lycoris.kohya: lokr": _lycoris("lokr", "factor=4"),
    "lycoris.kohya: dylora": _lycoris("dylora", "block_size=2"),
    "lycoris.kohya: GLoRA": _lycoris("glora"),
    "lycoris.kohya: full": _lycoris("full"),
    "lycoris.kohya: diag-oft": _lycoris("diag-oft"),
    # Butterflies need a block of at least 10 for the 1280 outputs of text encoder 2.
    "lycoris.kohya: boft": {"rank": 10, **_lycoris("boft")},
    "lycoris.kohya: (IA)^3": _lycoris("ia3"),
}


@dataclass(frozen=True)
class KindFile:
    """A written file, its number of modules, and the outputs of the layers (by file name) under the live network."""

    kind: str
    path: Path
    modules: int
    outputs: dict[str, torch.Tensor]


def make_real_sdxl() -> Any:
    """Real SDXL without weights, but for the layers of `LAYERS` (also in `layers`, by their names in files)."""
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    with torch.device("meta"):
        sdxl = SimpleNamespace(
            unet=UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(CONFIGS / "unet")),
            text_encoders=(
                CLIPTextModel(CLIPTextConfig.from_pretrained(CONFIGS / "text_encoder")),
                CLIPTextModelWithProjection(CLIPTextConfig.from_pretrained(CONFIGS / "text_encoder_2")),
            ),
            vae=None,
        )
    draws = Draws(23)
    sdxl.layers = _layers_of(sdxl)
    for name, layer in sdxl.layers.items():
        layer.to_empty(device="cpu")
        for key, parameter in layer.named_parameters():
            parameter.data.copy_(0.03 * draws.normal(0, name, key, parameter.shape))
    return sdxl


def _layers_of(sdxl: Any) -> dict[str, nn.Module]:
    """The layers of `LAYERS` by their names in files."""
    roots = zip(PARTS, (sdxl.unet, *sdxl.text_encoders), strict=True)
    found = {place.target.name: place.target.module for part, root in roots for place in all_places(root, part)}
    return {name: found[name] for name in LAYERS}


def inputs() -> dict[str, torch.Tensor]:
    """A small input for each layer: (5, features) or (1, channels, 6, 6)."""
    draws, sizes = Draws(29), (640, 640, 2048, 768, 1280, 320, 320)
    shapes = [(5, size) for size in sizes[:5]] + [(1, size, 6, 6) for size in sizes[5:]]
    return {name: draws.normal(0, name, "x", shape) for name, shape in zip(LAYERS, shapes, strict=True)}


@torch.no_grad()
def outputs_of(sdxl: Any, names: tuple[str, ...] = LAYERS) -> dict[str, torch.Tensor]:
    # LyCORIS' DyLoRA draws its rank in every pass; a file holds the full rank.
    layers, given = sdxl.layers, inputs()
    with mock.patch.object(random, "randint", lambda low, high: high):
        return {name: layers[name](given[name]).clone() for name in names}


def differences(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Relative difference of each layer's output."""
    return {name: float((found[name] - value).norm() / value.norm()) for name, value in wanted.items()}


def write_probe(sdxl: Any, path: Path) -> Path:
    """Weights, biases and inputs of the layers, for a judge that runs in another process."""
    tensors = {f"{name}.x": x for name, x in inputs().items()}
    for name, layer in sdxl.layers.items():
        tensors |= {f"{name}.{key}": value.detach().clone() for key, value in layer.named_parameters()}
    safetensors.torch.save_file(tensors, path)
    return path


def write_kind(sdxl: Any, kind: str, folder: Path) -> KindFile:
    """Make the network of this kind, give it random weights, and write the file that an export would."""
    settings = dict(KINDS[kind])
    if settings.get("network") == "lycoris.kohya":
        (folder / "preset.toml").write_text(_PRESET, encoding="utf-8")
        settings["network_args"] += (f"preset={folder / 'preset.toml'}",)
    network = create_network(sdxl, LoraConfig(**{"rank": 4, **settings}), trained_parts=PARTS, seed=0)
    network.eval()
    draws = Draws(31)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.add_(0.03 * draws.normal(0, name, kind, parameter.shape))
    names = tuple(name for name in LAYERS if name in network.modules)
    outputs = outputs_of(sdxl, names)
    state = network.state_dict() if isinstance(network, LoraNetwork) else network.export_state_dict()
    network.detach()
    path = folder / f"{list(KINDS).index(kind)}.safetensors"
    save_lora(path, state, {}, "fp32")
    return KindFile(kind, path, len(network.modules), outputs)


def verdict(unread: Iterable[str], found: Mapping[str, torch.Tensor], file: KindFile) -> str:
    """The table's word for what a judge found: keys that it did not read, and the layers' outputs with the rest."""
    if left := sorted({key.partition(".")[2] for key in unread}):
        return f"no ({', '.join(left)} left over)"
    same = max(differences(found, file.outputs).values()) <= SAME
    return "yes" if same else "keys yes, output differs"


def table(text: str) -> dict[str, dict[str, str]]:
    """The table of kinds and judges in docs/networks.md: kind -> judge -> cell."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head = next(i for i, line in enumerate(lines) if line.startswith("| kind "))
    judges = [cell.strip() for cell in lines[head].strip("|").split("|")][1:]
    rows: dict[str, dict[str, str]] = {}
    for line in lines[head + 2 :]:
        kind, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[kind] = dict(zip(judges, cells, strict=True))
    return rows


def read_table() -> dict[str, dict[str, str]]:
    return table(PAGE.read_text(encoding="utf-8"))
