"""From references of the plan to the tensors of a micro-batch.

Shapes: B batch, C latent channel, H W latent height and width, T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..config import DatasetConfig
from ..draws import Draws
from ..models import time_ids
from .captions import CaptionMoment, CaptionRules, caption_stream, process_caption
from .latent_cache import LatentCache, LatentEntry
from .plan import BatchPlan
from .records import Item, SampleRef
from .text_cache import TextCache


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch. Latents are unscaled mean and standard deviation; the trainer draws the sample.

    `time_ids_B6`: original height, width, crop top, left, target height, width in pixels. `weights_B`: loss weights.
    `masks_B1HW`: loss masks in latent size, 0 to 1, or None when no picture of the batch has one.
    """

    mean_BCHW: torch.Tensor  # noqa: N815
    std_BCHW: torch.Tensor  # noqa: N815
    captions: tuple[str, ...]
    context_BTD: torch.Tensor | None  # noqa: N815
    pooled_BD: torch.Tensor | None  # noqa: N815
    time_ids_B6: torch.Tensor  # noqa: N815
    weights_B: torch.Tensor  # noqa: N815
    sample_keys: tuple[str, ...]
    files: tuple[str, ...]
    masks_B1HW: torch.Tensor | None = None  # noqa: N815


class BatchLoader:
    """Loads micro-batches of a plan; flips and caption choices are keyed by (seed, attempt, epoch, sample)."""

    def __init__(self, plan: BatchPlan, latents: LatentCache, texts: TextCache | None, dataset: DatasetConfig) -> None:
        self.plan = plan
        self.latents = latents
        self.texts = texts
        self.dataset = dataset

    def load(
        self,
        epoch: int,
        refs: Sequence[SampleRef],
        *,
        draws: Draws | None = None,
        step: int = 0,
        total_steps: int = 0,
    ) -> Batch:
        """The micro-batch of `refs`.

        `draws`: those of the present attempt, when a rollback raised it (unset: the plan's). `step` (applied) and
        `total_steps` matter for token warm-up only.
        """
        draws = draws or self.plan.draws
        items = [self.plan.items[ref.item_index] for ref in refs]
        moment = CaptionMoment(epoch=epoch, step=step, total_steps=total_steps)
        entries, captions = [], []
        for item, ref in zip(items, refs, strict=True):
            flipped = item.spec.flip and bool(draws.uniform(epoch, ref.key, "flip") < 0.5)
            entries.append(self.latents.load(item, flipped))
            captions.append(process_caption(item.caption, item.rules, caption_stream(draws, epoch, ref.key), moment))
        return _batch(items, entries, captions, [ref.key for ref in refs], self.texts)

    @staticmethod
    def single(latents: LatentCache, dataset: DatasetConfig) -> Callable[[Item], Batch]:
        """A loader of one picture as it is, never mirrored, with its caption as written (for the validation loss)."""

        def load(item: Item) -> Batch:
            return _batch([item], [latents.load(item, False)], [plain_caption(item)], [item.key()], None)

        return load


def plain_caption(item: Item) -> str:
    """The picture's caption with prefix and suffix, without anything random."""
    rules = CaptionRules(prefix=item.rules.prefix, suffix=item.rules.suffix)
    return process_caption(" ".join(item.caption.split("\n")), rules, caption_stream(Draws(0), 0, ""))


def _batch(
    items: Sequence[Item],
    entries: Sequence[LatentEntry],
    captions: Sequence[str],
    keys: Sequence[str],
    texts: TextCache | None,
) -> Batch:
    embeds = None if texts is None else texts.encode(captions)
    return Batch(
        mean_BCHW=torch.stack([entry.mean_CHW for entry in entries]),
        std_BCHW=torch.stack([entry.std_CHW for entry in entries]),
        captions=tuple(captions),
        context_BTD=None if embeds is None else embeds.context_BTD,
        pooled_BD=None if embeds is None else embeds.pooled_BD,
        time_ids_B6=torch.stack([time_ids(entry.original_hw, entry.crop_tl, entry.target_hw) for entry in entries]),
        weights_B=torch.tensor([item.loss_weight for item in items], dtype=torch.float32),
        sample_keys=tuple(keys),
        files=tuple(item.file for item in items),
        masks_B1HW=_masks(entries),
    )


def _masks(entries: Sequence[LatentEntry]) -> torch.Tensor | None:
    """Masks of a batch; a picture without one counts as a whole. None when no picture has one."""
    if all(entry.mask_1HW is None for entry in entries):
        return None
    whole_1HW = torch.ones_like(entries[0].mean_CHW[:1])
    return torch.stack([whole_1HW if entry.mask_1HW is None else entry.mask_1HW for entry in entries])
