"""Safe-Scaler Train: writes a run, frees the device, follows the worker, and hands the results to the graph."""

from __future__ import annotations

from typing import Any

from .. import trainer_core as core
from . import host
from .boundary import contained
from .choosing import CONTINUE, choose_run
from .composing import compose
from .graph_pictures import shown_files
from .handles import (
    CHECKPOINT,
    DATASET,
    LORA_NAME,
    MODEL,
    MONITOR,
    RUN,
    TARGETS,
    CheckpointHandle,
    DatasetHandle,
    ModelHandle,
    MonitorHandle,
    RunHandle,
    TargetsHandle,
)
from .results import lora_path, outputs
from .train_inputs import optional_inputs, required_inputs
from .widgets import Declaration

_stops: dict[str, int] = {}
"""Node id -> how often its run was stopped early with the results kept; makes the next Run go on instead of cached."""


class SafeScalerTrain:
    CATEGORY = "Safe-Scaler"
    DESCRIPTION = (
        "Trains the LoRA in a process of its own and waits for it. Cancel stops it with a checkpoint and a usable "
        "LoRA; pressing Run again goes on from there. All memory comes back when it ends."
    )
    FUNCTION = "execute"
    OUTPUT_NODE = True
    RETURN_TYPES = (LORA_NAME, "STRING", "LORA_MODEL", "IMAGE", "IMAGE", RUN, "STRING")
    RETURN_NAMES = ("lora_name", "lora_path", "lora_model", "validation_images", "loss_curve", "run", "report")
    OUTPUT_TOOLTIPS = (
        "Name of the LoRA file, for the lora_name input of LoraLoader.",
        "Full path of the LoRA file.",
        "The LoRA's weights, for Load LoRA Model.",
        "Previews of the last step that made some, as a batch.",
        "The training loss as a picture.",
        "The run, for Training Report and Preview LoRA.",
        "What was done and what came of it, in words.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:
        sockets: dict[str, Declaration] = {
            "model": (MODEL, {"tooltip": "The base model, from Load SDXL."}),
            "dataset": (DATASET, {"tooltip": "Pictures and captions, from Training Dataset."}),
            "targets": (TARGETS, {"tooltip": "The layers to train, from Configure LoRA Targets."}),
        }
        links: dict[str, Declaration] = {
            "monitor": (MONITOR, {"tooltip": "Rules by which steps are judged, and the node that shows them."}),
            "resume": (
                CHECKPOINT,
                {"tooltip": "A checkpoint to go on from; used when start is 'continue'.", "lazy": True},
            ),
        }
        return {
            "required": {**sockets, **required_inputs()},
            "optional": {**links, **optional_inputs()},
            "hidden": {"unique_id": "UNIQUE_ID", "extra_pnginfo": "EXTRA_PNGINFO"},
        }

    @classmethod
    def IS_CHANGED(cls, unique_id: Any = "", **_: Any) -> int:
        return _stops.get(str(unique_id), 0)

    def check_lazy_status(self, start: str = CONTINUE, **inputs: Any) -> list[str]:
        """The resume branch runs only when it is used."""
        return ["resume"] if start == CONTINUE and "resume" in inputs and inputs["resume"] is None else []

    @contained
    def execute(
        self,
        model: ModelHandle,
        dataset: DatasetHandle,
        targets: TargetsHandle,
        unique_id: str = "",
        monitor: MonitorHandle | None = None,
        resume: CheckpointHandle | None = None,
        start: str = CONTINUE,
        extra_pnginfo: dict[str, Any] | None = None,
        **inputs: Any,
    ) -> dict[str, Any]:
        from .following import follow

        config, notes = compose(inputs, model, dataset, targets, monitor)
        nodes = [str(unique_id), *([monitor.node_id] if monitor else [])]
        graph = host.graph_id(extra_pnginfo)
        extra: dict[str, Any] = {"data_digest": dataset.digest, "shown_in": {"graph_id": graph, "node_ids": nodes}}
        if host.keeps_metadata() and not config.metadata.minimal:
            extra["workflow"] = (extra_pnginfo or {}).get("workflow")
        chosen = choose_run(config, notes, extra, start, resume)
        host.free_models()
        outcome = follow(chosen.folder.path, str(unique_id), monitor.node_id if monitor else None, graph)
        lora = lora_path(chosen.folder, outcome)
        host.raise_if_interrupted()
        run = _ended(chosen.folder, outcome, lora, model)
        if outcome.status == "stopped":
            _stops[str(unique_id)] = _stops.get(str(unique_id), 0) + 1
        said = [chosen.note] if chosen.note else []
        if outcome.restarts:
            said.append(f"The worker was started again {outcome.restarts} times; the result is the unbroken run's.")
        made = outputs(run, said)
        pictures = shown_files(made["files"])
        return {"ui": {"images": pictures, "text": [made["text"]]}, "result": made["result"]}


def _ended(folder: core.RunFolder, outcome: core.RunOutcome, lora: Any, model: ModelHandle) -> RunHandle:
    """The handle of a run that left a LoRA; an error that says why otherwise."""
    if outcome.status == "failed":
        raise core.TrainerError(f"{outcome.message}\nRun {folder.run_id}; its log: {folder.log_path}")
    if lora is None:
        raise core.TrainerError(f"There is no LoRA: {outcome.message} (run {folder.run_id})")
    return RunHandle(folder.path, outcome.status, outcome.step, lora, model)
