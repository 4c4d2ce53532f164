"""Everything the report shows, read once from a run folder."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import SECTIONS
from ..runs.folder import RunFolder
from ..runs.record import open_readonly

Row = dict[str, Any]

SCORE_FILE = "score.json"
"""Written by the demo beside run.db: `{"score_before", "score_after", "kept", "word", "samples"}`, shares in [0, 1]."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One config value beside its default."""

    key: str
    value: Any
    default: Any
    help: str

    @property
    def changed(self) -> bool:
        return _plain(self.value) != _plain(self.default)


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """A run as the report sees it. Rows are those of `runs.RunRecord`; events are `{seq, time, step, type, data}`."""

    folder: Path
    run_id: str
    name: str
    pack_version: str
    settings: tuple[Setting, ...]
    summary: Row
    steps: list[Row]
    validation: list[Row]
    previews: list[Row]
    checkpoints: list[Row]
    rejections: list[Row]
    warnings: list[Row]
    verdicts: list[Row]
    interventions: list[Row]
    loras: list[Row]
    resumes: list[Row]
    memory: list[Row]
    meta: Mapping[str, str]
    score: Row | None

    def setting(self, key: str, default: Any = None) -> Any:
        """Value of `section.field`."""
        return next((setting.value for setting in self.settings if setting.key == key), default)

    @property
    def applied_losses(self) -> list[tuple[int, float]]:
        """(step, loss) of applied steps with a finite loss, in order."""
        return [(row["step"], row["loss"]) for row in self.steps if not row["rejected"] and row["loss"] is not None]


def read_run(run_folder: str | Path) -> ReportData:
    """Read the record and the config of a run.

    Raises:
        CheckpointError: there is no readable run.db.
        ConfigError: there is no readable config.json.
    """
    folder = RunFolder(run_folder)
    stored = folder.read_config()
    sections = stored.get("config", stored)
    with open_readonly(folder.database_path) as record:
        return ReportData(
            folder=folder.path,
            run_id=folder.run_id,
            name=str(sections.get("run", {}).get("output_name") or folder.run_id),
            pack_version=str(stored.get("pack_version", "unknown")),
            settings=read_settings(sections),
            summary=record.summary(),
            steps=record.steps(),
            validation=record.validation(),
            previews=record.previews(),
            checkpoints=record.checkpoints(),
            rejections=record.events("StepRejected"),
            warnings=record.events("Warned"),
            verdicts=record.events("Verdict"),
            interventions=record.events("Intervention"),
            loras=record.events("LoraSaved"),
            resumes=record.events("Resumed"),
            memory=record.events("MemoryState"),
            meta=record.meta(),
            score=_score(folder.path / SCORE_FILE),
        )


def read_settings(sections: Mapping[str, Any]) -> tuple[Setting, ...]:
    """All values of a stored config, in the order of its dataclasses; fields unknown to this version come last."""
    found: list[Setting] = []
    for section, cls in SECTIONS.items():
        values = dict(sections.get(section) or {})
        for field in dataclasses.fields(cls):
            value = values.pop(field.name, field.default)
            help_text = str(field.metadata.get("help", ""))
            found.append(Setting(key=f"{section}.{field.name}", value=value, default=field.default, help=help_text))
        for name, value in values.items():
            found.append(Setting(key=f"{section}.{name}", value=value, default=None, help=""))
    return tuple(found)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _score(path: Path) -> Row | None:
    if not path.is_file():
        return None
    try:
        score = json.loads(path.read_text(encoding="utf-8"))
        float(score["score_after"])
        return dict(score)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is left out of the report: %s", path, error)
        return None
