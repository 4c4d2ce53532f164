"""`safe-scaler inspect PATH`: finds out what PATH is and lets the part that knows it explain it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .console import clock, size
from .errors import AdapterError, TrainerError
from .plain_text import parse_json

_LORA_MARKS = (".lora_down.", ".lora_up.", ".lora_A.", ".lora_B.")
_OTHER_MARKS = (".hada_w1", ".lokr_w1", ".oft_blocks", ".on_input", ".dora_scale", ".diff", ".a1.weight", ".lora_mid.")


def inspect_path(asked: str) -> tuple[dict[str, Any], str]:
    """Facts (JSON-safe, with `kind`) and a text about a LoRA, a base model, a checkpoint or a run.

    Raises:
        TrainerError: there is no such path, or what lies there is none of these (the message says what it is).
    """
    path = Path(asked).expanduser()
    if asked == "toy":
        return _model(asked)
    if not asked.strip():
        raise TrainerError("no path is given. Give a .safetensors file, a model folder, a run folder, or the word toy.")
    if not path.exists():
        raise TrainerError(f"there is no such file or folder: {asked}. Check the path.")
    if path.is_file():
        return _lora(path) if _is_lora(path) else _model(asked)
    if (path / "config.json").is_file() and (path / "run.db").is_file():
        return _run(path)
    if (path / "manifest.json").is_file():
        return _checkpoint(path)
    if (path / "unet").is_dir() or (path / "model_index.json").is_file():
        return _model(asked)
    return _runs_in(path)


def _is_lora(path: Path) -> bool:
    """Whether a safetensors header names LoRA tensors; everything unreadable is left to the model reader to name."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > 100_000_000:
                return False
            names = parse_json(file.read(length))
    except (OSError, ValueError):
        return False
    return isinstance(names, dict) and any(mark in name for name in names for mark in (*_LORA_MARKS, *_OTHER_MARKS))


def _lora(path: Path) -> tuple[dict[str, Any], str]:
    from .networks.inspect import inspect_lora
    from .networks.inspect_other import inspect_other

    try:
        found = inspect_lora(path)
    except AdapterError:
        found = inspect_other(path)
        if found is None:
            raise
    return found.to_dict(), found.text


def _model(path: str) -> tuple[dict[str, Any], str]:
    from .models import inspect_model

    info = inspect_model(path)
    vae = "with VAE" if info.has_vae else "without VAE"
    lines = [
        f"SDXL base model ({info.kind}, {vae}): {info.path}",
        f"  {size(info.size_bytes)}, prediction type {info.prediction_type}, "
        f"zero terminal SNR {'yes' if info.zero_terminal_snr else 'no'}, native size {info.native_size} px",
    ]
    lines += [f"  {part}: {count:,} weights, {info.dtypes.get(part, '?')}" for part, count in info.parameters.items()]
    lines += [f"  note: {note}" for note in info.notes]
    return {**info.to_json(), "kind": "model", "layout": info.kind}, "\n".join(lines)


def _checkpoint(path: Path) -> tuple[dict[str, Any], str]:
    from .checkpoints.manifest import Damaged, check_sizes, read_manifest

    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
    except Damaged as error:
        raise TrainerError(f"{path} is a damaged checkpoint: {error}. Resume from another one.") from error
    total = sum(entry.bytes for entry in manifest.files.values())
    facts = {
        "kind": "checkpoint",
        "path": str(path),
        "run_id": manifest.run_id,
        "step": manifest.step,
        "bytes": total,
        "files": {name: entry.bytes for name, entry in manifest.files.items()},
        "created": manifest.created,
        "parent": manifest.parent,
        "pack_version": manifest.pack_version,
    }
    lines = [
        f"checkpoint of run {manifest.run_id} at step {manifest.step}: {path}",
        f"  {size(total)} in {len(manifest.files)} files, written by version {manifest.pack_version}",
        f"  go on from the newest one with: safe-scaler resume {path.parent.parent}",
    ]
    return facts, "\n".join(lines)


def _run(path: Path) -> tuple[dict[str, Any], str]:
    from .runs.folder import RunFolder
    from .runs.record import open_readonly
    from .runs.registry import describe

    info = describe(RunFolder(path))
    with open_readonly(path / "run.db") as record:
        summary = record.summary()
        warnings = [row["data"]["message"] for row in record.events("Warned")]
        checkpoints = [str(row["name"]) for row in record.checkpoints()]
    facts = {"kind": "run", "path": str(path), "state": info.state, **summary, "checkpoints": checkpoints}
    lines = [
        f"run {info.run_id} ({info.state}): {path}",
        f"  step {summary['step']} of {summary['total_steps'] or '?'}, {summary['applied']} applied, "
        f"{summary['rejected']} rejected, {clock(summary['seconds'])}",
        f"  trained: {', '.join(summary['parts']) or '?'} on {summary['pictures']} pictures "
        f"({summary['device']}, {summary['precision']})",
    ]
    if summary["loss_avg"] is not None:
        lines.append(f"  loss (average) {summary['loss_avg']:.4f}")
    if summary["best_validation"] is not None:
        best = summary["best_validation"]
        lines.append(f"  best validation loss {best:.5f} at step {summary['best_validation_step']}")
    if summary["lora"]:
        lines.append(f"  LoRA: {summary['lora']}")
    if checkpoints:
        lines.append(f"  checkpoints: {', '.join(checkpoints)}")
    lines += [f"  warning: {message}" for message in dict.fromkeys(warnings)]
    if summary["message"]:
        lines.append(f"  {summary['message']}")
    if info.problem:
        lines.append(f"  problem: {info.problem}")
    return facts, "\n".join(lines)


def _runs_in(path: Path) -> tuple[dict[str, Any], str]:
    from .runs.registry import list_runs

    runs = list_runs(path)
    if not runs:
        raise TrainerError(
            f"{path} is neither a diffusers model, nor a run, nor a checkpoint, and holds no runs. "
            "Give a .safetensors file, a model folder, a run folder, or an output folder."
        )
    facts = [{"run_id": run.run_id, "path": str(run.folder.path), "state": run.state, "step": run.step} for run in runs]
    lines = [f"{len(runs)} runs in {path}, newest first:"]
    lines += [f"  {run['run_id']}  {run['state']}  step {run['step']}  {run['path']}" for run in facts]
    return {"kind": "runs", "path": str(path), "runs": facts}, "\n".join(lines)
