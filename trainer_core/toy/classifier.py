"""The small classifier that says which shape and which colour a picture shows. It scores what a toy has learnt.

It was trained by `tools/make_toy_sdxl.py` on drawn pictures of all shapes and colours, so it knows the shape and the
colour that the toy's UNet never saw. A class "nothing" catches empty grounds, noise and formless blobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from . import TOY_FOLDER
from .shapes import COLOURS, SHAPES

NOTHING = "nothing"
SHAPE_CLASSES: tuple[str, ...] = (*SHAPES, NOTHING)
COLOUR_CLASSES: tuple[str, ...] = tuple(COLOURS)
WEIGHTS = Path("classifier") / "model.safetensors"


class Classifier(nn.Module):
    """Four strided convolutions, then one linear head for the shape and one for the colour."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 48, 64)
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(zip(widths, widths[1:], strict=False)):
            stride = 2 if i < 3 else 1
            layers += [nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(8, after), nn.SiLU()]
        self.body = nn.Sequential(*layers)
        self.shape_head = nn.Linear(64 * 16, len(SHAPE_CLASSES))
        self.colour_head = nn.Linear(64 * 16, len(COLOUR_CLASSES))

    def forward(self, images_B3HW: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, 8) of the shape and (B, 9) of the colour for images in [0, 1]; any size, 64x64 is native."""
        square_B3HW = to_square(images_B3HW.float())
        features_BCHW = functional.adaptive_avg_pool2d(self.body(square_B3HW * 2 - 1), 4)
        features_BD = features_BCHW.flatten(1)
        return self.shape_head(features_BD), self.colour_head(features_BD)


def to_square(images_B3HW: Tensor) -> Tensor:
    """64x64 with the shapes undistorted: the border is repeated to a square, then resized."""
    height, width = images_B3HW.shape[-2:]
    side = max(height, width)
    if height != width:
        dy, dx = side - height, side - width
        pad = (dx // 2, dx - dx // 2, dy // 2, dy - dy // 2)
        images_B3HW = functional.pad(images_B3HW, pad, mode="replicate")
    if side != 64:
        images_B3HW = functional.interpolate(images_B3HW, size=(64, 64), mode="area" if side > 64 else "bilinear")
    return images_B3HW


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the classifier sees in one picture."""

    shape: str
    colour: str
    shape_probability: float
    colour_probability: float


def load_classifier(folder: Path | None = None) -> Classifier:
    """The shipped classifier (fp32, eval). Raises FileNotFoundError where the folder holds none."""
    path = (folder or TOY_FOLDER) / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: it belongs to the packaged toy; reinstall the package")
    model = Classifier()
    model.load_state_dict({key: value.float() for key, value in load_file(path).items()})
    return model.eval().requires_grad_(False)


@torch.no_grad()
def judge(classifier: Classifier, images_B3HW: Tensor) -> list[Verdict]:
    """One verdict a picture for `images_B3HW` in [0, 1]."""
    shape_logits_BS, colour_logits_BK = classifier(images_B3HW)
    shape_p, shape_i = shape_logits_BS.softmax(-1).max(-1)
    colour_p, colour_i = colour_logits_BK.softmax(-1).max(-1)
    return [
        Verdict(
            shape=SHAPE_CLASSES[int(s)],
            colour=COLOUR_CLASSES[int(c)],
            shape_probability=float(sp),
            colour_probability=float(cp),
        )
        for s, c, sp, cp in zip(shape_i, colour_i, shape_p, colour_p, strict=True)
    ]


def shape_share(classifier: Classifier, images_B3HW: Tensor, wanted: Sequence[str]) -> float:
    """Share in [0, 1] of pictures whose shape is the one wanted (one name a picture)."""
    verdicts = judge(classifier, images_B3HW)
    if len(wanted) != len(verdicts):
        raise ValueError(f"{len(verdicts)} pictures but {len(wanted)} wanted shapes")
    return sum(v.shape == w for v, w in zip(verdicts, wanted, strict=True)) / len(verdicts)
