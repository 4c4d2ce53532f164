"""Which modules receive an adapter: found by their place in the model, never by class name.

Class names changed under other trainers' feet (kohya.md 6.21: attention classes renamed in transformers, and the text
encoders silently stayed untrained), so a target is a `Linear` or `Conv2d` whose path says what it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from .naming import module_names

if TYPE_CHECKING:
    from ..models import SDXLModel

PART_ORDER = ("te1", "te2", "unet")
"""Order of creation and of keys in a file, as kohya has it."""

PART_LABELS = {"unet": "UNet", "te1": "text encoder 1", "te2": "text encoder 2"}

_TEXT_TARGET = re.compile(r"(?:text_model\.)?encoder\.layers\.\d+\.(?:self_attn\.(?:q|k|v|out)_proj|mlp\.fc[12])$")
_UNET_ATTENTION = re.compile(r"(?:(?:down|up)_blocks\.\d+|mid_block)\.attentions\.\d+\.")
_UNET_CONV = re.compile(
    r"(?:(?:down|up)_blocks\.\d+|mid_block)\."
    r"(?:resnets\.\d+\.(?:conv1|conv2|time_emb_proj|conv_shortcut)|(?:downsamplers|upsamplers)\.\d+\.conv)$"
)


@dataclass(frozen=True)
class Target:
    """A module that receives an adapter."""

    part: str
    path: str
    name: str
    module: nn.Linear | nn.Conv2d

    @property
    def is_wide_conv(self) -> bool:
        """Whether this is a convolution that looks at neighbours (kohya's conv rank), not a 1x1 one."""
        return isinstance(self.module, nn.Conv2d) and self.module.kernel_size != (1, 1)


def part_root(model: SDXLModel, part: str) -> nn.Module:
    """The network behind a part name."""
    if part == "unet":
        return model.unet
    return model.text_encoders[{"te1": 0, "te2": 1}[part]]


def find_targets(root: nn.Module, part: str, *, conv: bool = False) -> list[Target]:
    """Modules of `root` that receive an adapter, in the model's own order.

    UNet: all linear and 1x1 layers inside the transformers; with `conv` also the residual blocks' layers and the
    down- and upsampling convolutions. Text encoders: attention and MLP projections.
    """
    names = module_names(part, root)
    return [
        Target(part, path, names[path], module)
        for path, module in root.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
        and path in names
        and is_default_target(Target(part, path, names[path], module), conv)
    ]


def is_default_target(target: Target, conv: bool) -> bool:
    """Whether kohya's set holds this layer, with or without the convolutions and their companions."""
    if target.part != "unet":
        return _TEXT_TARGET.match(target.path) is not None
    return _UNET_ATTENTION.match(target.path) is not None or (conv and _UNET_CONV.match(target.path) is not None)


def ordered_parts(parts: Sequence[str]) -> list[str]:
    """`parts` in the order in which adapters are made and written."""
    return [part for part in PART_ORDER if part in parts]
