"""The three adapter dropouts of kohya with masks from keyed draws (kohya.md 1.6).

Order inside one forward, as in kohya: module, neuron, rank. Masks are keyed by run seed, epoch, sample and module, so a
recompute under gradient checkpointing and another micro-batch split see the same mask. Module dropout is decided per
sample (kohya decides once a micro-batch), because otherwise the split would change the draw.

Shape letters: B rows of the module's input, T tokens, R rank, H W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..draws import Draws
from ..errors import AdapterError


@dataclass(frozen=True)
class DropoutRates:
    """Probabilities of being dropped."""

    neuron: float = 0.0
    rank: float = 0.0
    module: float = 0.0

    @property
    def any(self) -> bool:
        return self.neuron > 0 or self.rank > 0 or self.module > 0


@dataclass(frozen=True)
class DropoutDraws:
    """Where the masks of one micro-batch come from: the run's draws, the epoch and the keys of the samples in it."""

    draws: Draws
    epoch: int
    sample_keys: tuple[str, ...]

    def uniform(self, purpose: str, rows: int, shape: Sequence[int]) -> torch.Tensor:
        """Uniform numbers `(rows, *shape)` in [0, 1). `rows` is a multiple of the samples: text encoders see one row a
        chunk of the caption."""
        count = len(self.sample_keys)
        if count == 0 or rows % count:
            raise AdapterError(
                f"Adapter dropout has keys for {count} samples, but a module got {rows} rows. The keys must be "
                "those of the micro-batch that is being computed."
            )
        per_sample = rows // count
        return torch.cat(
            [self.draws.uniform(self.epoch, key, purpose, (per_sample, *shape)) for key in self.sample_keys]
        )


@dataclass(frozen=True)
class DropoutMasks:
    """Random tensors of one forward of one module; None where that dropout is off.

    module_B: uniform numbers, a row is dropped when below the rate. neuron: uniform, in the shape of the hidden
    activation. rank_BR: uniform, a rank of a row is kept when above the rate.
    """

    module_B: torch.Tensor | None = None
    neuron: torch.Tensor | None = None
    rank_BR: torch.Tensor | None = None


def draw_masks(source: DropoutDraws, name: str, rates: DropoutRates, hidden: torch.Tensor) -> DropoutMasks:
    """Masks of module `name` for a hidden activation (B, T, R), (B, R) or (B, R, H, W), on its device."""
    rows, rank_axis = hidden.shape[0], rank_dimension(hidden)

    def draw(rate: float, kind: str, shape: Sequence[int]) -> torch.Tensor | None:
        return source.uniform(f"{kind}_dropout/{name}", rows, shape).to(hidden.device) if rate > 0 else None

    return DropoutMasks(
        module_B=draw(rates.module, "module", ()),
        neuron=draw(rates.neuron, "neuron", hidden.shape[1:]),
        rank_BR=draw(rates.rank, "rank", (hidden.shape[rank_axis],)),
    )


def apply_masks(hidden: torch.Tensor, masks: DropoutMasks, rates: DropoutRates) -> torch.Tensor:
    """Hidden activation with the masks applied. Neuron and rank dropout scale the rest up by 1 / (1 - rate), module
    dropout does not (kohya.md 1.6)."""
    if masks.neuron is not None:
        keep = (masks.neuron >= rates.neuron).to(hidden.dtype)
        hidden = hidden * (keep / (1.0 - rates.neuron))
    if masks.rank_BR is not None:
        shape = [1] * hidden.dim()
        shape[0], shape[rank_dimension(hidden)] = masks.rank_BR.shape
        hidden = hidden * (masks.rank_BR > rates.rank).to(hidden.dtype).view(shape) * (1.0 / (1.0 - rates.rank))
    if masks.module_B is not None:
        keep_rows = (masks.module_B >= rates.module).to(hidden.dtype)
        hidden = hidden * keep_rows.view(-1, *[1] * (hidden.dim() - 1))
    return hidden


def rank_dimension(hidden: torch.Tensor) -> int:
    """Axis of the rank: channels of a picture (B, R, H, W), else the last."""
    return 1 if hidden.dim() == 4 else hidden.dim() - 1
