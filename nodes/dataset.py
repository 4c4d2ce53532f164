"""Training Dataset: pictures and captions, from a folder or from the graph, with a scan before anything is trained."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from .. import trainer_core as core
from . import host
from .boundary import contained
from .graph_pictures import Shown, thumbnails, write_pictures
from .handles import DATASET, MODEL, DatasetHandle, ModelHandle
from .scans import remember
from .widgets import Declaration, setting, socket, text

TOY = "toy"
_MOST_THUMBNAILS = 12
_CAPTIONS_KEPT = 4

_PLAIN = {
    "repeats": "dataset.repeats",
    "shuffle_caption": "dataset.shuffle_caption",
    "keep_tokens": "dataset.keep_tokens",
    "caption_dropout": "dataset.caption_dropout",
    "flip": "dataset.flip",
    "recursive": "dataset.recursive",
    "buckets": "bucket.enabled",
    "validation_split": "validation.split",
    "max_token_length": "dataset.max_token_length",
}
"""Inputs that are a config field under a short name."""


class SafeScalerDataset:
    CATEGORY = "Safe-Scaler"
    DESCRIPTION = (
        "Pictures and captions to train on. Every picture is read in full here, so that what cannot be used is named "
        "before the training starts."
    )
    FUNCTION = "execute"
    INPUT_IS_LIST = True
    OUTPUT_NODE = True
    RETURN_TYPES = (DATASET, "STRING")
    RETURN_NAMES = ("dataset", "scan_report")
    OUTPUT_TOOLTIPS = (
        "The data set, for Safe-Scaler Train.",
        "What the scan found: pictures, buckets, and everything that is wrong, by file.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Declaration]]:
        return {
            "required": {
                "folder": text(
                    "",
                    "Folder of pictures with caption files of the same name. A relative path starts in ComfyUI's input "
                    "folder. The word toy gives the built-in pictures. Leave it empty when pictures come by link.",
                ),
                "trigger_word": text(
                    "", "Word that calls what is learnt; put before every caption and written into the LoRA file."
                ),
                "resolution": (
                    "INT",
                    {
                        "default": 0,
                        "min": 0,
                        "max": 4096,
                        "step": 8,
                        "tooltip": "Training size in pixels; 0 = the model's own (1024 for SDXL).",
                    },
                ),
                "repeats": setting("dataset.repeats"),
                "validation_split": setting(
                    "validation.split", tooltip="Share of the pictures held out to measure the validation loss."
                ),
            },
            "optional": {
                "model": socket(MODEL, "The base model, so that the scan uses its own picture size."),
                "images": socket("IMAGE", "Pictures from the graph instead of a folder: one, a batch, or a list."),
                "captions": socket(
                    "STRING",
                    "Captions of the linked pictures, as a tagger gives them: one each, or one for all.",
                    forceInput=True,
                ),
                "buckets": setting("bucket.enabled"),
                "shuffle_caption": setting("dataset.shuffle_caption"),
                "keep_tokens": setting("dataset.keep_tokens"),
                "caption_dropout": setting("dataset.caption_dropout"),
                "flip": setting("dataset.flip"),
                "recursive": setting("dataset.recursive"),
                "max_token_length": setting("dataset.max_token_length"),
                "prior_folder": text("", "Folder of prior (regularisation) pictures; empty = none.", advanced=True),
            },
        }

    @classmethod
    def IS_CHANGED(cls, folder: Any = "", prior_folder: Any = "", **_: Any) -> str:
        """Names, sizes and times of the files: a changed picture or caption is scanned again."""
        return " ".join(_stamp(_one(name)) for name in (folder, prior_folder) if _one(name))

    @contained
    def execute(self, **lists: Any) -> dict[str, Any]:
        images, captions = lists.pop("images", None), lists.pop("captions", None)
        inputs = {name: _one(values) for name, values in lists.items()}
        model: ModelHandle | None = inputs.pop("model", None)
        settings = _settings(inputs, images, captions, model)
        config, _ = core.load_config(None, settings, check=False)
        scan = _scan(config, 1024 if model is None else model.native_size)
        if scan.error:
            raise core.DatasetError(f"{scan.error}\n\n{scan.summary()}", scan.folder)
        handle = DatasetHandle(
            title=Path(scan.folder).name,
            pictures=len(scan.items),
            digest=scan.content_digest(),
            captions=tuple(
                dict.fromkeys(_caption(item.caption, settings) for item in list(scan.items)[:_CAPTIONS_KEPT])
            ),
            settings=settings,
        )
        summary = scan.summary()
        identity = remember(config, handle.title, handle.pictures, summary)
        shown = {"text": [summary], "images": _thumbnails(scan), "data_set": [identity]}
        return {"ui": shown, "result": (handle, summary)}


def _one(value: Any) -> Any:
    """The single value of a widget, which ComfyUI wraps into a list for nodes that take lists."""
    return (value[0] if value else None) if isinstance(value, list) else value


def _settings(
    inputs: dict[str, Any], images: list[Any] | None, captions: list[str] | None, model: ModelHandle | None
) -> dict[str, Any]:
    settings = {key: inputs[name] for name, key in _PLAIN.items() if name in inputs}
    settings["dataset.path"], prior = _folders(str(inputs.get("folder") or ""), images, captions)
    if prior or inputs.get("prior_folder"):
        settings["dataset.prior_path"] = str(prior or host.resolve_input(str(inputs["prior_folder"])))
    if inputs.get("resolution"):
        settings["dataset.resolution"] = (inputs["resolution"], inputs["resolution"])
    if word := str(inputs.get("trigger_word") or "").strip():
        settings["dataset.caption_prefix"] = f"{word}, "
        settings["metadata.trigger_phrase"] = word
    return settings


def _folders(folder: str, images: list[Any] | None, captions: list[str] | None) -> tuple[str, str | None]:
    """The folder of pictures, and that of prior pictures where the choice brings one."""
    folder = folder.strip().strip('"')
    store = host.output_folder() / "safe_scaler" / "pictures"
    if images is not None:
        if folder:
            raise core.DatasetError(
                "Pictures come by link and a folder is given too. Empty the folder, or cut the link."
            )
        return str(write_pictures(images, captions or [], store)), None
    if captions is not None:
        raise core.DatasetError("Captions are linked without images. Link the images they belong to, or cut the link.")
    if not folder:
        raise core.DatasetError("No pictures: give a folder, link images, or write toy for the built-in ones.")
    if folder.lower() == TOY:
        lesson = core.write_teaching_set(store / "toy")
        return str(lesson.concept_folder), str(lesson.prior_folder)
    return str(host.resolve_input(folder)), None


def _scan(config: core.TrainConfig, native_size: int) -> Any:
    bar = host.progress_bar()
    try:
        return core.examine_dataset(
            config.dataset,
            config.bucket,
            native_size,
            progress=lambda done, total, _file: bar(done, total),
            should_stop=host.interrupted,
            cache_dir=host.output_folder() / "safe_scaler" / "cache",
        )
    except core.StopRequested:
        host.raise_if_interrupted()
        raise


def _caption(caption: str, settings: dict[str, Any]) -> str:
    return f"{settings.get('dataset.caption_prefix', '')}{caption}"


def _thumbnails(scan: Any) -> Shown:
    items = list(scan.items)
    files = [Path(item.path) for item in items[:: max(1, len(items) // _MOST_THUMBNAILS)][:_MOST_THUMBNAILS]]
    return thumbnails([file for file in files if file.is_file()], f"data-{scan.content_digest()[:12]}")


def _stamp(folder: str) -> str:
    if not folder or folder.strip().lower() == TOY:
        return folder
    root = host.resolve_input(folder.strip().strip('"'))
    digest = hashlib.blake2b(digest_size=8)
    for place, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files):
            try:
                found = os.stat(os.path.join(place, name))
            except OSError:
                continue
            digest.update(f"{place}/{name} {found.st_mtime_ns} {found.st_size}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
