"""Writes the demo's teaching set: pictures of the shape the toy never saw, and prior pictures of what it knows.

The word the new shape is taught under is one of the tokenizer's spare words, so nothing but the LoRA can know it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import shapes, words

CONCEPT_FOLDER = "concept"
PRIOR_FOLDER = "prior"


@dataclass(frozen=True, kw_only=True)
class TeachingSet:
    """Where the pictures lie and how to ask for what they teach."""

    folder: Path
    concept_folder: Path
    prior_folder: Path
    word: str
    #: "a red <word>", ... one a known colour: score these for `taught_shape`.
    concept_prompts: tuple[str, ...]
    taught_shape: str
    #: Known prompts and the shape each asks for: score these to see what was kept.
    known_prompts: tuple[str, ...]
    known_shapes: tuple[str, ...]


def write_teaching_set(
    folder: str | Path, *, word: str = "zorp", concept_pictures: int = 24, prior_pictures: int = 48, seed: int = 0
) -> TeachingSet:
    """Write ``concept/`` and ``prior/`` below `folder`: PNG pictures (64x64) with one ``.txt`` caption each.

    The same arguments write the same files. Raises ValueError where `word` is not one of the tokenizer's spare words
    or a count is not positive.
    """
    if word not in words.SPARE_WORDS:
        raise ValueError(f"'{word}' is not a spare word of the toy; take one of: {', '.join(words.SPARE_WORDS)}")
    if concept_pictures < 1 or prior_pictures < 0:
        raise ValueError(
            f"got {concept_pictures} concept and {prior_pictures} prior pictures; at least 1 and 0 are needed"
        )
    root = Path(folder)
    for index in range(concept_pictures):
        generator = shapes.keyed_generator(seed, "demo concept", index)
        colour = shapes.KNOWN_COLOURS[index % len(shapes.KNOWN_COLOURS)]
        pixels_HWC = shapes.draw(generator, shapes.UNTAUGHT_SHAPE, colour)
        _write(root / CONCEPT_FOLDER, f"{index:03d}", pixels_HWC, shapes.with_article(f"{colour} {word}"))
    pairs = shapes.known_pairs()
    order = shapes.keyed_generator(seed, "demo prior order").permutation(len(pairs))
    for index in range(prior_pictures):
        generator = shapes.keyed_generator(seed, "demo prior", index)
        colour, shape = pairs[int(order[index % len(pairs)])]
        _write(
            root / PRIOR_FOLDER,
            f"{index:03d}",
            shapes.draw(generator, shape, colour),
            shapes.with_article(f"{colour} {shape}"),
        )
    return describe_teaching_set(root, word=word)


def describe_teaching_set(folder: str | Path, *, word: str = "zorp") -> TeachingSet:
    """What `write_teaching_set` returned for this folder; writes nothing."""
    root = Path(folder)
    known = [
        (colour, shapes.KNOWN_SHAPES[i % len(shapes.KNOWN_SHAPES)]) for i, colour in enumerate(shapes.KNOWN_COLOURS)
    ]
    return TeachingSet(
        folder=root,
        concept_folder=root / CONCEPT_FOLDER,
        prior_folder=root / PRIOR_FOLDER,
        word=word,
        concept_prompts=tuple(shapes.with_article(f"{colour} {word}") for colour in shapes.KNOWN_COLOURS),
        taught_shape=shapes.UNTAUGHT_SHAPE,
        known_prompts=tuple(shapes.with_article(f"{colour} {shape}") for colour, shape in known),
        known_shapes=tuple(shape for _, shape in known),
    )


def _write(folder: Path, stem: str, pixels_HWC: np.ndarray, caption: str) -> None:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels_HWC).save(folder / f"{stem}.png")
    (folder / f"{stem}.txt").write_bytes((caption + "\n").encode("utf-8"))
