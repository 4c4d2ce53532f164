"""Module groups: part x block x kind, so that a few dozen lines tell where in the network something happens.

UNet: down0 down1 down2 mid up0 up1 up2 (levels of SDXL's UNet) x self, cross, ff, proj, conv; each text encoder is one
group. Roles: A (`lora_down`), B (`lora_up`), W (anything else that is trained, such as the factors of LoKr).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

_LEVEL = re.compile(r"_(input|output)_blocks_(\d+)_")
_TEXT_LAYER = re.compile(r"_layers_(\d+)_")
_KINDS = (("_attn1_", "self"), ("_attn2_", "cross"), ("_ff_", "ff"), ("_proj_in", "proj"), ("_proj_out", "proj"))
_WORDS = {
    "self": "self-attention",
    "cross": "cross-attention",
    "ff": "feed-forward",
    "proj": "projections",
    "conv": "convolutions",
}
_BLOCK_WORDS = {"down": "down block {}", "up": "up block {}", "mid": "the middle block"}

ROLES = ("A", "B", "W")


@dataclass(frozen=True)
class Tensor:
    """One trained tensor: its parameter name, module, part ("unet", "te1", "te2"), group and role."""

    name: str
    module: str
    part: str
    group: str
    role: str


def describe(name: str, part: str) -> Tensor:
    """The place of parameter `name` of `part`."""
    module = name.partition(".")[0]
    return Tensor(name, module, part, part if part != "unet" else f"{_block(module)}.{_kind(module)}", role_of(name))


def describe_all(parameters: Mapping[str, Sequence[str]]) -> tuple[Tensor, ...]:
    """Places of all parameter names, by part."""
    return tuple(describe(name, part) for part, names in parameters.items() for name in names)


def role_of(name: str) -> str:
    """A, B or W."""
    if ".lora_down" in name or ".lora_A" in name:
        return "A"
    return "B" if ".lora_up" in name or ".lora_B" in name else "W"


def group_words(group: str) -> str:
    """A group for a sentence: "cross-attention of down block 1"."""
    if group in ("te1", "te2"):
        return f"text encoder {group[-1]}"
    block, _, kind = group.partition(".")
    number = block.lstrip("abcdefghijklmnopqrstuvwxyz")
    template = _BLOCK_WORDS.get(block.rstrip("0123456789"), block)
    return f"{_WORDS.get(kind, kind)} of {template.format(number)}"


def allowed_dead(tensors: Sequence[Tensor], *, layers: Mapping[str, int], pooled_cached: bool) -> frozenset[str]:
    """Names of tensors that get no gradient by design.

    SDXL reads both text encoders before their last layer, so text encoder 1's last layer never learns. Text encoder 2's
    does, through the pooled vector, unless that is taken from a cache. `layers`: number of layers by part.
    """
    parts = {"te1"} | ({"te2"} if pooled_cached else set())
    return frozenset(
        tensor.name
        for tensor in tensors
        if tensor.part in parts and text_layer(tensor.module) == layers.get(tensor.part, 0) - 1
    )


def half_cut(name: str, missing: Collection[str], tensors: Mapping[str, Tensor]) -> bool:
    """Whether `name` is a lora_down without a gradient whose lora_up has one: the cut is between the two."""
    if tensors[name].role != "A":
        return False
    partner = partner_of(name)
    return partner in tensors and partner not in missing


def partner_of(name: str) -> str:
    """The other factor of the same adapter."""
    if ".lora_down" in name:
        return name.replace(".lora_down", ".lora_up")
    return name.replace(".lora_up", ".lora_down")


def text_layer(module: str) -> int | None:
    """Number of the text encoder's layer that a module is in; None for the UNet."""
    match = _TEXT_LAYER.search(module)
    return int(match[1]) if match else None


def _block(module: str) -> str:
    match = _LEVEL.search(module)
    if match is not None:
        return f"{'down' if match[1] == 'input' else 'up'}{int(match[2]) // 3}"
    return "mid" if "_middle_block" in module else "base"


def _kind(module: str) -> str:
    return next((kind for mark, kind in _KINDS if mark in module), "conv")
