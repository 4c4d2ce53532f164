"""A worker's other job: pictures of LoRA files at several strengths, without training anything.

The job folder has a `config.json` with `"job": "preview"`, the config whose model, preview and precision sections are
used, and `cells`: one `{file, strength, label}` for each column of the grid (`file` null = the base model alone). For
every cell all prompts are sampled with the same seeds. Events are those of a run; pictures lie in `previews/`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import TrainConfig
from .config_io import from_dict, to_dict
from .config_rules import problems
from .errors import ConfigError, TrainerError
from .events import EventBus, PhaseChanged, PreviewReady, RunFinished, RunStarted, Warned
from .runs.folder import RunFolder
from .runs.protocol import Commands

if TYPE_CHECKING:
    import torch

    from .events import Subscriber
    from .models import SDXLModel
    from .validation import PreviewPrompt, PreviewResult

JOB = "preview"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cell:
    """One column of the grid: a LoRA file (None = the base model alone) at a strength."""

    file: str | None
    strength: float
    label: str


def create_preview_job(folder: Path, config: TrainConfig, cells: Sequence[Cell]) -> RunFolder:
    """Write the job's folder. ConfigError for what is wrong with model, prompts or device; nothing is loaded."""
    relevant = ("model.", "preview.", "precision.", "run.device")
    if found := [problem for problem in problems(config) if problem.field.startswith(relevant)]:
        raise ConfigError(found)
    folder.mkdir(parents=True)
    job = RunFolder(folder)
    job.previews.mkdir()
    job.write_config({"job": JOB, "config": to_dict(config), "cells": [vars(cell) for cell in cells]})
    return job


def run(run_dir: str | Path, *, commands: Commands | None = None, sink: Subscriber | None = None) -> None:
    """Make the pictures of a job folder; how it went is told as the last event.

    Raises:
        TrainerError: the model or a LoRA file cannot be used.
    """
    import torch

    folder = RunFolder(run_dir)
    stored = folder.read_config()
    bus = EventBus(run_id=folder.run_id)
    if sink is not None:
        bus.subscribe(sink)
    control = commands or Commands()
    control.on_ack = bus.emit
    with torch.inference_mode(False), torch.no_grad():
        _Job(folder, stored, bus, control).run()


class _Job:
    def __init__(self, folder: RunFolder, stored: Mapping[str, Any], bus: EventBus, commands: Commands) -> None:
        from .device import choose_compute, choose_device

        self.folder = folder
        self.config = from_dict(stored["config"])
        self.cells = [Cell(**cell) for cell in stored["cells"]]
        self.bus = bus
        self.commands = commands
        self.device = choose_device(self.config.run.device)
        self.compute = choose_compute(self.config.precision.compute, self.device)
        self.made = 0
        self.failures: list[str] = []

    def run(self) -> None:
        from .validation.prompts import read_prompts, size_rule

        started = time.monotonic()
        self.bus.emit(PhaseChanged(phase="loading", detail=self.config.model.path))
        model = self._load()
        prompts, notes = read_prompts(self.config.preview, size_rule(model))
        for note in notes:
            self.bus.emit(Warned(topic="preview", message=note))
        total = len(prompts) * len(self.cells)
        self.bus.emit(
            RunStarted(total_steps=total, parts=(), device=str(self.device), precision=self.compute, pictures=0)
        )
        for number, cell in enumerate(self.cells):
            if self._stopped():
                break
            self._make(model, prompts, number, cell, total)
        self._finish(total, time.monotonic() - started)

    def _finish(self, total: int, seconds: float) -> None:
        if self._stopped():
            status, message = "stopped", f"Stopped after {self.made} of {total} pictures."
        elif self.failures:
            status, message = "failed", f"{len(self.failures)} of {total} pictures failed. {self.failures[0]}"
        else:
            status, message = "finished", f"Made {self.made} pictures."
        self.bus.emit(
            RunFinished(step=self.made, status=status, message=message, applied=0, rejected=0, seconds=seconds)
        )

    def _stopped(self) -> bool:
        self.commands.poll()
        return self.commands.stop_requested

    def _load(self) -> SDXLModel:
        import torch

        from .models import load_sdxl

        wanted = self.config.model
        terminal: Any = {"auto": "auto", "true": True, "false": False}[wanted.zero_terminal_snr]
        dtypes: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        return load_sdxl(
            wanted.path,
            vae=wanted.vae,
            config_dir=wanted.config_dir,
            dtype=dtypes[self.compute],
            device=self.device,
            prediction_type=wanted.prediction_type,
            zero_terminal_snr=terminal,
        )

    def _make(self, model: SDXLModel, prompts: list[PreviewPrompt], number: int, cell: Cell, total: int) -> None:
        from .networks.from_file import network_from_file
        from .networks.lora_file import load_lora
        from .optim import Precision
        from .validation import make_previews

        def tell(result: PreviewResult) -> None:
            self.made += 1
            if result.file is None:
                self.failures.append(result.failure or "A preview failed.")
                self.bus.emit(Warned(step=self.made, topic="preview", message=self.failures[-1]))
            else:
                name = result.file.relative_to(self.folder.path).as_posix()
                prompt = result.prompt
                self.bus.emit(
                    PreviewReady(step=number, file=name, prompt=prompt.text, index=result.index, seed=prompt.seed)
                )
            self.bus.emit(PhaseChanged(step=number, phase="previewing", done=self.made, total=total, detail=cell.label))

        network = None
        if cell.file is not None:
            network = network_from_file(model, load_lora(cell.file)).eval()
            network.set_multiplier(cell.strength)
            network.to(self.device)
            network.attach()
        try:
            make_previews(
                model,
                network,
                prompts,
                step=number,
                folder=self.folder.previews,
                max_token_length=self.config.dataset.max_token_length,
                should_stop=self._stopped,
                on_ready=tell,
                compute=Precision(self.config.precision, self.compute, self.device).autocast,
            )
        finally:
            if network is not None:
                network.detach()


def picture_of(folder: RunFolder, cell: int, prompt: int) -> Path:
    """The picture of one cell and prompt of a finished job. TrainerError when it is not there."""
    file = folder.previews / f"step-{cell:08d}-{prompt:02d}.png"
    if not file.is_file():
        raise TrainerError(f"The picture {file.name} of the preview job {folder.run_id} was not made.")
    return file
