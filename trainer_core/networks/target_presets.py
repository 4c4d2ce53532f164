"""Named sets of layers to train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .layer_kinds import Place


@dataclass(frozen=True)
class Preset:
    """A set of layers. `parts` are the parts it can hold; `conv` says that convolutions belong to it even when the
    conv rank is not set (they then get the UNet's rank)."""

    help: str
    contains: Callable[[Place], bool]
    conv: bool = False


def _in_blocks(*blocks: str) -> Callable[[Place], bool]:
    return lambda place: place.target.part != "unet" or (place.block in blocks and _transformer(place))


def _transformer(place: Place) -> bool:
    return bool(place.kinds & {"attention", "ff", "proj"})


def _everything(place: Place) -> bool:
    return place.block != "base"


PRESETS: Mapping[str, Preset] = {
    "default": Preset("kohya's set: all transformer layers; convolutions when conv_rank is set", _everything),
    "full": Preset("all transformer layers and all convolutions of the blocks", _everything, conv=True),
    "attention": Preset("attention projections only", lambda place: "attention" in place.kinds),
    "attention_mlp": Preset("attention, feed-forward and the transformers' own projections", _transformer),
    # Frenkel et al. 2024 (B-LoRA, arXiv:2403.14572): the first two transformers of the first up block carry content
    # and style. Wang et al. 2024 (InstantStyle, arXiv:2404.02733) find layout in the last one of the last down block.
    "style_blocks": Preset("the block that carries style (OUT01)", _in_blocks("OUT01")),
    "subject_blocks": Preset("the blocks that carry content and layout (IN08, OUT00)", _in_blocks("IN08", "OUT00")),
    "b_lora": Preset("B-LoRA: content and style apart (OUT00, OUT01)", _in_blocks("OUT00", "OUT01")),
    "text_encoders": Preset("text encoders only", lambda place: place.target.part != "unet"),
}
