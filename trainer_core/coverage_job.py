"""A worker's job without training: which layers a config's adapters would sit on, from the model's header alone.

The job folder has a `config.json` with `"job": "coverage"` and the config; the result is `coverage.json` and
`coverage.png` in the folder. Nothing is probed: gradients are looked at when a run begins (`coverage_check.py`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import TrainConfig, trained_parts
from .config_io import from_dict, to_dict
from .events import EventBus, PhaseChanged, RunFinished
from .runs.folder import RunFolder
from .runs.protocol import Commands

if TYPE_CHECKING:
    from .events import Subscriber

JOB = "coverage"
JSON_NAME, PNG_NAME = "coverage.json", "coverage.png"


def create_coverage_job(folder: Path, config: TrainConfig) -> RunFolder:
    """Write the job's folder."""
    folder.mkdir(parents=True)
    job = RunFolder(folder)
    job.write_config({"job": JOB, "config": to_dict(config)})
    return job


def read_coverage(folder: RunFolder) -> dict[str, Any]:
    """What the job found: `text` (a table), `blocks`, `unreached`."""
    return json.loads((folder.path / JSON_NAME).read_text(encoding="utf-8"))


def run(run_dir: str | Path, *, commands: Commands | None = None, sink: Subscriber | None = None) -> None:
    """Do the job; how it went is told as the last event.

    Raises:
        TrainerError: the model cannot be used, or nothing would be trained.
    """
    from .diagnostics.coverage_picture import coverage_picture
    from .models.outline import outline_sdxl
    from .networks import create_network
    from .networks.coverage import measure_coverage

    folder = RunFolder(run_dir)
    config = from_dict(folder.read_config()["config"])
    bus = EventBus(run_id=folder.run_id)
    if sink is not None:
        bus.subscribe(sink)
    bus.emit(PhaseChanged(phase="loading", detail=config.model.path))
    model = outline_sdxl(config.model.path, vae=config.model.vae, config_dir=config.model.config_dir)
    # PiSSA starts from the base weights, which are not here; where adapters sit does not depend on their first values.
    lora = replace(config.lora, init="default", weights=None)
    network = create_network(model, lora, trained_parts=trained_parts(config), seed=0)
    report = measure_coverage(model, network, probe=False)
    result = {**report.to_dict(), "text": report.text}
    (folder.path / JSON_NAME).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    coverage_picture(report).save(folder.path / PNG_NAME)
    adapters = sum(block.adapters for block in report.blocks)
    bus.emit(RunFinished(status="finished", message=f"{adapters} adapters.", applied=0, rejected=0))
