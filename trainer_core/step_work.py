"""What one step computes: micro-batches of sample references, and what its loss is divided by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .data.records import SampleRef


@dataclass(frozen=True)
class StepWork:
    """`divisor` stays that of the whole step when a sample is dropped: its share of the gradient is then missing, the
    others' is what it was. `dropped`: samples left out of this step because their loss was not finite."""

    epoch: int
    batches: tuple[tuple[SampleRef, ...], ...]
    divisor: int
    dropped: tuple[SampleRef, ...] = ()

    @property
    def refs(self) -> tuple[SampleRef, ...]:
        """All samples in the order of the losses."""
        return tuple(ref for batch in self.batches for ref in batch)

    def micro_batch_of(self, place: int) -> int:
        """Number (from 0) of the micro-batch that holds sample `place` of `refs`."""
        for number, batch in enumerate(self.batches):
            if place < len(batch):
                return number
            place -= len(batch)
        raise IndexError(place)

    def without(self, places: Collection[int]) -> StepWork:
        """The step without these samples (places in `refs`), with the same divisor."""
        refs = self.refs
        gone = {id(refs[place]) for place in places}
        batches = tuple(tuple(ref for ref in batch if id(ref) not in gone) for batch in self.batches)
        return StepWork(
            self.epoch,
            tuple(batch for batch in batches if batch),
            self.divisor,
            (*self.dropped, *(refs[place] for place in places)),
        )


def plan_step(
    epoch: int, group: Sequence[tuple[SampleRef, ...]], excludes: Callable[[str], bool] = lambda key: False
) -> StepWork:
    """The step of `group` without quarantined samples: these are as if they were not in the data set, so the loss is
    divided by the samples that are left."""
    batches = tuple(tuple(ref for ref in batch if not excludes(ref.key)) for batch in group)
    batches = tuple(batch for batch in batches if batch)
    return StepWork(epoch, batches, sum(len(batch) for batch in batches))
