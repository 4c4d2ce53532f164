"""Error counters of an NVIDIA GPU and what follows from them.

ECC corrects single-bit errors exactly: they change no number. What cannot be corrected, a row of memory that could not
be remapped, and some of the driver's error codes (Xid) mean that numbers may be wrong. Names and codes: NVIDIA's NVML
API reference and its Xid catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

FATAL_XIDS = {
    48: "an error in its memory that could not be corrected",
    94: "an error in its memory that could not be corrected (contained)",
    95: "an error in its memory that could not be corrected (not contained)",
}
ROW_XID = 63
"""A row of memory was marked for remapping; it is done at the next reset."""

_RISE_WINDOW_S = 600.0
_RISE_LEAST = 10
_RISE_TIMES = 3.0
_MOST_XIDS = 100


@dataclass(frozen=True)
class Counters:
    """Of one device: corrected and uncorrected ECC errors since its driver was loaded, state of the remapped rows, and
    the Xids since the last look."""

    corrected: int = 0
    uncorrected: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    xids: tuple[int, ...] = ()


Source = Callable[[], Counters]
"""Reads the counters now. Raises Unreadable."""


class Unreadable(Exception):
    """The counters cannot be read any more."""


@dataclass(frozen=True)
class Concern:
    """`fatal`: numbers computed since the last verified checkpoint may be wrong; the run must not go on here."""

    topic: str
    sentence: str
    fatal: bool = False


@dataclass
class CounterPolicy:
    """What to say of a device's counters, each thing once. `device`: its name in sentences."""

    device: str
    first: Counters | None = None
    _told: set[str] = field(default_factory=set[str])
    _history: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    def look(self, now: Counters, seconds: float) -> list[Concern]:
        """Take in a reading at a time in seconds; returns what is new."""
        begins = self.first is None
        first = self.first = self.first or now
        found = [*self._fatal(first, now), *self._warnings(first, now, begins), *self._rise(now, seconds)]
        fresh = [concern for concern in found if concern.topic not in self._told]
        self._told.update(concern.topic for concern in fresh)
        return fresh

    def _fatal(self, first: Counters, now: Counters) -> Iterator[Concern]:
        if now.uncorrected > first.uncorrected:
            count = now.uncorrected - first.uncorrected
            text = f"{self.device} reports {count} memory errors during this run that could not be corrected."
            yield Concern("uncorrected", text, True)
        if now.remap_failed:
            yield Concern("remap failed", f"{self.device} could not replace a bad row of its memory.", True)
        for xid in now.xids:
            if xid in FATAL_XIDS:
                yield Concern(f"xid {xid}", f"{self.device} reports {FATAL_XIDS[xid]}, Xid {xid}.", True)

    def _warnings(self, first: Counters, now: Counters, begins: bool) -> Iterator[Concern]:
        if begins and first.uncorrected:
            yield Concern(
                "before",
                f"{self.device} has had {first.uncorrected} memory errors that could not be corrected since its driver "
                "was loaded, before this run. Reset it (nvidia-smi --gpu-reset), or test it.",
            )
        if now.remap_pending or ROW_XID in now.xids:
            yield Concern(
                "remap pending",
                f"{self.device} has a bad row of memory that is replaced at its next reset. The run can end; reset the "
                "GPU or the machine afterwards.",
            )

    def _rise(self, now: Counters, seconds: float) -> Iterator[Concern]:
        """Corrected errors change no number; ever more of them are a part that is failing."""
        self._history.append((seconds, now.corrected))
        while self._history[0][0] < seconds - 2 * _RISE_WINDOW_S:
            self._history.pop(0)
        middle = next((count for at, count in self._history if at >= seconds - _RISE_WINDOW_S), now.corrected)
        late, early = now.corrected - middle, middle - self._history[0][1]
        if late >= _RISE_LEAST and late > _RISE_TIMES * early:
            minutes = round(_RISE_WINDOW_S / 60)
            yield Concern(
                "corrected",
                f"{self.device} corrected {late} memory errors in {minutes} minutes, {early} in the {minutes} before. "
                "No number is wrong by that; the memory may be failing, or too hot.",
            )


class NvmlSource:
    """Reads the counters of NVML's device `handle`. What a card does not have (ECC, remapped rows) counts as none."""

    def __init__(self, handle: Any) -> None:
        import pynvml  # pyright: ignore[reportMissingModuleSource]

        self._nvml: Any = pynvml
        self._handle = handle
        self._events: Any = None
        try:
            self._events = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
        except (pynvml.NVMLError, AttributeError):  # Windows, and some virtual machines, tell no events
            self._events = None

    def __call__(self) -> Counters:
        nvml = self._nvml
        try:
            _, _, pending, failed = self._ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
            corrected, uncorrected = (
                int(self._ask("nvmlDeviceGetTotalEccErrors", kind, nvml.NVML_VOLATILE_ECC) or 0)
                for kind in (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
            )
        except nvml.NVMLError as error:  # the GPU or its driver is gone
            raise Unreadable(str(error)) from error
        return Counters(corrected, uncorrected, bool(pending), bool(failed), self._xids())

    def _ask(self, name: str, *arguments: int) -> Any:
        """The answer of an NVML function; None where this card or driver does not have it."""
        nvml = self._nvml
        try:
            return getattr(nvml, name)(self._handle, *arguments)
        except AttributeError:
            return None
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                return None
            raise

    def _xids(self) -> tuple[int, ...]:
        found: list[int] = []
        while self._events is not None and len(found) < _MOST_XIDS:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError:  # its timeout: nothing waits
                break
            found.append(int(event.eventData))
        return tuple(found)
