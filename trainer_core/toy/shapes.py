"""Draws the toy's pictures: one coloured shape on a pale background, with a caption.

Everything is computed with numpy from the generator handed in, so a picture depends on its key and on nothing
else (no drawing library, no fonts, no global random state).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..draws import Draws

#: RGB in 0..255. The last colour is never seen by the toy's UNet and text encoders.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (238, 208, 30),
    "purple": (130, 50, 170),
    "orange": (245, 130, 25),
    "cyan": (40, 190, 212),
    "black": (25, 25, 30),
    "pink": (245, 125, 185),
}
#: The last shape is never seen by the toy's UNet and text encoders.
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "star", "cross", "ring", "heart")
UNTAUGHT_SHAPE = "heart"
UNTAUGHT_COLOUR = "pink"
KNOWN_SHAPES: tuple[str, ...] = SHAPES[:-1]
KNOWN_COLOURS: tuple[str, ...] = tuple(COLOURS)[:-1]
#: Pairs the UNet and the text encoders never saw together: they measure composition.
HELD_OUT_PAIRS: tuple[tuple[str, str], ...] = (
    ("red", "star"),
    ("green", "ring"),
    ("blue", "triangle"),
    ("yellow", "square"),
    ("purple", "circle"),
    ("orange", "cross"),
    ("cyan", "star"),
    ("black", "triangle"),
)
#: (height, width) in pixels of the pictures the toy was trained on.
SIZES: tuple[tuple[int, int], ...] = ((64, 64), (48, 80), (80, 48), (56, 72), (72, 56))

_SUPERSAMPLE = 4  # points per pixel and side; the mean of 16 points is the edge's coverage


def keyed_generator(seed: int, purpose: str, index: int = 0) -> np.random.Generator:
    """The toy's stream for one purpose and index: a stateless draw like every other of this project."""
    return Draws(seed).generator(0, "toy", purpose, index)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One drawn picture. `pixels_HWC` is uint8 RGB, `caption` names colour and shape."""

    pixels_HWC: np.ndarray
    caption: str
    shape: str
    colour: str


def with_article(words: str) -> str:
    """``"orange ring"`` -> ``"an orange ring"``."""
    return ("an " if words[:1] in "aeiou" else "a ") + words


def _polygon(x: np.ndarray, y: np.ndarray, corners: list[tuple[float, float]]) -> np.ndarray:
    """True inside the polygon (even-odd rule, edges as straight lines)."""
    inside = np.zeros(x.shape, dtype=bool)
    for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
        if y0 == y1:
            continue
        crosses = (y0 > y) != (y1 > y)
        inside ^= crosses & (x < (x1 - x0) * (y - y0) / (y1 - y0) + x0)
    return inside


def _star(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    corners = []
    for i in range(10):
        radius = 1.08 if i % 2 == 0 else 0.44
        angle = np.pi * i / 5
        corners.append((float(radius * np.sin(angle)), float(radius * np.cos(angle))))
    return _polygon(x, y, corners)


def _heart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    # The sextic heart curve (x^2 + y^2 - 1)^3 = x^2 y^3, scaled to fill the unit circle.
    u, v = x * 1.2, y * 1.15 + 0.08
    return (u**2 + v**2 - 1) ** 3 - u**2 * v**3 < 0


#: Each takes x (right) and y (up) where the shape fills about the unit circle, and says what is inside.
_INSIDE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "circle": lambda x, y: x**2 + y**2 < 0.94**2,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) < 0.84,
    "triangle": lambda x, y: _polygon(x, y, [(0.0, 1.0), (1.0, -0.8), (-1.0, -0.8)]),
    "star": _star,
    "cross": lambda x, y: (np.minimum(np.abs(x), np.abs(y)) < 0.3) & (np.maximum(np.abs(x), np.abs(y)) < 0.98),
    "ring": lambda x, y: (x**2 + y**2 < 1.0) & (x**2 + y**2 > 0.56**2),
    "heart": _heart,
}


def draw(generator: np.random.Generator, shape: str, colour: str, size_hw: tuple[int, int] = (64, 64)) -> np.ndarray:
    """Draw one `colour` `shape` on a pale background.

    Returns uint8 RGB of shape (height, width, 3). Place, size, tilt (up to 7 degrees), shade of the colour and the
    background (pale grey with a tint and a soft slope) vary with `generator`.
    Raises ValueError for an unknown shape or colour.
    """
    if shape not in _INSIDE or colour not in COLOURS:
        raise ValueError(f"cannot draw a {colour} {shape}; colours: {', '.join(COLOURS)}; shapes: {', '.join(SHAPES)}")
    height, width = size_hw
    short = min(height, width)
    radius = short * generator.uniform(0.25, 0.36)
    room_y, room_x = height / 2 - radius - 2, width / 2 - radius - 2
    centre_y = height / 2 + generator.uniform(-1, 1) * min(room_y, short * 0.12)
    centre_x = width / 2 + generator.uniform(-1, 1) * min(room_x, width * 0.12)
    tilt = np.deg2rad(generator.uniform(-7, 7))
    shade = np.clip(np.array(COLOURS[colour], dtype=np.float64) + generator.uniform(-12, 12, 3), 0, 255)
    ground = background(generator, size_hw)

    n = _SUPERSAMPLE
    ys = (np.arange(height * n) + 0.5) / n
    xs = (np.arange(width * n) + 0.5) / n
    x, y = np.meshgrid((xs - centre_x) / radius, (centre_y - ys) / radius)
    x, y = x * np.cos(tilt) + y * np.sin(tilt), y * np.cos(tilt) - x * np.sin(tilt)
    coverage = _INSIDE[shape](x, y).reshape(height, n, width, n).mean(axis=(1, 3))[..., None]
    return np.round(ground * (1 - coverage) + shade * coverage).astype(np.uint8)


def background(generator: np.random.Generator, size_hw: tuple[int, int]) -> np.ndarray:
    """A pale ground: grey 218..246 with a tint of up to 8 and a soft slope. float64 (height, width, 3) in 0..255."""
    height, width = size_hw
    base = generator.uniform(218, 246) + generator.uniform(-8, 8, 3)
    slope_y, slope_x = generator.uniform(-10, 10, 2)
    y = np.linspace(-0.5, 0.5, height)[:, None, None]
    x = np.linspace(-0.5, 0.5, width)[None, :, None]
    return np.clip(base + slope_y * y + slope_x * x, 0, 255)


#: Caption forms with their share. {thing} = "red circle", {a_thing} = "a red circle", {a_shape} = "a circle".
TEMPLATES: tuple[tuple[str, float], ...] = (
    ("{a_thing}", 0.45),
    ("{thing}", 0.14),
    ("a picture of {a_thing}", 0.13),
    ("a drawing of {a_thing}", 0.08),
    ("{a_thing} on a plain background", 0.10),
    ("one {thing}, centered", 0.05),
    ("{a_shape}", 0.05),
)


def caption_for(generator: np.random.Generator, shape: str, colour: str) -> str:
    """One of the caption forms, by their shares."""
    shares = np.array([share for _, share in TEMPLATES])
    template = TEMPLATES[int(generator.choice(len(TEMPLATES), p=shares / shares.sum()))][0]
    thing = f"{colour} {shape}"
    return template.format(thing=thing, a_thing=with_article(thing), a_shape=with_article(shape))


def known_pairs() -> list[tuple[str, str]]:
    """The (colour, shape) pairs that the toy's UNet and text encoders were trained on."""
    pairs = [(colour, shape) for colour in KNOWN_COLOURS for shape in KNOWN_SHAPES]
    return [pair for pair in pairs if pair not in HELD_OUT_PAIRS]


def training_picture(seed: int, index: int, size_hw: tuple[int, int] = (64, 64)) -> Picture:
    """Picture number `index` of the toy's own training set; pairs take turns, the rest is keyed by (seed, index)."""
    pairs = known_pairs()
    colour, shape = pairs[index % len(pairs)]
    generator = keyed_generator(seed, "training picture", index)
    pixels = draw(generator, shape, colour, size_hw)
    return Picture(pixels_HWC=pixels, caption=caption_for(generator, shape, colour), shape=shape, colour=colour)


def any_picture(seed: int, index: int, size_hw: tuple[int, int] = (64, 64)) -> Picture:
    """Picture `index` over all shapes and all colours (for the VAE and the classifier)."""
    generator = keyed_generator(seed, "any picture", index)
    shape = SHAPES[int(generator.integers(len(SHAPES)))]
    colour = tuple(COLOURS)[int(generator.integers(len(COLOURS)))]
    pixels = draw(generator, shape, colour, size_hw)
    return Picture(pixels_HWC=pixels, caption=with_article(f"{colour} {shape}"), shape=shape, colour=colour)
