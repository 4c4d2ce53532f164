"""The run's own look at its network before the first step: which adapters learn. Kept in the run folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from .events import EventBus, PhaseChanged, Warned
from .networks import Network
from .networks.coverage import CoverageReport, measure_coverage, require_reached

if TYPE_CHECKING:
    from .models import SDXLModel
    from .runs.folder import RunFolder

JSON_NAME, PICTURE_NAME = "coverage.json", "coverage.svg"


def check_coverage(
    folder: RunFolder, model: SDXLModel, network: Network, *, live_text: bool, bus: EventBus
) -> CoverageReport | None:
    """Probe the network with two small passes, store the result, and say what is broken. Weights, gradients and random
    streams are as before. A run that goes on from a checkpoint was looked at when it began: None.

    Raises:
        AdapterError: a part that is to be trained is not reached by any gradient. The result is stored before that.
    """
    target = folder.path / JSON_NAME
    if target.is_file() and any(folder.checkpoints.glob("step-*")):
        return None
    bus.emit(PhaseChanged(phase="loading", detail="which adapters learn"))
    report = measure_coverage(model, network, live_text=live_text)
    target.write_text(json.dumps({**report.to_dict(), "text": report.text}, indent=1) + "\n", encoding="utf-8")
    (folder.path / PICTURE_NAME).write_text(report.svg(), encoding="utf-8")
    require_reached(report)
    if report.broken:
        blocks = ", ".join(f"{row.part} {row.block}" for row in report.broken)
        missed = sum(row.adapters - (row.reached or 0) for row in report.broken)
        message = f"{missed} adapters got no gradient in a probe before training (in {blocks}). See {PICTURE_NAME}."
        bus.emit(Warned(topic="coverage", message=message))
    return report
