"""The checkpoint store of a run: save whole or not at all, load the newest that proves good.

Order of a save (`reference/diagnostics.md` section 21): temporary folder on the same file system, every file written
and flushed, manifest last, flush, rename to the final name, flush of the parent, read back. A crash anywhere leaves
the previous or the new checkpoint, never a mix.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import time
import uuid
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ..collector import collector_paused
from ..errors import CheckpointError, ResourceError
from ..runs.platform import DurableIO
from . import manifest as names
from . import tensor_file
from .manifest import Damaged, FileEntry, Manifest, SavedCheckpoint, Unreadable
from .retention import superfluous
from .state import RunState, encode, non_finite, refuse_non_finite

_SPARE_BYTES = 1 << 20
"""Room kept free beside the tensors: JSON files, folder entries."""

_FULL = frozenset({errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)})

log = logging.getLogger(__name__)


class CheckpointStore:
    """Checkpoints under `folder`. One writer at a time (the run's lock sees to that); any number of readers."""

    def __init__(
        self, folder: str | Path, *, run_id: str = "", io: DurableIO | None = None, verify: bool = True
    ) -> None:
        self.folder = Path(folder)
        self.run_id = run_id
        self.in_use: str | None = None
        """Name of the checkpoint this process loaded: never pruned, and the parent of the first one saved."""
        self._io = io or DurableIO()
        self._verify = verify
        self._swept = False
        self._parent: str | None = None

    def save(self, state: RunState, step: int, *, verify: bool | None = None) -> SavedCheckpoint:
        """Write a checkpoint of `step` and return it when it lies on the disk, flushed and read back.

        Raises NonFiniteError when an adapter tensor is not finite (nothing is written), ResourceError when the disk is
        full or fails (older checkpoints stay, nothing incomplete is left under a final name), CheckpointError when what
        was written reads back wrong or does not appear.
        """
        state = state.on_cpu()
        refuse_non_finite(state.adapter, step)
        body = encode(state.scalars, step)
        needed = state.tensor_bytes() + len(body) + _SPARE_BYTES
        try:
            self._prepare()
            self._check_space(needed, step)
            temporary = self.folder / f"{names.TEMPORARY}{step}-{uuid.uuid4().hex[:8]}"
            try:
                manifest = self._write(temporary, state, body, step)
                path = self._publish(temporary, step)
            except BaseException:
                self._discard(temporary)
                raise
            self._await(path)
            if self._verify if verify is None else verify:
                self._check_written(path)
            self._parent = path.name
        except OSError as error:
            raise self._trouble(error, needed, step) from error
        size = sum(entry.bytes for entry in manifest.files.values())
        return SavedCheckpoint(
            path, step, manifest.generation, size, manifest.created, (path / names.VERIFIED).exists()
        )

    def load(self, which: str | int = "latest", *, set_aside: bool = True) -> RunState:
        """Load a checkpoint by "latest", name or step, with every digest checked.

        "latest" passes over damaged ones, names them in `passed_over` and (with `set_aside`) renames them to `.bad-`.
        CheckpointError: none there, none good, the one asked for by name or step is missing or damaged, or a format is
        newer than ours.
        """
        found = names.scan(self.folder)
        if which == "latest":
            return self._load_newest(found, set_aside)
        wanted = [saved for saved in found if which in (saved.name, saved.step) or str(which) == str(saved.step)]
        if not wanted:
            raise CheckpointError(self._missing_message(which, found))
        try:
            state = self._read(wanted[0].path)
        except Unreadable as error:
            raise CheckpointError(
                f"The checkpoint {wanted[0].name} is not given by the disk: {error}. "
                "Check the disk, or name another one."
            ) from error
        except Damaged as error:
            raise CheckpointError(
                f"The checkpoint {wanted[0].name} is damaged: {error}. "
                "Name another one, or 'latest' for the newest good one."
            ) from error
        self.in_use = state.name
        return state

    def list(self) -> list[SavedCheckpoint]:
        """Checkpoints, newest first; `problem` says what is wrong with one (manifest and sizes are looked at)."""
        return names.scan(self.folder)

    def aside(self) -> list[str]:
        """Names of checkpoints that were set aside."""
        return sorted(path.name for path in self.folder.glob(f"{names.BAD}*")) if self.folder.is_dir() else []

    def newest(self) -> SavedCheckpoint | None:
        """The newest one that looks good, without reading its tensors; None when there is none."""
        return names.newest_good(self.folder)

    def verify(self, name: str) -> str:
        """Read a checkpoint whole. Empty when good (it is then marked verified), else what is wrong with it."""
        path = self.folder / name
        try:
            self._read(path)
        except Damaged as error:
            return str(error)
        self._mark_verified(path)
        return ""

    def prune(self, keep_last: int, protect: Collection[str | int] = (), *, milestone_every: int = 0) -> list[str]:
        """Delete old checkpoints by the rule of `retention.superfluous`; returns the deleted names.

        Never deleted: the newest, the newest verified one, the one in use (resumed from), and what `protect` names.
        """
        unwanted = superfluous(
            names.scan(self.folder),
            keep_last=keep_last,
            protect=protect,
            in_use=self.in_use,
            milestone_every=milestone_every,
        )
        deleted: list[str] = []
        for name in unwanted:
            trash = self.folder / f"{names.TRASH}{name}-{uuid.uuid4().hex[:8]}"
            try:
                self._io.rename(self.folder / name, trash)
                self._remove(trash)
            except OSError as error:  # too many checkpoints are no reason to end a run
                log.warning("the old checkpoint %s cannot be deleted: %s", name, error.strerror)
                continue
            deleted.append(name)
        return deleted

    def set_aside(self, which: Collection[str], reason: str) -> None:
        """Rename checkpoints so that no run goes on from them; `reason` is written beside them."""
        for name in which:
            self._set_aside(self.folder / name, reason)

    def sweep(self) -> list[str]:
        """Remove leftovers of interrupted saves and prunes; returns their names. Called by the first save."""
        leftovers = [path for path in self.folder.iterdir() if path.name.startswith((names.TEMPORARY, names.TRASH))]
        for path in leftovers:
            self._remove(path)
        self._swept = True
        return sorted(path.name for path in leftovers)

    def _prepare(self) -> None:
        if not self.folder.is_dir():
            self._io.make_folder(self.folder)
        if not self._swept:
            self.sweep()

    def _check_space(self, needed: int, step: int) -> None:
        free = self._io.free_bytes(self.folder)
        if needed > free:
            raise ResourceError(_space_message(step, needed, free, self.folder))

    def _write(self, temporary: Path, state: RunState, body: bytes, step: int) -> Manifest:
        from .. import __version__

        generation = self._next_generation()
        stamp = {"step": str(step), "generation": str(generation), "run_id": self.run_id}
        self._io.make_folder(temporary)
        files = {
            names.ADAPTER: self._write_file(
                temporary / names.ADAPTER, tensor_file.pieces(state.adapter, {"kind": "adapter", **stamp})
            ),
            names.OPTIMIZER: self._write_file(
                temporary / names.OPTIMIZER, tensor_file.pieces(state.optimizer, {"kind": "optimizer", **stamp})
            ),
            names.STATE: self._write_file(temporary / names.STATE, [memoryview(body)]),
        }
        manifest = Manifest(
            format_version=names.FORMAT_VERSION,
            pack_version=__version__,
            run_id=self.run_id,
            step=step,
            generation=generation,
            parent=self._parent or self.in_use,
            created=time.time(),
            files=files,
            adapter_digest=names.bound_digest("adapter", step, generation, files[names.ADAPTER].sha256),
            optimizer_digest=names.bound_digest("optimizer", step, generation, files[names.OPTIMIZER].sha256),
        )
        self._write_file(temporary / names.MANIFEST, [memoryview(manifest.encode())])
        self._io.sync_folder(temporary)
        return manifest

    def _write_file(self, path: Path, data: Iterable[memoryview]) -> FileEntry:
        digest = hashlib.sha256()
        size = 0
        fd = self._io.open(path)
        try:
            for piece in data:
                for written in self._io.write_all(fd, piece):
                    digest.update(written)
                    size += len(written)
            self._io.sync(fd)
        finally:
            self._io.close(fd)
        return FileEntry(size, digest.hexdigest())

    def _publish(self, temporary: Path, step: int) -> Path:
        copy = 1
        while (path := self.folder / names.folder_name(step, copy)).exists():
            copy += 1
        self._io.rename(temporary, path)
        self._io.sync_folder(self.folder)
        return path

    def _await(self, path: Path) -> None:
        """Network drives may show a new name late, or give a stale handle: not yet kept, and no damage either."""
        if not self._io.sees(path / names.MANIFEST):
            raise CheckpointError(
                f"The checkpoint {path.name} was written, but {self.folder} does not show it under its name: it may "
                "not last. The older ones are untouched. Network drives do this: keep runs on a disk of this machine."
            )

    def _check_written(self, path: Path) -> None:
        try:
            self._read(path)
        except Damaged as error:
            self._set_aside(path, str(error))
            raise CheckpointError(
                f"The checkpoint {path.name} was written and reads back wrong: {error}. It is set aside; the older "
                "ones are untouched. Check the disk."
            ) from error
        self._mark_verified(path)

    def _mark_verified(self, path: Path) -> None:
        if not (path / names.VERIFIED).exists():
            try:
                self._io.write_file(path / names.VERIFIED, b"")
            except OSError as error:
                log.warning("%s is good but cannot be marked so: %s", path.name, error.strerror)

    def _read(self, path: Path) -> RunState:
        try:
            return self._read_checked(path)
        except OSError as error:
            name = Path(error.filename or path).name
            raise Unreadable(f"{name} cannot be read ({error.strerror or error})") from error

    def _read_checked(self, path: Path) -> RunState:
        manifest = names.read_manifest(path)
        names.check_sizes(path, manifest)
        if names.step_of(path.name) not in (None, manifest.step):
            raise Damaged(f"the folder is named for another step than {manifest.step}")
        if extra := names.extra_files(path, manifest):
            log.warning("%s holds files that belong to no checkpoint and are ignored: %s", path.name, ", ".join(extra))
        body = (path / names.STATE).read_bytes()
        if hashlib.sha256(body).hexdigest() != manifest.files[names.STATE].sha256:
            raise Damaged(f"{names.STATE} does not match its SHA-256")
        # Both files at once: one is hashed while memory is found for the other.
        with collector_paused(), ThreadPoolExecutor(1) as beside:
            reading = beside.submit(_read_tensors, path / names.OPTIMIZER, manifest, "optimizer")
            adapter = _read_tensors(path / names.ADAPTER, manifest, "adapter")
            if bad := non_finite(adapter):
                raise Damaged(f"{names.ADAPTER} holds NaN or infinity in {bad[0]}")
            optimizer = reading.result()
        scalars = json.loads(body)["scalars"]
        return RunState(adapter, optimizer, scalars, manifest.step, path.name, manifest.generation)

    def _load_newest(self, found: list[SavedCheckpoint], set_aside: bool) -> RunState:
        if not found:
            raise CheckpointError(self._missing_message("latest", found))
        passed_over: list[str] = []
        for saved in found:
            try:
                state = self._read(saved.path)
            except Damaged as error:
                passed_over.append(f"{saved.name}: {error}")
                log.warning("the checkpoint %s is passed over: %s", saved.name, error)
                if set_aside and not isinstance(error, Unreadable):  # that one perhaps for this moment only
                    self._set_aside(saved.path, str(error))
                continue
            state.passed_over = tuple(passed_over)
            self.in_use = state.name
            return state
        raise CheckpointError(
            f"No checkpoint in {self.folder} is good: {'; '.join(passed_over)}. "
            "Restore one from a copy, or start a new run; this one is not started again from step 0 unasked."
        )

    def _missing_message(self, which: str | int, found: list[SavedCheckpoint]) -> str:
        there = ", ".join(saved.name for saved in found) or "none"
        aside = self.aside()
        more = f" Set aside as damaged: {', '.join(aside)}." if aside else ""
        if which == "latest" and aside:
            more += " Restore one from a copy, or start a new run; this one is not started again from step 0 unasked."
        return f"There is no checkpoint {which!r} in {self.folder}. There are: {there}.{more}"

    def _set_aside(self, path: Path, reason: str) -> None:
        target = self.folder / f"{names.BAD}{path.name}"
        copy = 1
        while target.exists():
            copy += 1
            target = self.folder / f"{names.BAD}{path.name}.{copy}"
        try:
            self._io.rename(path, target)
            self._io.write_file(target / "reason.txt", f"{reason}\n".encode())
        except OSError as error:
            log.warning("%s cannot be set aside: %s", path.name, error.strerror)

    def _next_generation(self) -> int:
        highest = 0
        for path in self.folder.iterdir():
            with contextlib.suppress(Damaged, OSError):
                if path.is_dir() and path.name.startswith(("step-", names.BAD)):
                    highest = max(highest, names.read_manifest(path).generation)
        return highest + 1

    def _discard(self, temporary: Path) -> None:
        try:
            if temporary.exists():
                self._remove(temporary)
        except OSError as error:
            self._swept = False
            log.warning("%s cannot be removed now: %s", temporary, error.strerror)

    def _remove(self, path: Path) -> None:
        for child in path.iterdir():
            self._remove(child) if child.is_dir() else self._io.remove_file(child)
        self._io.remove_folder(path)

    def _trouble(self, error: OSError, needed: int, step: int) -> ResourceError:
        try:
            free = self._io.free_bytes(self.folder)
        except OSError:
            free = 0
        if error.errno in _FULL:
            return ResourceError(_space_message(step, needed, free, self.folder, error))
        return ResourceError(
            f"The checkpoint of step {step} cannot be written to {self.folder}: {error.strerror or error} "
            f"(needed {needed:,} bytes, {free:,} free). Older checkpoints are untouched. Check the disk and its rights."
        )


def _space_message(step: int, needed: int, free: int, folder: Path, error: OSError | None = None) -> str:
    cause = f" ({error.strerror})" if error else ""
    if error is not None and error.errno == errno.EFBIG:
        return (
            f"A file of the checkpoint of step {step} is larger than this file system or a limit on the process allows "
            f"({error.strerror}; {needed:,} bytes in all, {free:,} free in {folder}). Older checkpoints are untouched. "
            "Write to another disk (FAT32 ends at 4 GB a file) or lift the limit (ulimit -f)."
        )
    return (
        f"The checkpoint of step {step} does not fit{cause}: {needed:,} bytes needed, {free:,} bytes free in {folder}. "
        "Older checkpoints are untouched. Free space or lower checkpoint.keep_last."
    )


def _read_tensors(path: Path, manifest: Manifest, kind: str) -> dict[str, torch.Tensor]:
    content = tensor_file.read(path, manifest.files[path.name])
    found = tuple(content.metadata.get(key) for key in ("kind", "step", "generation"))
    if found != (kind, str(manifest.step), str(manifest.generation)):
        raise Damaged(f"{path.name} says it is {found}, not {kind} of step {manifest.step}")
    return content.tensors
