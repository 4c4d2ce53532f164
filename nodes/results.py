"""What a run gives to a graph: LoRA name and weights, pictures, curve, report text. All of it small and on the CPU."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from .. import trainer_core as core
from . import host
from .graph_pictures import image_batch, pixels_batch
from .handles import RunHandle

log = logging.getLogger(__name__)


def lora_path(folder: core.RunFolder, outcome: core.RunOutcome) -> Path | None:
    """The LoRA file of an ended run. That of a stopped run is copied beside the finished ones, for the lists."""
    if outcome.lora is None:
        return None
    file = folder.path / outcome.lora
    if file.parent.resolve() == host.loras_folder().resolve():
        return file
    target = core.free_name(host.loras_folder(), file.stem, file.suffix)
    part = target.with_name(target.name + ".tmp")
    shutil.copyfile(file, part)
    os.replace(part, target)
    return target


def lora_name(file: Path) -> str:
    """The name under which ComfyUI's lists show the file."""
    return file.resolve().relative_to(host.loras_folder().resolve()).as_posix()


def lora_weights(file: Path) -> dict[str, Any]:
    """The file's tensors on the CPU, as ComfyUI's LORA_MODEL sockets take them."""
    import torch
    from safetensors.torch import load_file

    with torch.inference_mode(False):
        return load_file(str(file), device="cpu")


def preview_files(folder: core.RunFolder, *, newest_only: bool = True) -> list[Path]:
    """Preview pictures of a run, by step and prompt; with `newest_only` those of the last step that has any."""
    with core.open_readonly(folder.database_path) as record:
        rows = record.previews()
    if newest_only and rows:
        last = max(row["step"] for row in rows)
        rows = [row for row in rows if row["step"] == last]
    files = [folder.path / row["file"] for row in rows]
    return [file for file in files if file.is_file()]


def pictures_or_nothing(files: list[Path]) -> Any:
    """An IMAGE batch; without files something that keeps the nodes behind it from running."""
    return image_batch(files) if files else host.nothing()


def curves(folder: core.RunFolder, *, loss_only: bool = False) -> Any:
    """The run's charts as an IMAGE batch, the training loss first; nothing before the first step."""
    drawn = core.chart_pictures(core.read_run(folder.path))
    return pixels_batch(drawn[:1] if loss_only else drawn) if drawn else host.nothing()


def report_text(folder: core.RunFolder, notes: list[str]) -> str:
    """The run in plain words: what was done, what came of it, and what needs a look."""
    data = core.read_run(folder.path)
    lines = [f"Run {folder.run_id}", "", *core.summary_sentences(data)]
    if memory := core.memory_sentence(data):
        lines += ["", memory]
    for group in core.problem_groups(data):
        lines += ["", f"{group.severity}: {group.title}", *(f"  {line}" for line in group.lines[:12])]
        lines += [f"  {group.advice}"] if group.advice else []
    if notes:
        lines += ["", *notes]
    return "\n".join(lines)


def outputs(run: RunHandle, notes: list[str]) -> dict[str, Any]:
    """The tuple of the Train node, and what it shows."""
    folder = core.RunFolder(run.run_dir)
    assert run.lora is not None, "a run without a LoRA raises before"
    text = report_text(folder, notes)
    result = (
        lora_name(run.lora),
        str(run.lora),
        lora_weights(run.lora),
        pictures_or_nothing(preview_files(folder)),
        curves(folder, loss_only=True),
        run,
        text,
    )
    return {"result": result, "text": text, "files": preview_files(folder, newest_only=False)}
