"""Data sets as the panel knows them: those that were scanned here and those of the runs; captions to read and mend.

A data set is named by an id made of what decides which files it is; no folder comes in and none goes out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import BucketConfig, DatasetConfig
from ..config_io import from_dict
from ..errors import TrainerError
from ..runs.registry import RunInfo, can_go_on
from .exchange import Refused, Request
from .places import bare_text
from .run_list import RunList

if TYPE_CHECKING:  # its modules need numpy and Pillow, which a panel that only shows runs does not
    from ..data.caption_table import CaptionRow

GENERATED = ("toy", "graph-")
"""Starts of folder names below `safe_scaler/pictures` that the program itself fills."""

_ID = re.compile(r"[0-9a-f]{16}")
_MOST_ROWS = 500
_THUMBNAIL = 256
_MOST_KEPT = 8

_PLACES = ("path", "prior_path", "config_file")
_DECIDING = (
    "path", "prior_path", "config_file", "recursive", "caption_extensions", "caption_encoding", "metadata_file",
)  # fmt: skip


@dataclass(frozen=True)
class ScannedSet:
    """A data set that was looked at by a scan of this program. `report`: the scan's summary; `scanned`: Unix time."""

    title: str
    pictures: int
    report: str
    scanned: float
    dataset: DatasetConfig
    bucket: BucketConfig


def data_set_id(dataset: DatasetConfig) -> str:
    """16 hex digits over what decides which files a data set is; empty where the settings name none."""
    if not (dataset.path or dataset.config_file):
        return ""
    values: list[Any] = []
    for name in _DECIDING:
        value: Any = getattr(dataset, name)
        is_place = name in _PLACES and value
        values.append(os.path.realpath(os.path.expanduser(value)) if is_place else value)
    text = json.dumps(values, ensure_ascii=True, default=str)
    return hashlib.blake2b(text.encode("ascii"), digest_size=8).hexdigest()


