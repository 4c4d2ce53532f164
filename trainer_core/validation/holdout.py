"""Which pictures are measured by the validation loss, and which of them are kept out of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..config import ValidationConfig
from ..draws import Draws, sample_key
from .stable_loss import Picture

P = TypeVar("P", bound=Picture)

_FEWEST_HELD_OUT = 2


@dataclass(frozen=True)
class Holdout(Generic[P]):
    """`training` and `measured` pictures. `held_out`: they do not overlap; else the measured ones are also trained on,
    and the loss tells how well they are learnt, not how well the model does on others. `reason` says it in words."""

    training: tuple[P, ...]
    measured: tuple[P, ...]
    held_out: bool
    reason: str


def choose_holdout(items: Sequence[P], config: ValidationConfig, draws: Draws) -> Holdout[P]:
    """Choose the measured pictures: `split` of the set, at most `max_pictures`, keyed by seed and picture.

    Equal pictures (same content) go to the same side, so nothing leaks. A set so small that its share is under two
    pictures is not split: all of it is trained on, and `max_pictures` of it are probed.
    """
    items = tuple(items)
    if not config.enabled or not items:
        return Holdout(items, (), False, "The validation loss is switched off." if items else "There are no pictures.")
    by_content: dict[str, list[P]] = {}
    for item in items:
        by_content.setdefault(item.content_hash, []).append(item)
    order = sorted(by_content, key=lambda content: _rank(by_content[content][0], draws))
    wanted = min(round(config.split * len(by_content)), config.max_pictures)
    if wanted < _FEWEST_HELD_OUT:
        probed = set(order[: config.max_pictures])
        measured = tuple(by_content[content][0] for content in by_content if content in probed)
        why = "none is to be held out" if config.split == 0 else f"{len(items)} pictures are too few to hold some out"
        return Holdout(items, measured, False, f"The validation loss is measured on trained pictures: {why}.")
    chosen = set(order[:wanted])
    training = tuple(item for item in items if item.content_hash not in chosen)
    measured = tuple(by_content[content][0] for content in by_content if content in chosen)
    reason = f"{len(items) - len(training)} of {len(items)} pictures are held out of training for the validation loss."
    return Holdout(training, measured, True, reason)


def _rank(item: Picture, draws: Draws) -> tuple[float, str]:
    key = sample_key(item.file, item.content_hash)
    return float(Draws(draws.seed).uniform(0, key, "holdout")), key
