"""Looking after the device of a run: its error counters after steps, and what a fault of it leads to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..errors import HardwareError
from ..events import Intervention, Verdict, Warned
from ..optim.phases import Trigger
from . import HARDWARE
from .compile_check import compile_blocks
from .counters import Concern, CounterPolicy, NvmlSource, Source, Unreadable
from .sentinel import Sentinel

if TYPE_CHECKING:
    from ..recovery import Recovery
    from ..session import Session
    from ..trainer import Trainer

log = logging.getLogger(__name__)

EVERY_S = 10.0


class HardwareWatch:
    """Looks at a device's counters after steps, every ten seconds at most.

    Args:
        clock, wall: seconds for the cadence, and seconds since the epoch as checkpoints have them.
    """

    def __init__(
        self,
        trainer: Trainer,
        source: Source,
        device: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._trainer = trainer
        self._source: Source | None = source
        self._policy = CounterPolicy(device)
        self._clock, self._wall = clock, wall
        self._last: float | None = None
        self.clean_at = 0.0
        """When the counters were last looked at and nothing fatal was there (seconds since the epoch)."""

    def __call__(self) -> None:
        """To be called after every step."""
        now = self._clock()
        if self._source is None or (self._last is not None and now - self._last < EVERY_S):
            return
        self._last = now
        try:
            concerns = self._policy.look(self._source(), now)
        except Unreadable as error:
            self._source = None
            step = self._trainer.state.step
            text = f"The GPU's error counters cannot be read any more, its faults go unnoticed: {error}."
            self._trainer.bus.emit(Warned(step=step, topic="hardware", message=text))
            return
        if not any(concern.fatal for concern in concerns):
            self.clean_at = self._wall()
        for concern in concerns:
            self._tell(concern)

    def _tell(self, concern: Concern) -> None:
        trainer = self._trainer
        severity = "error" if concern.fatal else "warning"
        trainer.bus.emit(Verdict(step=trainer.state.step, kind=HARDWARE, sentence=concern.sentence, severity=severity))
        if concern.fatal:
            trainer.ask_for_recovery(Trigger(HARDWARE, concern.sentence, trainer.state.step))


def device_failed(session: Session, trigger: Trigger, step: int, clean_at: float) -> HardwareError:
    """The error of a run whose device fails. Checkpoints that the fault may have reached are set aside: those since the
    newest verified one that was written before `clean_at`."""
    doubtful: list[str] = []
    kept = ""
    for saved in session.store.list():
        if saved.verified and not saved.problem and saved.created <= clean_at:
            kept = saved.name
            break
        doubtful.append(saved.name)
    if doubtful and session.is_first:
        reason = f"written when the device may have computed wrong: {trigger.reason}"
        session.store.set_aside(doubtful, reason)
        names = ", ".join(doubtful)
        session.bus.emit(Intervention(step=step, action=f"Checkpoints set aside: {names}", reason=trigger.reason))
    goes_on = f"from {kept}" if kept else "from its beginning (there is no earlier verified checkpoint)"
    return HardwareError(
        f"Stopped at step {step}: {trigger.reason} Numbers computed since its last sound state may be wrong. Test or "
        f"replace the device; on another one the run can go on {goes_on} with: safe-scaler resume {session.folder.path}"
    )


def watch_device(trainer: Trainer, recovery: Recovery) -> None:
    """Put the watches of `config.hardware` on a run."""
    config, device = trainer.config.hardware, trainer.parts.device
    if config.counters and device.type == "cuda":
        from ..memory.guard import nvml_handle

        handle = nvml_handle(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        if handle is None:
            text = "NVML does not answer, so the GPU's error counters are not watched."
            trainer.bus.emit(Warned(topic="hardware", message=text))
        else:
            name = f"{torch.cuda.get_device_name(device)} ({device})"
            recovery.hardware = HardwareWatch(trainer, NvmlSource(handle), name)
            trainer.watches.append(recovery.hardware)
    if config.compile != "off":
        compile_blocks(trainer, config.compile)
    if config.sentinel_every > 0:
        trainer.watches.append(Sentinel(trainer, config.sentinel_every))