class DataSets:
    """Answers about data sets.

    `scanned`: those that this program has scanned, by id. `live`: ids of the runs that it follows; their workers may
    not have begun to write yet. Both are asked at every request.
    """

    def __init__(
        self,
        runs: RunList,
        scanned: Callable[[], Mapping[str, ScannedSet]],
        live: Callable[[], Container[str]] = tuple,
    ) -> None:
        self._runs = runs
        self._live = live
        self._scanned = scanned
        self._writing = threading.Lock()
        self._rows: dict[str, list[CaptionRow]] = {}
        self._ids: dict[str, tuple[float, str]] = {}

    def all(self) -> list[dict[str, Any]]:
        """The scanned ones, newest first, then those that only runs know."""
        known = dict(sorted(self._scanned().items(), key=lambda one: one[1].scanned, reverse=True))
        told = [self._facts(identity, one) for identity, one in known.items()]
        seen = set(known)
        for info in self._runs.all():
            identity = self.of_run(info)
            if identity and identity not in seen:
                seen.add(identity)
                dataset, _ = _config_of(info)
                told.append({"id": identity, "title": _title(dataset), "pictures": None, "report": "", "scanned": None})
        return told

    def one(self, identity: str) -> dict[str, Any]:
        """Facts of one data set. Refused (404) for an id that is none."""
        if _ID.fullmatch(identity):
            known = self._scanned().get(identity)
            if known is not None:
                return self._facts(identity, known)
        dataset, _ = self._find(identity)
        return {"id": identity, "title": _title(dataset), "pictures": None, "report": "", "scanned": None}

    def of_run(self, info: RunInfo) -> str:
        """Id of the data set of a run; empty where its config cannot be read."""
        try:
            changed = info.folder.config_path.stat().st_mtime
        except OSError:
            return ""
        known = self._ids.get(info.run_id)
        if known is None or known[0] != changed:
            try:
                known = (changed, data_set_id(_config_of(info)[0]))
            except (TrainerError, TypeError, ValueError, AttributeError):
                known = (changed, "")  # a config of another format, or none of ours
            self._ids[info.run_id] = known
        return known[1]

    def captions(self, identity: str, request: Request) -> dict[str, Any]:
        """A page of the table: `first`, `count` and `find` (words in the file's name or caption) of the query."""
        from ..data.caption_table import MAX_CHARACTERS, read_state

        dataset, bucket = self._find(identity)
        first, count = request.number("first", 0, 0, 10**9), request.number("count", 50, 1, _MOST_ROWS)
        words = request.query.get("find", "").casefold()[:200]
        rows = self._listed(identity, dataset, bucket)
        if words:
            rows = [row for row in rows if words in row.file.casefold() or words in read_state(row).text.casefold()]
        users = self._users(dataset, bucket)
        return {
            "total": len(rows),
            "first": first,
            "rows": [_row(row) for row in rows[first : first + count]],
            "locked_by": self._running(users),
            "resumable": [run.run_id for run in users if can_go_on(run)],
            "read_only": _generated(dataset),
            "max_characters": MAX_CHARACTERS,
        }

    def change(self, identity: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """Write one caption; returns its row as it then stands.

        Refused with 409 while a run is going on with these pictures: a worker that must be started again reads them
        anew and could not go on exactly.
        """
        from ..data.caption_table import CaptionChanged, write_caption

        text, version = body.get("caption"), body.get("version")
        if set(body) != {"caption", "version"} or not isinstance(text, str) or not isinstance(version, str):
            raise Refused(400, "bad_caption", "The body must be {caption, version}, both text.")
        dataset, bucket = self._find(identity)
        if _generated(dataset):
            why = "These pictures were written by the program itself. Change the captions where they come from."
            raise Refused(409, "generated", why)
        with self._writing:
            running = self._running(self._users(dataset, bucket))
            if running is not None:
                raise Refused(
                    409,
                    "in_use",
                    f"Run {running} is training on these pictures. A caption that changes now would keep it "
                    "from going on exactly after a stop. Wait for its end, or stop it.",
                )
            row = self._row(identity, key, dataset, bucket)
            if row.target is None:
                raise Refused(409, "not_editable", f"The caption of {row.file} cannot be changed here: {row.why}.")
            try:
                write_caption(row, text, version)
            except CaptionChanged as error:
                raise Refused(409, "changed", str(error)) from error
            self._rows.pop(identity, None)
            return {"row": _row(self._row(identity, key, dataset, bucket))}

    def picture(self, identity: str, key: str) -> bytes:
        """A small JPEG of a picture. Refused (404) when it cannot be decoded."""
        from PIL import Image

        from ..data.decode import decode_picture

        dataset, bucket = self._find(identity)
        row = self._row(identity, key, dataset, bucket)
        try:
            small = Image.fromarray(decode_picture(row.picture, row.background))
        except TrainerError as error:
            raise Refused(404, "no_such_picture", f"The picture {row.file} cannot be shown.") from error
        small.thumbnail((_THUMBNAIL, _THUMBNAIL))
        stream = BytesIO()
        small.save(stream, "JPEG", quality=85)
        return stream.getvalue()

    def _facts(self, identity: str, one: ScannedSet) -> dict[str, Any]:
        report = bare_text(one.report, {folder.absolute() for folder in _folders(one.dataset, one.bucket)})
        return {
            "id": identity, "title": one.title, "pictures": one.pictures, "report": report, "scanned": one.scanned,
        }  # fmt: skip

    def _find(self, identity: str) -> tuple[DatasetConfig, BucketConfig]:
        if _ID.fullmatch(identity):
            known = self._scanned().get(identity)
            if known is not None:
                return known.dataset, known.bucket
            for info in self._runs.all():
                if self.of_run(info) == identity:
                    return _config_of(info)
        raise Refused(
            404, "no_such_data_set", f"There is no data set {identity[:40]!r} here. GET /data_sets lists them."
        )

    def _listed(self, identity: str, dataset: DatasetConfig, bucket: BucketConfig) -> list[CaptionRow]:
        """The rows, listed anew for every page: files come and go."""
        from ..data.caption_table import caption_rows

        rows = caption_rows(dataset, bucket)
        if len(self._rows) >= _MOST_KEPT:
            self._rows.clear()
        self._rows[identity] = rows
        return rows

    def _row(self, identity: str, key: str, dataset: DatasetConfig, bucket: BucketConfig) -> CaptionRow:
        if _ID.fullmatch(key):
            # Thumbnails of a page follow the page: its listing serves them, until a caption is written.
            for row in self._rows.get(identity) or self._listed(identity, dataset, bucket):
                if row.key == key:
                    return row
        raise Refused(404, "no_such_picture", f"The data set has no picture {key[:40]!r}.")

    def _running(self, users: list[RunInfo]) -> str | None:
        live = self._live()
        return next((run.run_id for run in users if run.state == "running" or run.run_id in live), None)

    def _users(self, dataset: DatasetConfig, bucket: BucketConfig) -> list[RunInfo]:
        """Runs that could still read these folders: running ones, and those that can be gone on with."""
        mine = _folders(dataset, bucket)
        found: list[RunInfo] = []
        for info in self._runs.all():
            if info.problem or info.state in ("finished", "failed"):
                continue
            try:
                theirs = _folders(*_config_of(info))
            except (TrainerError, TypeError, ValueError, AttributeError):
                continue
            if any(_overlap(one, other) for one in mine for other in theirs):
                found.append(info)
        return found


def _row(row: CaptionRow) -> dict[str, Any]:
    from ..data.caption_table import read_state

    state = read_state(row)
    return {
        "key": row.key,
        "file": row.file.encode("utf-8", "replace").decode(),
        "caption": state.text.encode("utf-8", "replace").decode(),
        "version": state.version,
        "editable": row.target is not None,
        "why": row.why,
        "problem": state.problem,
    }


def _config_of(info: RunInfo) -> tuple[DatasetConfig, BucketConfig]:
    stored = info.folder.read_config()
    config = from_dict(stored["config"])
    return _anchored(config.dataset, str(stored.get("started_in") or "")), config.bucket


def _anchored(dataset: DatasetConfig, begin: str) -> DatasetConfig:
    """`dataset` with its relative paths below `begin`, where the run was started: this program runs elsewhere.

    A run that does not say where it was started has no data set here rather than a wrong one.
    """
    changed: dict[str, str] = {}
    for name in _PLACES:
        value = getattr(dataset, name)
        if value and not Path(value).expanduser().is_absolute():
            changed[name] = str(Path(begin, value)) if begin else ""
    return replace(dataset, **changed) if changed else dataset


def _folders(dataset: DatasetConfig, bucket: BucketConfig) -> list[Path]:
    """Real places of the data set's folders; of one that is not there, what the settings say."""
    from ..data.caption_table import folders_of

    try:
        found = folders_of(dataset, bucket)
    except TrainerError:
        found = [Path(name).expanduser() for name in (dataset.path, dataset.prior_path) if name]
    return [Path(os.path.realpath(folder)) for folder in found]


def _overlap(one: Path, other: Path) -> bool:
    return one == other or one in other.parents or other in one.parents


def _generated(dataset: DatasetConfig) -> bool:
    place = Path(os.path.realpath(os.path.expanduser(dataset.path or ".")))
    return any(
        parent.name == "pictures" and parent.parent.name == "safe_scaler" and below.name.startswith(GENERATED)
        for below, parent in zip([place, *place.parents], place.parents, strict=False)
    )


def _title(dataset: DatasetConfig) -> str:
    return Path(dataset.config_file or dataset.path).name
