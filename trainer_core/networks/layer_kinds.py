"""What a layer is for and where it sits: the words that target rules use."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .naming import block_of_name
from .targets import Target

KINDS = ("attention", "self", "cross", "q", "k", "v", "out", "ff", "proj", "conv", "time")
"""Kinds of layers: attention (all of it), self- or cross-attention, its four projections, feed-forward, a transformer's
own in and out projection, convolutions of the residual blocks and samplers, and time or size embedding layers."""

BLOCK_COUNT = 23
"""Blocks of kohya's per-block lists (kohya.md 1.3)."""

_ATTENTION = re.compile(r"\.(attn1|attn2|self_attn)\.(?:to_)?(q|k|v|out)(?:_proj|\.0)?$")
_TIME = re.compile(r"(?:time_emb_proj|(?:time|add)_embedding\.linear_[12])$")
_SGM_NAME = re.compile(r"lora_unet_(input_blocks|middle_block|output_blocks)_(\d+)_")


@dataclass(frozen=True)
class Place:
    """A layer that could carry an adapter, with its block ("IN04", "MID", "layer 11", "base") and kinds."""

    target: Target
    block: str
    kinds: frozenset[str]

    @property
    def block_index(self) -> int | None:
        return block_index(self.target.name)


def place_of(target: Target) -> Place:
    """Block and kinds of a layer, from its path."""
    return Place(target, block_of_name(target.name), kinds_of_path(target.path))


def kinds_of_path(path: str) -> frozenset[str]:
    """Kinds of the layer at a module path of diffusers' UNet or of a text encoder."""
    if match := _ATTENTION.search(path):
        return frozenset({"attention", "cross" if match[1] == "attn2" else "self", match[2]})
    if ".ff." in path or ".mlp." in path:
        return frozenset({"ff"})
    if _TIME.search(path):
        return frozenset({"time"})
    if path.endswith((".proj_in", ".proj_out")):
        return frozenset({"proj"})
    if "conv" in path.rpartition(".")[2]:
        return frozenset({"conv"})
    return frozenset()


def block_index(name: str) -> int | None:
    """Kohya's block index 0 to 22 of a UNet module's name: 0 embeddings, 1 + n input, 10 + n middle, 13 + n output
    blocks, 22 the output layers; None for text encoders."""
    if not name.startswith("lora_unet_"):
        return None
    if match := _SGM_NAME.match(name):
        number = int(match[2])
        return {"input_blocks": 1, "middle_block": 10, "output_blocks": 13}[match[1]] + number
    return BLOCK_COUNT - 1 if name.startswith("lora_unet_out_") else 0
