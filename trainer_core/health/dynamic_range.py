"""How much of fp16's range the gradients use, by module group, from counts of binary exponents.

H+ = log2(65504 / (S amax)): bits of headroom. H- = log2(S q / 2^-24) with q the 0.1 % quantile of |g|: bits above the
smallest number. Recommended scale: 2^floor(log2(65504 / amax) - 2). A group that has neither headroom nor room below
has no scale that fits: fp16 does not suit it, bf16 (fp32's exponents) does. Micikevicius et al. 2018, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .groups import Tensor, group_words
from .records import FLUSH_EXPONENT, FP16_MAX, LOWEST_EXPONENT, SUBNORMAL_EXPONENT, SlowRecord

_LOW_QUANTILE = 0.001
_EMPTY_HEADROOM = 1.0
_EMPTY_FLUSH = 0.01
_MOST_SCALE = 2.0**24


@dataclass(frozen=True)
class GroupRange:
    """Range of one group's gradients. `headroom`, `floor_room` in bits at the scale `loss_scale`; `flushed` and
    `subnormal`: shares of elements that fp16 would make 0, or keep with fewer digits; `zero`: shares that are 0
    already.

    `best_scale`: the largest power of two that leaves two bits of headroom. `suits_fp16`: whether some scale fits.
    """

    group: str
    elements: int
    amax: float
    loss_scale: float
    headroom: float
    floor_room: float
    flushed: float
    subnormal: float
    zero: float
    best_scale: float
    flushed_at_best: float

    @property
    def overflows_fp16(self) -> bool:
        """Whether the largest gradient has less than one bit left at this scale."""
        return self.headroom < _EMPTY_HEADROOM

    @property
    def overflows_bf16(self) -> bool:
        """bf16 has fp32's exponents: whether the scaled gradient leaves even these."""
        return self.amax > 0 and math.log2(self.amax * self.loss_scale) >= 128

    @property
    def suits_fp16(self) -> bool:
        """False where the best scale still loses more than 1 % of the elements."""
        return self.flushed_at_best <= _EMPTY_FLUSH

    @property
    def format(self) -> str:
        """The number format that suits the group: fp16 or bf16."""
        return "fp16" if self.suits_fp16 else "bf16"


def ranges(record: SlowRecord, tensors: Mapping[str, Tensor], loss_scale: float | None = None) -> list[GroupRange]:
    """Range of every group. `loss_scale`: judge by this one instead of the step's own."""
    scale = record.loss_scale if loss_scale is None else loss_scale
    amax: dict[str, float] = {}
    for name, sample in record.tensors.items():
        if name in tensors:
            group = tensors[name].group
            amax[group] = max(amax.get(group, 0.0), sample.amax)
    return [
        group_range(group, counts, record.zeros[group], amax.get(group, 0.0), scale)
        for group, counts in record.exponents.items()
        if sum(counts) + record.zeros[group] > 0
    ]


def group_range(group: str, counts: Sequence[int], zeros: int, amax: float, scale: float) -> GroupRange:
    """The range of elements counted by exponent (unscaled) under a loss scale."""
    present = sum(counts)
    total = present + zeros
    shift = math.log2(scale)
    best = _best_scale(amax)
    return GroupRange(
        group=group,
        elements=total,
        amax=amax,
        loss_scale=scale,
        headroom=math.log2(FP16_MAX / (scale * amax)) if amax > 0 else math.inf,
        floor_room=_low_exponent(counts) + shift - FLUSH_EXPONENT if present else math.nan,
        flushed=_share_below(counts, FLUSH_EXPONENT - shift, present),
        subnormal=_share_below(counts, SUBNORMAL_EXPONENT - shift, present),
        zero=zeros / total if total else 0.0,
        best_scale=best,
        flushed_at_best=_share_below(counts, FLUSH_EXPONENT - math.log2(best), present),
    )


def range_table(found: Sequence[GroupRange]) -> str:
    """Which groups overflow in fp16 and not in bf16, and what scale would suit each."""
    lines = ["group                                   largest   headroom  flushed  subnormal  best scale  suits"]
    for one in found:
        overflow = " OVERFLOWS in fp16, not in bf16" if one.overflows_fp16 and not one.overflows_bf16 else ""
        lines.append(
            f"{group_words(one.group):<38} {one.amax:>9.2e} {one.headroom:>7.1f} bit {one.flushed:>7.2%} "
            f"{one.subnormal:>9.2%} {one.best_scale:>12.0f}  {one.format}{overflow}"
        )
    return "\n".join(lines)


def unfit_text(found: Sequence[GroupRange]) -> str:
    """What is told of groups for which no loss scale fits; empty when there are none."""
    if not found:
        return ""
    names = ", ".join(group_words(one.group) for one in found[:3])
    return (
        f"fp16 does not suit the gradients of {len(found)} module groups ({names}): at any loss scale some overflow "
        "and more than 1 % become 0. Set precision.compute = 'bf16', which has fp32's range."
    )


def recommended_scale(found: Sequence[GroupRange]) -> float:
    """One scale for the whole run: the smallest of the groups' best ones, because fp16 has a single scale."""
    return min((one.best_scale for one in found if one.amax > 0), default=1.0)


def _best_scale(amax: float) -> float:
    if amax <= 0:
        return _MOST_SCALE
    return min(_MOST_SCALE, max(1.0, 2.0 ** math.floor(math.log2(FP16_MAX / amax) - 2)))


def _share_below(counts: Sequence[int], exponent: float, present: int) -> float:
    """Share of elements whose binary exponent is below `exponent`."""
    if not present:
        return 0.0
    edge = max(0, min(len(counts), math.ceil(exponent) - LOWEST_EXPONENT))
    return sum(counts[:edge]) / present


def _low_exponent(counts: Sequence[int]) -> int:
    """Exponent of the 0.1 % quantile."""
    wanted, seen = _LOW_QUANTILE * sum(counts), 0
    for place, count in enumerate(counts):
        seen += count
        if seen > wanted:
            return place + LOWEST_EXPONENT
    return len(counts) - 1 + LOWEST_EXPONENT
