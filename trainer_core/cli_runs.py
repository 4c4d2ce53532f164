"""Which run a command line means."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config_fields import FIELDS
from .errors import ConfigError, Problem


def find_run(asked: str | Path) -> Path:
    """The run folder that `asked` names or holds; raises `ConfigError` where there is none."""
    from .runs.registry import list_runs

    fix = "Give a folder such as output/safe_scaler/20260131-120000-ab12."
    path = Path(asked).expanduser()
    if path.name == "config.json":
        path = path.parent
    if (path / "config.json").is_file():
        return path
    runs = list_runs(path) if path.is_dir() else []
    if not runs:
        why = "there is no such folder"
        if path.exists():
            why = "is no run folder and holds no runs" if path.is_dir() else "is a file, not a run folder"
        raise ConfigError([Problem("RUN", str(path), why, fix)])
    print(f"newest run in {path}: {runs[0].folder.path}")
    return runs[0].folder.path


def run_to_resume(asked: str, settings: Mapping[str, Any], notes: list[str]) -> Path | None:
    """The run that `--resume_from_checkpoint` means; `settings`: what file, preset and flags ask for, by
    `section.field`. `latest` without any run starts a new one, and says so in `notes`."""
    from .runs.registry import list_runs

    if asked != "latest":
        return find_run(asked)
    output = Path(str(settings.get("run.output_dir", FIELDS["run.output_dir"].default))).expanduser()
    runs = list_runs(output) if output.is_dir() else []
    if runs:
        print(f"newest run in {output}: {runs[0].folder.path}")
        return runs[0].folder.path
    notes.append(f"--resume_from_checkpoint latest: there is no run in {output} yet, a new one is started")
    return None
