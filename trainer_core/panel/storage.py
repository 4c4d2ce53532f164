"""Files of a run: its pictures, what they take on the disk, and deleting it. Everything stays inside the run folder."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from ..errors import ResourceError
from ..runs.folder import RunFolder
from ..runs.record import open_readonly
from .exchange import Refused

_PICTURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"RIFF": "image/webp"}
_PARTS = {"checkpoints": "checkpoints", "lora": "lora", "previews": "previews"}


def preview_file(folder: RunFolder, preview_id: str) -> tuple[Path, str]:
    """The picture of a preview and its type. Refused (404) when there is none, or it is no picture of this run.

    The record names the file; a record that was made elsewhere may name anything, so the place is checked.
    """
    missing = Refused(404, "no_such_preview", f"The run has no preview {preview_id[:40]!r}.")
    with open_readonly(folder.database_path) as record:
        row = next((row for row in record.previews() if f"{row['step']}-{row['index']}" == preview_id), None)
    if row is None:
        raise missing
    root = folder.previews.resolve()
    path = (folder.path / row["file"]).resolve()
    if not path.is_relative_to(root) or not path.is_file():
        raise missing
    with path.open("rb") as stream:
        start = stream.read(16)
    for mark, kind in _PICTURES.items():
        if start.startswith(mark):
            return path, kind
    raise missing


def disk_use(folder: RunFolder) -> dict[str, Any]:
    """Bytes of a run by part, and what the disk has free."""
    parts = dict.fromkeys((*_PARTS, "other"), 0)
    for directory, _, files in os.walk(folder.path):
        relative = Path(directory).relative_to(folder.path)
        part = _PARTS.get(relative.parts[0], "other") if relative.parts else "other"
        for name in files:
            try:
                parts[part] += os.lstat(os.path.join(directory, name)).st_size
            except OSError:
                continue  # it was pruned meanwhile
    return {"total": sum(parts.values()), "parts": parts, "free": shutil.disk_usage(folder.path).free}


def delete_run(folder: RunFolder) -> int:
    """Delete a run's folder; returns the bytes that became free. The final LoRA outside of it stays.

    It is renamed first, so that a run that is half deleted is never taken for a run.

    Raises:
        Refused: a process writes the run (409).
        ResourceError: files that cannot be deleted (open on Windows, rights).
    """
    if folder.is_locked():
        raise Refused(409, "running", f"The run {folder.run_id} is running. Stop it first.")
    size = int(disk_use(folder)["total"])
    trash = folder.path.with_name(f".trash-{folder.run_id}-{secrets.token_hex(2)}")
    try:
        os.rename(folder.path, trash)
        shutil.rmtree(trash)
    except OSError as error:
        raise ResourceError(
            f"The run {folder.run_id} could not be deleted: {error.strerror or error} ({error.filename}). "
            "Close programs that use its files and try again."
        ) from error
    return size
