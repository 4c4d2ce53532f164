"""Progress of a run in the terminal: one line that is rewritten, or plain lines where the output is no terminal.

A subscriber of the event bus. Warnings, rejected steps and saved files always get a line of their own.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from .events import NOTE_TOPICS

_PLAIN_EVERY_S = 15.0
_LIVE_EVERY_S = 0.1

Wire = dict[str, Any]


def clock(seconds: float | None) -> str:
    """Seconds as 0:05, 12:34 or 1:02:03; '?' where unknown."""
    if seconds is None or seconds < 0:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(count: float) -> str:
    """Bytes as '12.3 MB' (decimal units, as file managers show them)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def make_safe(stream: TextIO) -> None:
    """Let a terminal that cannot show a character show its escape instead of failing."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


class ConsoleProgress:
    """Prints the events of one run to `stream`."""

    def __init__(
        self, stream: TextIO | None = None, *, live: bool | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._live = self._stream.isatty() if live is None else live
        self._now = now
        self._total = 0
        self._shown = 0  # width of the line that is being rewritten
        self._last = float("-inf")
        self._phase = ""

    def __call__(self, wire: Wire) -> None:
        handler = getattr(self, f"_on_{wire['type']}", None)
        if handler is not None:
            handler(int(wire["step"]), wire["data"])

    def line(self, text: str) -> None:
        """One line that stays."""
        self._clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the cursor at the start of an empty line."""
        self._clear()
        self._stream.flush()

    def _clear(self) -> None:
        if self._shown:
            self._stream.write("\r" + " " * self._shown + "\r")
            self._shown = 0

    def _progress(self, text: str, *, must: bool = False) -> None:
        """A line about how far it is: rewritten in a terminal, now and then elsewhere."""
        now = self._now()
        if not must and now - self._last < (_LIVE_EVERY_S if self._live else _PLAIN_EVERY_S):
            return
        self._last = now
        if not self._live:
            self.line(text)
            return
        text = text[: max(10, shutil.get_terminal_size().columns - 1)]
        self._stream.write("\r" + text + " " * max(0, self._shown - len(text)))
        self._stream.flush()
        self._shown = len(text)

    def _on_RunStarted(self, step: int, data: Wire) -> None:
        self._total = int(data["total_steps"])
        parts = ", ".join(data["parts"])
        self.line(
            f"Training {parts} on {data['pictures']} pictures for {self._total} steps "
            f"({data['device']}, {data['precision']})"
        )

    def _on_PhaseChanged(self, step: int, data: Wire) -> None:
        name, done, total, detail = data["phase"], data["done"], data["total"], data["detail"]
        if name in ("training", "saving"):
            self._phase = name
            return
        count = f" {done}/{total}" if total else ""
        new = name != self._phase
        self._phase = name
        text = f"{name}{count}" + (f": {detail}" if detail else "")
        self._progress(text, must=new or bool(total and done >= total))

    def _on_StepFinished(self, step: int, data: Wire) -> None:
        total = f"/{self._total}" if self._total else ""
        share = f" {100 * step / self._total:.0f}%" if self._total else ""
        rate = max((float(value) for value in data["lr"].values() if value is not None), default=0.0)
        memory = data["vram_gib"]
        fields = [
            f"step {step}{total}{share}",
            f"loss {_number(data['loss'])} (avg {_number(data['loss_avg'])})",
            f"{_number(data['seconds'], 2)} s/step",
            f"ETA {clock(data['eta_seconds'])}",
        ]
        if memory:
            fields.append(f"{memory:.1f} GiB")
        if data["rejected_steps"]:
            lately = f" ({100 * recent:.0f}% lately)" if (recent := data.get("rejected_share", 0.0)) else ""
            fields.append(f"{data['rejected_steps']} rejected{lately}")
        if data["loss_scale"] != 1.0:
            fields.append(f"scale {data['loss_scale']:g}")
        fields.append(f"lr {rate:.2e}")
        self._progress("  ".join(fields), must=step == self._total or (step == 1 and not self._live))

    def _on_StepRejected(self, step: int, data: Wire) -> None:
        if data.get("phase") == "CALIBRATE" and data.get("kind") == "OVERFLOW":
            self._progress(f"step {step}  looking for a loss scale: {data['loss_scale']:g} is too large")
            return
        where = f" in {data['where']}" if data.get("where") else ""
        self.line(f"step {step} rejected: {data['reason']}{where} ({data['in_a_row']} in a row)")

    def _on_Verdict(self, step: int, data: Wire) -> None:
        if data["severity"] != "info":
            self.line(f"step {step}: {data['sentence'] or data['kind']}")

    def _on_Intervention(self, step: int, data: Wire) -> None:
        self.line(f"step {step}: {data['action']}" + (f" ({data['reason']})" if data["reason"] else ""))

    def _on_ValidationFinished(self, step: int, data: Wire) -> None:
        self.line(f"step {step}: validation loss {_number(data['validation_loss'], 5)} ({data['pictures']} pictures)")

    def _on_PreviewReady(self, step: int, data: Wire) -> None:
        self.line(f"step {step}: preview {data['file']}")

    def _on_CheckpointSaved(self, step: int, data: Wire) -> None:
        self.line(f"step {step}: checkpoint {data['name']} ({size(data['bytes'])}, {_number(data['seconds'], 2)} s)")

    def _on_LoraSaved(self, step: int, data: Wire) -> None:
        final = "LoRA" if data["final"] else "LoRA so far"
        self.line(f"step {step}: {final} {data['file']} ({size(data['bytes'])}); {data['proof']}")

    def _on_Warned(self, step: int, data: Wire) -> None:
        word = "note" if data["topic"] in NOTE_TOPICS else "warning"
        self.line(f"{word}: {data['message']}")

    def _on_Resumed(self, step: int, data: Wire) -> None:
        self.line(f"resumed from {data['checkpoint']}")
        for difference in data["differences"]:
            self.line(f"  changed: {difference}")
        for name in data["passed_over"]:
            self.line(f"  passed over: {name}")

    def _on_RunFinished(self, step: int, data: Wire) -> None:
        rejected = f", {data['rejected']} rejected" if data["rejected"] else ""
        self.line(
            f"{data['status']}: {data['message']} [{data['applied']} applied steps{rejected}, {clock(data['seconds'])}]"
        )


def _number(value: float | None, digits: int = 4) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"
