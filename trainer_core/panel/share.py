"""What one needs to share a LoRA: its facts, a model card, and the fields that Civitai's upload page asks for.

`full` tells how it was trained, with the preview prompts; `minimal` leaves out prompts (they may be captions) and every
name of a file but the LoRA's own. Neither holds a path.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ..runs.folder import RunFolder
from ..runs.record import RunRecord, open_readonly
from .exchange import Refused
from .places import bare_name

DETAIL = ("full", "minimal")

_SHORT_HASH = 10
"""Digits of the SHA-256 that A1111 and Civitai call AutoV2."""

Row = dict[str, Any]


def share_sheet(folder: RunFolder, detail: str) -> Row:
    """`{file, bytes, sha256, auto_v2, facts: [[name, value]], civitai: [[field, value]], model_card}`.

    Refused with 400 for an unknown `detail`, 404 when the run has no LoRA file (any more).
    """
    if detail not in DETAIL:
        raise Refused(400, "bad_query", f"metadata must be {' or '.join(DETAIL)}, got {detail[:40]!r}.")
    stored = folder.read_config()
    config: Row = stored.get("config", {})
    with open_readonly(folder.database_path) as record:
        path = _lora_file(folder, record, str(stored.get("final_lora", "")))
        summary = record.summary()
    sha256 = _sha256(path)
    facts = _facts(config, summary, full=detail == "full")
    table = dict(facts)
    sheet: Row = {
        "file": path.name,
        "bytes": path.stat().st_size,
        "sha256": sha256,
        "auto_v2": sha256[:_SHORT_HASH].upper(),
        "facts": facts,
        "civitai": _civitai(config, table),
    }
    return {**sheet, "model_card": _model_card(sheet, config, table)}


def _lora_file(folder: RunFolder, record: RunRecord, final: str) -> Path:
    """The newest LoRA of the run that is still there: the final one, else the last that was saved on the way."""
    places = [Path(final)] if final else []
    for event in reversed(record.events("LoraSaved")):
        name = str(event["data"]["file"])
        # The record may come from elsewhere: beside the final file only the run's own folder is looked into.
        places.append(folder.loras / bare_name(name))
    for place in places:
        if place.suffix == ".safetensors" and place.is_file():
            return place
    raise Refused(404, "no_lora", "The run has no LoRA file to share: none was saved yet, or it was moved.")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _facts(config: Row, summary: Row, *, full: bool) -> list[list[str]]:
    lora, optimizer, data = (config.get(name, {}) for name in ("lora", "optimizer", "dataset"))
    prefix = str(data.get("caption_prefix") or "").strip(", ")
    trigger = config.get("metadata", {}).get("trigger_phrase") or prefix
    rank = lora.get("rank")
    alpha = lora.get("alpha") or (rank / 2 if rank else None)
    rows = [
        ("Trigger words", trigger),
        ("Steps", summary["applied"]),
        ("Pictures", summary["pictures"]),
        ("Rank", rank),
        ("Alpha", alpha),
        ("Trained parts", ", ".join(_PARTS.get(str(part), str(part)) for part in summary["parts"])),
        ("Learning rate", optimizer.get("learning_rate")),
        ("Optimizer", optimizer.get("type")),
        ("Schedule", config.get("schedule", {}).get("type")),
        ("Batch size", (data.get("batch_size") or 1) * (config.get("gradient", {}).get("accumulation") or 1)),
        ("Noise offset", config.get("objective", {}).get("noise_offset") or None),
        ("Min-SNR gamma", config.get("objective", {}).get("min_snr_gamma")),
        ("Best validation loss", _best(summary)),
    ]
    if full:
        rows.insert(1, ("Base model", Path(bare_name(str(config.get("model", {}).get("path") or ""))).stem))
        rows.append(("Preview prompts", " | ".join(config.get("preview", {}).get("prompts") or ())))
    return [[name, _text(value)] for name, value in rows if value not in (None, "", [])]


_PARTS = {"unet": "UNet", "te1": "text encoder 1", "te2": "text encoder 2"}


def _best(summary: Row) -> str | None:
    if summary["best_validation"] is None:
        return None
    return f"{summary['best_validation']:.4g} at step {summary['best_validation_step']}"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _civitai(config: Row, table: dict[str, str]) -> list[list[str]]:
    """The fields of Civitai's upload form that a program can fill in; rights and content are for the person."""
    rows = [
        ("Name", str(config.get("run", {}).get("output_name") or "")),
        ("Type", "LoRA"),
        ("Base model", "SDXL 1.0"),
        ("Trigger words", table.get("Trigger words", "")),
        ("Training steps", table.get("Steps", "")),
        ("Clip skip", "2 (SDXL's own; nothing to set)"),
        ("Recommended strength", "1 (the strength it was trained and previewed at)"),
    ]
    return [[name, value] for name, value in rows if value]


def _model_card(sheet: Row, config: Row, table: dict[str, str]) -> str:
    name = str(config.get("run", {}).get("output_name") or "LoRA")
    trigger = table.get("Trigger words", "")
    head = ["---", "tags:", "- text-to-image", "- lora", "- stable-diffusion-xl"]
    if trigger:
        head.append(f"instance_prompt: {_quoted(trigger)}")
    lines = [*head, "---", "", f"# {name}", "", "An SDXL LoRA trained with Safe-Scaler."]
    if trigger:
        lines += ["", f"Trigger words: `{trigger.replace('`', '')}`"]
    lines += ["", "| | |", "|---|---|"]
    lines += [f"| {fact} | {_cell(value)} |" for fact, value in sheet["facts"] if fact != "Trigger words"]
    lines += ["", f"File: `{sheet['file']}`, SHA-256 `{sheet['sha256']}` (AutoV2 {sheet['auto_v2']})", ""]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """A YAML string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{" ".join(escaped.split())}"'


def _cell(text: str) -> str:
    """Text for a cell of a Markdown table: nothing in it can end the cell or begin markup."""
    for mark in "\\`|<>[]*_":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
