"""Preview LoRA: pictures of a LoRA at several strengths and steps, sampled by the worker with our own sampler."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from .. import trainer_core as core
from . import host
from .boundary import contained
from .contact_sheet import contact_sheet
from .graph_pictures import image_batch, pixels_batch, shown_files
from .handles import MODEL, RUN, ModelHandle, RunHandle
from .widgets import Declaration, choice, setting, socket, text

LINKED = "the linked run"
LAST, EVERY = "last", "every saved step"
_MOST_CELLS = 64


class SafeScalerPreview:
    CATEGORY = "Safe-Scaler"
    DESCRIPTION = (
        "Samples prompts with a LoRA at several strengths and, for a run, at every saved step, with the same seeds: "
        "a grid to choose by. Works for the toy too, which ComfyUI's own sampler cannot load."
    )
    FUNCTION = "execute"
    OUTPUT_NODE = True
    RETURN_TYPES = ("IMAGE", "IMAGE", "STRING")
    RETURN_NAMES = ("images", "grid", "labels")
    OUTPUT_TOOLTIPS = (
        "All pictures as a batch: strength after strength, prompts in order.",
        "One sheet: a column for each LoRA and strength, a row for each prompt.",
        "What each column shows, one line each.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Declaration]]:
        return {
            "required": {
                "lora": choice([LINKED, *host.file_names("loras")], "A LoRA file; used when no run is linked."),
                "prompts": text("", "Prompts, one a line, with flags such as --w 1024 --d 7.", lines=True),
                "strengths": text("0, 1", "Strengths of the LoRA, with commas; 0 is the base model alone."),
                "steps_shown": choice([LAST, EVERY], "Which saved LoRA files of a linked run are shown."),
                "sampling_steps": setting("preview.steps"),
                "guidance": setting("preview.guidance"),
                "sampler": setting("preview.sampler"),
                "preview_seed": setting("preview.seed"),
            },
            "optional": {
                "run": socket(RUN, "The run of a Train node."),
                "model": socket(MODEL, "The base model; unlinked = the one of the run."),
                "device": choice(
                    ["auto", *host.devices()], "Which device samples; auto = the first GPU.", advanced=True
                ),
            },
        }

    @classmethod
    def VALIDATE_INPUTS(cls, lora: str | None = None) -> bool | str:
        return True  # the list may be older than the file; execute says what is gone

    @classmethod
    def IS_CHANGED(cls, lora: str = LINKED, **_: Any) -> str:
        return host.file_stamp("loras", lora)

    @contained
    def execute(
        self,
        lora: str,
        prompts: str,
        strengths: str,
        run: RunHandle | None = None,
        model: ModelHandle | None = None,
        **inputs: Any,
    ) -> dict[str, Any]:
        from .following import work

        lines = [line.strip() for line in prompts.splitlines() if line.strip()]
        cells = grid_cells(lora_choices(lora, run, inputs["steps_shown"]), read_strengths(strengths))
        if not lines:
            raise core.ConfigError([core.Problem("prompts", "", "there is none", "Write at least one prompt.")])
        config = _config(lines, run, model, inputs)
        folder = host.temp_folder() / "safe_scaler" / f"preview-{secrets.token_hex(6)}"
        job = core.create_preview_job(folder, config, cells)
        host.free_models()
        outcome = work(job.path)
        host.raise_if_interrupted()
        if outcome.status != "finished":
            raise core.TrainerError(f"The pictures could not be made: {outcome.message} (log: {job.log_path})")
        files = [core.picture_of(job, c, p) for c in range(len(cells)) for p in range(len(lines))]
        labels = [cell.label for cell in cells]
        sheet = contact_sheet(files, columns=labels, rows=lines)
        result = (image_batch(files), pixels_batch([sheet]), "\n".join(labels))
        return {"ui": {"images": shown_files(files), "text": labels}, "result": result}


def lora_choices(lora: str, run: RunHandle | None, steps_shown: str) -> list[tuple[str, Path]]:
    """(title, file) of what is to be shown, in order of steps."""
    if run is None:
        file = None if lora == LINKED else host.full_path("loras", lora)
        if file is None:
            raise core.AdapterError(f"No LoRA: {lora!r} is no file of the list, and no run is linked.")
        return [(file.stem, file)]
    files = core.lora_files(core.RunFolder(run.run_dir))
    if steps_shown == LAST or not files:
        if run.lora is None or not run.lora.is_file():
            raise core.AdapterError(f"The LoRA of run {run.run_id} is gone.")
        return [(f"step {run.step}", run.lora)]
    return [(f"step {step}", file) for step, file in files.items()]


def read_strengths(written: str) -> list[float]:
    """Numbers between commas. ConfigError names the word that is none."""
    try:
        found = [float(word) for word in written.replace(";", ",").split(",") if word.strip()]
    except ValueError as error:
        why = f"holds something that is no number ({error})"
        raise core.ConfigError([core.Problem("strengths", written, why, "Write for example: 0, 0.5, 1")]) from None
    return list(dict.fromkeys(found)) or [1.0]


def grid_cells(loras: list[tuple[str, Path]], strengths: list[float]) -> list[core.PreviewCell]:
    """A column for each file and strength; the base model alone comes once, first."""
    cells = [core.PreviewCell(None, 0.0, "base model")] if 0.0 in strengths else []
    for title, file in loras:
        cells += [core.PreviewCell(str(file), s, f"{title}, strength {s:g}") for s in strengths if s != 0.0]
    if len(cells) > _MOST_CELLS:
        why = f"{len(cells)} columns are more than {_MOST_CELLS}"
        raise core.ConfigError([core.Problem("strengths", strengths, why, "Take fewer strengths or steps.")])
    return cells


def _config(
    prompts: list[str], run: RunHandle | None, model: ModelHandle | None, inputs: dict[str, Any]
) -> core.TrainConfig:
    if model is None and run is not None and run.model is not None:
        model = run.model
    if model is None:
        raise core.ConfigError([core.Problem("model", None, "no base model is known", "Link Load SDXL to model.")])
    settings = {
        **model.settings,
        "preview.prompts": tuple(prompts),
        "preview.steps": inputs["sampling_steps"],
        "preview.guidance": inputs["guidance"],
        "preview.sampler": inputs["sampler"],
        "preview.seed": inputs["preview_seed"],
        "run.device": inputs.get("device", "auto"),
    }
    config, _ = core.load_config(None, settings, check=False)
    return config
