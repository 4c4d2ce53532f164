"""Which samples make up each batch of each epoch: a pure function of (seed, epoch).

Every picture comes `repeats` times an epoch; a batch never mixes buckets; the short last batch of a bucket is kept, so
planned steps are true steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np

from ..draws import Draws
from .records import Item, SampleRef
from .scan_warnings import counted
from .subset import Subset
from .table import ItemTable


class EpochBatches(Sequence[tuple[SampleRef, ...]]):
    """The batches of one epoch in order. References are made when a batch is looked at, so big sets cost little."""

    def __init__(self, plan: BatchPlan, samples: np.ndarray, starts: np.ndarray) -> None:
        self._plan = plan
        self._samples = samples
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> tuple[SampleRef, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[SampleRef, ...]]: ...
    def __getitem__(self, index: int | slice) -> tuple[SampleRef, ...] | list[tuple[SampleRef, ...]]:
        if isinstance(index, slice):
            return [self._batch(at) for at in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._batch(index % len(self))

    def __iter__(self) -> Iterator[tuple[SampleRef, ...]]:
        return (self._batch(at) for at in range(len(self)))

    def samples_of(self, batches: int) -> np.ndarray:
        """Sample numbers of the first `batches` batches."""
        starts = self._starts[:batches]
        return np.concatenate(
            [self._samples[first : first + length] for first, length in starts] or [self._samples[:0]]
        )

    def _batch(self, index: int) -> tuple[SampleRef, ...]:
        first, length = self._starts[index]
        return tuple(self._plan.reference(int(sample)) for sample in self._samples[first : first + length])


class BatchPlan:
    """Plans batches of `batch_size` over `items`. Sample number s is item i's repeat r, counted in item order."""

    def __init__(self, items: Sequence[Item], batch_size: int, draws: Draws) -> None:
        if not len(items):
            raise ValueError("a batch plan needs at least one picture")
        self.items = items
        self.batch_size = batch_size
        self.draws = draws
        self._latest: tuple[int, EpochBatches] | None = None
        repeats, self._bucket_ids, self.groups = _columns(items, batch_size)
        self._item_of_sample = np.repeat(np.arange(len(items), dtype=np.int32), repeats)
        ends = np.cumsum(repeats)
        self._first_sample = ends - repeats
        self.samples_per_epoch = int(ends[-1])
        counts = np.bincount(self._bucket_ids[self._item_of_sample], minlength=len(self.groups))
        self.group_samples = {group: int(count) for group, count in zip(self.groups, counts, strict=True)}
        self.micro_batches_per_epoch = sum(-(-count // group.batch) for group, count in self.group_samples.items())

    def steps_per_epoch(self, accumulation: int) -> int:
        """Steps an epoch; the last, short accumulation group is a step too, averaged over its true sample count."""
        return -(-self.micro_batches_per_epoch // accumulation)

    def accumulation_note(self, accumulation: int) -> str:
        """What to say when a step is to hold more micro-batches than an epoch has: it ends with the epoch. Else
        empty."""
        if accumulation <= self.micro_batches_per_epoch:
            return ""
        batches = counted(self.micro_batches_per_epoch, "micro-batch", "micro-batches")
        return (
            f"gradient.accumulation = {accumulation}, but an epoch has only {batches}, and a step ends with its epoch: "
            f"every step sees {counted(self.samples_per_epoch, 'sample')}. Raise dataset.repeats for larger steps."
        )

    def batches(self, epoch: int) -> EpochBatches:
        """All batches of `epoch` (from 0) in the order they are trained. The latest epoch asked for is remembered."""
        if self._latest is None or self._latest[0] != epoch:
            self._latest = epoch, self._ordered(epoch)
        return self._latest[1]

    def _ordered(self, epoch: int) -> EpochBatches:
        order = self.draws.permutation(self.samples_per_epoch, epoch, "order")
        buckets = self._bucket_ids[self._item_of_sample[order]]
        grouped = order[np.argsort(buckets, kind="stable")]
        starts: list[tuple[int, int]] = []
        at = 0
        for group, count in self.group_samples.items():
            starts += [(at + s, min(group.batch, count - s)) for s in range(0, count, group.batch)]
            at += count
        table = np.asarray(starts, dtype=np.int64).reshape(-1, 2)
        return EpochBatches(self, grouped, table[self.draws.permutation(len(table), epoch, "batch-order")])

    def reference(self, sample: int) -> SampleRef:
        """The reference of sample number `sample` (0 to samples_per_epoch - 1)."""
        index = int(self._item_of_sample[sample])
        repeat = sample - int(self._first_sample[index])
        return SampleRef(index, repeat, self.items[index].key(repeat))

    def items_seen(self, steps: int, accumulation: int) -> Sequence[Item]:
        """The items that the first `steps` steps see, in item order."""
        if steps >= self.steps_per_epoch(accumulation):
            return self.items
        samples = self.batches(0).samples_of(steps * accumulation)
        return Subset(self.items, np.unique(self._item_of_sample[samples]))

    def largest_batch(self) -> tuple[SampleRef, ...]:
        """A batch with the most pixels of any in the plan, to try memory with before the first step."""
        largest = max(self.groups, key=lambda g: (g.width * g.height * min(self.group_samples[g], g.batch), g))
        wanted = self._bucket_ids[self._item_of_sample] == self.groups.index(largest)
        return tuple(self.reference(int(s)) for s in np.flatnonzero(wanted)[: largest.batch])


class Group(NamedTuple):
    """What the pictures of a batch have in common: bucket size in pixels, and the batch size of their set."""

    width: int
    height: int
    batch: int


def _columns(items: Sequence[Item], batch_size: int) -> tuple[np.ndarray, np.ndarray, list[Group]]:
    """(repeats of every item, number of its group, the groups in sorted order)."""
    table, places = (items.base, items.places) if isinstance(items, Subset) else (items, slice(None))
    if isinstance(table, ItemTable):
        sets, buckets, repeats = (column[places] for column in table.plan_columns())
        kinds, numbers = np.unique(sets * len(table.buckets) + buckets, return_inverse=True)
        pairs = [divmod(int(kind), len(table.buckets)) for kind in kinds]
        found = [Group(*table.buckets[bucket], table.specs[one].batch_size or batch_size) for one, bucket in pairs]
    else:
        known: dict[Group, int] = {}
        repeats = np.array([item.repeats for item in items], dtype=np.int64)
        groups_of = (Group(*item.bucket, item.spec.batch_size or batch_size) for item in items)
        numbers = np.array([known.setdefault(group, len(known)) for group in groups_of])
        found = list(known)
    groups = sorted(set(found))
    rank = np.array([groups.index(group) for group in found], dtype=np.int32)
    return repeats, rank[numbers], groups
