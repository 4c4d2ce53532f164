"""Training Report: charts, words and the report page of a run."""

from __future__ import annotations

import hashlib
from typing import Any

from .. import trainer_core as core
from . import host
from .boundary import contained
from .graph_pictures import Shown, pixels_batch
from .handles import RUN, RunHandle
from .results import report_text
from .run_lists import find_run, run_lines, run_stamp
from .widgets import Declaration, choice, socket

LINKED = "the linked run"


class SafeScalerReport:
    CATEGORY = "Safe-Scaler"
    DESCRIPTION = "Shows what a run did: charts, a text in plain words, and the path of its report page."
    FUNCTION = "execute"
    OUTPUT_NODE = True
    RETURN_TYPES = ("IMAGE", "STRING", "STRING", "STRING")
    RETURN_NAMES = ("charts", "report", "report_path", "share_sheet")
    OUTPUT_TOOLTIPS = (
        "Loss, validation loss, gradient norm, learning rate: one picture each.",
        "What was done and what came of it, in words.",
        "Path of report.html, which opens in any browser without a network.",
        "What others need to use the LoRA, and what Civitai and Hugging Face ask for; also share.md in the run folder.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Declaration]]:
        return {
            "required": {
                "choose": choice([LINKED, *run_lines()], "An earlier run; used when no run is linked."),
            },
            "optional": {"run": socket(RUN, "The run of a Train node.")},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, choose: str | None = None) -> bool | str:
        return True

    @classmethod
    def IS_CHANGED(cls, choose: str = LINKED, **_: Any) -> str:
        return choose if choose == LINKED else run_stamp(choose)

    @contained
    def execute(self, choose: str = LINKED, run: RunHandle | None = None) -> dict[str, Any]:
        folder = chosen_run(choose, run)
        page = core.write_report(folder.path)
        pictures = core.chart_pictures(core.read_run(folder.path))
        text = report_text(folder, [])
        batch = pixels_batch(pictures) if pictures else host.nothing()
        share = core.write_share_sheet(folder.path).read_text(encoding="utf-8")
        shown = {"text": [text], "images": _shown(pictures, folder.run_id)}
        return {"ui": shown, "result": (batch, text, str(page), share)}


def chosen_run(choose: str, run: RunHandle | None) -> core.RunFolder:
    """The linked run, or the one chosen from the list."""
    if run is not None:
        return core.RunFolder(run.run_dir)
    if choose == LINKED:
        raise core.CheckpointError("No run: link the run output of a Train node, or choose one from the list.")
    return find_run(choose).folder


def _shown(pictures: list[Any], run_id: str) -> Shown:
    folder = host.temp_folder() / "safe_scaler"
    folder.mkdir(parents=True, exist_ok=True)
    shown: Shown = []
    for index, picture in enumerate(pictures):
        digest = hashlib.blake2b(picture.tobytes(), digest_size=4).hexdigest()
        name = f"chart-{run_id}-{index}-{digest}.png"
        picture.save(folder / name)
        shown.append({"filename": name, "subfolder": "safe_scaler", "type": "temp"})
    return shown
