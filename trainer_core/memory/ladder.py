"""What is tried when a forward or backward runs out of memory, and what was learnt for the rest of the run.

In order: the micro-batch is cut in two; at one sample activations are recomputed; then they wait in host memory; then
the run ends with what to do. Samples, draws and the mean over the whole step stay the same, so the result does too (to
rounding). Rank and resolution are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from ..errors import ResourceError
from .activations import offloaded

T = TypeVar("T")
Area = tuple[int, int]
"""Width and height of a bucket in pixels."""


class Recomputing(Protocol):
    """See `activations.Recompute`."""

    @property
    def exhausted(self) -> bool: ...

    def more(self) -> str: ...

    def everything(self) -> None: ...


class MemoryLadder:
    """Sizes of micro-batches that are safe, by bucket, and the rungs already climbed. Nothing grows back in a run.

    Args:
        micro_batch: samples in one forward at most from the beginning; 0 = the whole batch.
        tell: says what was done, in words.
    """

    def __init__(
        self,
        *,
        micro_batch: int = 0,
        recompute: Recomputing | None = None,
        offload: bool = False,
        tell: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._most = micro_batch
        self._recompute = recompute
        self._tell = tell
        self._recomputed = False
        self.offloading = offload
        self.limits: dict[Area, int] = {}
        self.failures = 0

    def pieces(self, samples: Sequence[T], area: Area) -> list[Sequence[T]]:
        """`samples` of one bucket cut into micro-batches that are safe, as even as can be, order kept."""
        limit = min(self.limits.get(area, len(samples)), self._most or len(samples))
        count = -(-len(samples) // limit) if limit else 1
        short, longer = divmod(len(samples), count) if count else (0, 0)
        cut: list[Sequence[T]] = []
        at = 0
        for number in range(count):
            size = short + (number < longer)
            cut.append(samples[at : at + size])
            at += size
        return cut

    def context(self) -> AbstractContextManager[None]:
        """Around every forward: keeps activations where they are, or moves them to host memory."""
        return offloaded() if self.offloading else nullcontext()

    def climb(self, samples: int, area: Area, said: str) -> None:
        """The next rung after a forward or backward of `samples` at `area` failed; `said` is the allocator's word.

        Raises:
            ResourceError: nothing is left to try.
        """
        self.failures += 1
        width, height = area
        what = f"Out of memory with {samples} picture{'s' if samples != 1 else ''} of {width} x {height}: {said}"
        if samples > 1:
            self.limits[area] = (samples + 1) // 2
            self._tell(
                f"{what} The micro-batch is cut to {self.limits[area]} for the rest of the run; the step is computed "
                "again with the same pictures and draws, its mean still over the whole step."
            )
        elif self._recompute is not None and not self._recompute.exhausted:
            self._recompute.everything()
            self._recomputed = True
            self._tell(f"{what} Activations are recomputed from now on (about a third slower, the same result).")
        elif not self.offloading:
            self.offloading = True
            self._tell(f"{what} Activations wait in host memory from now on (much slower, the same result).")
        else:
            raise ResourceError(
                f"{what} One picture at a time, recomputed activations and host memory were not enough. Close other "
                "programs on the device, or use a smaller resolution, a lower rank or fewer trained parts, and resume."
            )

    def split(self, samples: int, area: Area) -> bool:
        """Halve the micro-batch of a bucket before memory ends. False when it is one picture already."""
        if samples <= 1:
            return False
        self.limits[area] = min((samples + 1) // 2, self.limits.get(area, samples))
        return True

    def again(self, said: str) -> None:
        """Say that a step is computed again as it was: memory ended while it was measured."""
        self._tell(f"Out of memory while the gradients were measured; the step is computed again: {said}")

    def state_dict(self) -> dict[str, Any]:
        """JSON-safe: what a resumed run need not learn again."""
        return {
            "limits": [[width, height, limit] for (width, height), limit in sorted(self.limits.items())],
            "recompute": self._recomputed,
            "offload": self.offloading,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over limits and rungs; those of this process's own settings stay when they are stricter."""
        for width, height, limit in state["limits"]:
            self.limits[width, height] = min(limit, self.limits.get((width, height), limit))
        self.offloading = self.offloading or bool(state["offload"])
        if state["recompute"] and self._recompute is not None and not self._recompute.exhausted:
            self._recompute.everything()
            self._recomputed = True
