"""The folder of a run, `<output>/safe_scaler/<run_id>/`, and names that are never overwritten."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Generator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

from ..errors import ConfigError, Problem, ResourceError
from ..plain_text import parse_json
from .platform import DurableIO, LockBusy, LockCalls, LockUnsupported, locked

FORMAT_VERSION = 1
RUNS_FOLDER = "safe_scaler"

_LOCK_PATIENCE_S = 1.0
"""A registry scan probes the lock for a moment; a writer tries this long before it believes in a second writer."""
_LOOK_AGAIN_S = 0.03
"""Time between the two looks of a scan, so that two scans do not take each other for a writer."""

_FRESH_S = 10.0

log = logging.getLogger(__name__)


def new_run_id(now: datetime | float | None = None) -> str:
    """UTC time, for example `20261129T171500Z-1a2b`; the 4 hex digits are the fraction of the second, in 1/65536 s, so
    that ids sort by time also within a second. `now`: aware datetime or Unix seconds."""
    if now is None or isinstance(now, int | float):
        now = datetime.fromtimestamp(time.time() if now is None else now, timezone.utc)
    return f"{now.astimezone(timezone.utc):%Y%m%dT%H%M%SZ}-{now.microsecond * 65536 // 1_000_000:04x}"


class RunFolder:
    """Paths of one run, its config file and its lock."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, output_dir: str | Path, run_id: str) -> RunFolder:
        """Make the folder and its subfolders. A taken run id becomes `-2`, `-3`. ResourceError when not writable."""
        parent = Path(output_dir) / RUNS_FOLDER
        check_writable(parent)
        number = 1
        while True:
            folder = cls(parent / (run_id if number == 1 else f"{run_id}-{number}"))
            try:
                folder.path.mkdir()
            except FileExistsError:
                number += 1
                continue
            for child in (folder.checkpoints, folder.loras, folder.previews):
                child.mkdir()
            return folder

    @property
    def run_id(self) -> str:
        return self.path.resolve().name

    @property
    def output_dir(self) -> Path:
        """The `<output>` that holds `safe_scaler/<run_id>`."""
        return self.path.resolve().parent.parent

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    @property
    def database_path(self) -> Path:
        return self.path / "run.db"

    @property
    def log_path(self) -> Path:
        return self.path / "run.log"

    @property
    def lock_path(self) -> Path:
        return self.path / ".lock"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def loras(self) -> Path:
        return self.path / "lora"

    @property
    def previews(self) -> Path:
        return self.path / "previews"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    def write_config(self, config: Mapping[str, Any], io: DurableIO | None = None) -> None:
        """Write config.json whole or not at all, with format and pack version. ValueError for NaN or infinity."""
        from .. import __version__

        stamped = {"format_version": FORMAT_VERSION, "pack_version": __version__, **config}
        text = json.dumps(stamped, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            (io or DurableIO()).replace_file(self.config_path, text.encode("utf-8"))
        except OSError as error:
            raise ResourceError(
                f"{self.config_path} cannot be written: {error.strerror}. Free space or fix rights."
            ) from error

    def read_config(self) -> dict[str, Any]:
        """The stored config. ConfigError when missing, damaged, or of a newer format (naming both versions)."""
        return read_config(self.config_path)

    def read_run(self) -> dict[str, Any]:
        """`read_config` of a run that is to be trained. ConfigError too when it lacks what every run has."""
        stored = self.read_config()
        for name, kind, sort in (("config", dict, "a table"), ("final_lora", str, "a path")):
            if not isinstance(stored.get(name), kind) or "\0" in stored[name]:
                why = f"the file is damaged: '{name}' should be {sort}"
                fix = "Restore it from a copy or start a new run."
                raise ConfigError([Problem(str(self.config_path), stored.get(name), why, fix)])
        return stored

    @contextlib.contextmanager
    def lock(self, calls: LockCalls | None = None, patience: float = _LOCK_PATIENCE_S) -> Generator[None, None, None]:
        """Hold the run for writing. ResourceError, naming the holder, when another process writes it.

        A file system without locks is used with a warning: nothing can then tell two writers apart.
        """
        with contextlib.ExitStack() as stack:
            try:
                fd = self._take_lock(stack, calls, time.monotonic() + patience)
                os.ftruncate(fd, 0)
                os.lseek(fd, 0, os.SEEK_SET)
                os.write(fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
            except LockBusy as error:
                raise ResourceError(self._busy_message()) from error
            except LockUnsupported as error:
                log.warning("%s cannot be locked (%s): do not start a second writer", self.lock_path, error.strerror)
            except OSError as error:
                raise ResourceError(
                    f"The run {self.path} cannot be written: {error.strerror}. "
                    "Check that it exists, its rights and its disk."
                ) from error
            yield

    def _take_lock(self, stack: contextlib.ExitStack, calls: LockCalls | None, deadline: float) -> int:
        while True:
            try:
                return stack.enter_context(locked(self.lock_path, calls))
            except LockBusy:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def is_locked(self, calls: LockCalls | None = None) -> bool:
        """Whether a process writes this run now."""
        if not self.lock_path.exists():
            return False
        for pause in (0.0, _LOOK_AGAIN_S):  # whoever looks holds the lock for a moment, and is no writer
            time.sleep(pause)
            try:
                with locked(self.lock_path, calls):
                    return False
            except LockBusy:
                continue
            except OSError:
                return False  # a folder without write permission has no writer of ours
        return True

    def _busy_message(self) -> str:
        holder = ""
        with contextlib.suppress(OSError):
            holder = self.lock_path.read_text(encoding="utf-8").strip()
        return (
            f"The run {self.path} is being written by another process ({holder or 'unknown'}). "
            "One process may write a run. Wait for it or stop it, then try again."
        )


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json. ConfigError when missing, damaged, or of a newer format (naming both versions)."""
    from .. import __version__

    try:
        loaded = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = f"it cannot be read ({error.strerror})"
        raise ConfigError([Problem("config.json", str(path), why, "Give the folder of a run.")]) from error
    except ValueError as error:
        why = f"it is damaged ({error})"
        raise ConfigError(
            [Problem("config.json", str(path), why, "Restore it from a copy or start a new run.")]
        ) from error
    if not isinstance(loaded, dict):
        raise ConfigError([Problem("config.json", str(path), "it holds no settings", "Start a new run.")])
    config = cast("dict[str, Any]", loaded)
    version = config.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        why = (
            f"the run was written by pack {config.get('pack_version', 'unknown')} in format {version}; "
            f"this is pack {__version__}, which reads formats up to {FORMAT_VERSION}"
        )
        raise ConfigError([Problem("format_version", version, why, "Update Safe-Scaler.")])
    return config


def check_writable(folder: Path) -> None:
    """Make `folder` and prove that a file can be written there. ResourceError says what to do otherwise."""
    probe = folder / f".write-test-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            DurableIO().write_file(probe, b"x" * 4096)
        finally:
            with contextlib.suppress(FileNotFoundError):
                probe.unlink()
    except OSError as error:
        raise ResourceError(
            f"The output folder {folder} cannot be written: {error.strerror or error}. "
            "Give a folder you may write to on a disk with free space (--output_dir)."
        ) from error


def companion_name(path: Path, form: str) -> str:
    """Name beside the LoRA file `path` of its copy in another format (PEFT's is a folder)."""
    return f"{path.stem}.{form}" if form == "peft" else f"{path.stem}.{form}{path.suffix}"


def free_name(folder: Path, stem: str, suffix: str, *, owner: Path | None = None, form: str = "kohya") -> Path:
    """A file name in `folder` that nothing holds: `stem + suffix`, or `stem-2`, `stem-3` ...; with a `form` other
    than kohya's the name of its copy is free too.

    With `owner` (a run folder) the name is also reserved for that run until `release_name`, by a small hidden file
    beside it, so that two runs that start together choose different names. The file itself is not created: nothing
    incomplete ever stands under a final name. A reservation whose run folder is gone does not count. Calling again
    for the same owner gives the same name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = folder / f"{stem}{suffix}" if number == 1 else folder / f"{stem}-{number}{suffix}"
        number += 1
        names = (path,) if form == "kohya" else (path, path.with_name(companion_name(path, form)))
        if any(os.path.lexists(taken) for taken in names):  # a link that leads nowhere too
            continue
        if (owner is None or _reserve(path, owner)) and not (owner is None and _held(path)):
            return path


def release_name(path: Path) -> None:
    """Give a reserved name back (the file stands under it now, or the run is over)."""
    with contextlib.suppress(FileNotFoundError):
        _reservation(path).unlink()


def _reservation(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserved")


def _held(path: Path, by_other_than: Path | None = None) -> bool:
    note = _reservation(path)
    try:
        holder = note.read_text(encoding="utf-8").strip()
        if not holder:  # another process has made the note and not yet written into it, or died between the two
            return time.time() - note.stat().st_mtime < _FRESH_S
    except OSError:
        return False
    same = by_other_than is not None and holder == str(by_other_than.resolve())
    return not same and Path(holder).is_dir()


def _reserve(path: Path, owner: Path) -> bool:
    note = _reservation(path)
    text = str(owner.resolve())
    try:
        with note.open("x", encoding="utf-8") as stream:
            stream.write(text)
        return True
    except FileExistsError:
        if _held(path, by_other_than=owner):
            return False
        note.write_text(text, encoding="utf-8")
        return True
