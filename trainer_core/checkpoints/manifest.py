"""The manifest of a checkpoint and the scan of a checkpoint folder. Imports no torch: a supervisor needs both.

A checkpoint is a folder `step-00000500` that got its name by a rename after every file in it was flushed. Its
`manifest.json`, written last, lists the files with size and SHA-256, digests itself, and binds adapter and optimizer
to one step and generation, so that files of different saves never pass as one.
The generation rises by one with every save of a run; it, and not the step or the clock, says which is newest
(a run that goes on from an older checkpoint saves the same steps again).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from ..errors import CheckpointError

FORMAT_VERSION = 1

MANIFEST = "manifest.json"
ADAPTER = "adapter.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
VERIFIED = "verified"
"""Empty file beside the manifest: this checkpoint was read back and found whole. Not part of its content."""

TEMPORARY, TRASH, BAD = ".tmp-", ".trash-", ".bad-"

_PIECE = 1 << 20

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


class Damaged(Exception):
    """A checkpoint that must not be used; the message names the file and what is wrong with it."""


class Unreadable(Damaged):
    """A checkpoint that the disk or its rights do not give now. It may be whole, so it is never set aside."""


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`parent`: the checkpoint this one goes on from. `created`: Unix time, for people only."""

    format_version: int
    pack_version: str
    run_id: str
    step: int
    generation: int
    parent: str | None
    created: float
    files: dict[str, FileEntry]
    adapter_digest: str
    optimizer_digest: str

    def encode(self) -> bytes:
        """JSON with its own digest as the last field."""
        return _encode(asdict(self))


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk. `problem` is empty, or says why its manifest cannot be trusted."""

    path: Path
    step: int
    generation: int = 0
    bytes: int = 0
    created: float = 0.0
    verified: bool = False
    problem: str = ""

    @property
    def name(self) -> str:
        return self.path.name


def folder_name(step: int, copy: int = 1) -> str:
    """`step-00000500`; a second save of the same step is `step-00000500-2`."""
    return f"step-{step:08d}" if copy == 1 else f"step-{step:08d}-{copy}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint's folder name, or None when it is no such name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def bound_digest(kind: str, step: int, generation: int, sha256: str) -> str:
    """SHA-256 over what a file is, whose it is, and its content: the same bytes at another step differ."""
    return hashlib.sha256(f"{kind}\n{step}\n{generation}\n{sha256}\n".encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest itself (not the files). Damaged, or CheckpointError for a newer format.

    How a manifest is encoded and digests itself is the same in every format, so that damage never passes for a newer
    one. Byte for byte: a flipped bit in white space or in a number's last digit counts as damage too.
    """
    from .. import __version__

    try:
        text = (folder / MANIFEST).read_bytes()
        loaded = json.loads(text)
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise Unreadable(f"{MANIFEST} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise Damaged(f"{MANIFEST} is cut or damaged ({error})") from error
    if not isinstance(loaded, dict):
        raise Damaged(f"{MANIFEST} holds no manifest")
    body = cast("dict[str, Any]", loaded)
    body.pop("digest", None)
    if text != _encode(body):
        raise Damaged(f"{MANIFEST} does not match its own digest")
    version = body.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint {folder} was written by pack {body.get('pack_version')} in format {version}; this is pack "
            f"{__version__}, which reads formats up to {FORMAT_VERSION}. Update Safe-Scaler."
        )
    try:
        body["files"] = {name: FileEntry(**entry) for name, entry in body["files"].items()}
        manifest = Manifest(**body)
    except (TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} lacks or has unknown fields ({error})") from error
    _check_binding(manifest)
    return manifest


def _check_binding(manifest: Manifest) -> None:
    for kind, name, bound in (
        ("adapter", ADAPTER, manifest.adapter_digest),
        ("optimizer", OPTIMIZER, manifest.optimizer_digest),
    ):
        if name not in manifest.files:
            raise Damaged(f"{MANIFEST} lists no {name}")
        if bound != bound_digest(kind, manifest.step, manifest.generation, manifest.files[name].sha256):
            raise Damaged(f"{name} belongs to another save than step {manifest.step}, generation {manifest.generation}")
    if STATE not in manifest.files:
        raise Damaged(f"{MANIFEST} lists no {STATE}")


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Damaged when a listed file is missing or has another size: the cheap part of verification."""
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise Damaged(f"{name} is missing") from None
        if size != entry.bytes:
            raise Damaged(f"{name} has {size} bytes instead of {entry.bytes}")


def check_content(folder: Path, manifest: Manifest) -> None:
    """Damaged when a listed file is not, byte for byte, what was written."""
    for name, entry in manifest.files.items():
        digest = hashlib.sha256()
        try:
            with (folder / name).open("rb") as stream:
                while piece := stream.read(_PIECE):
                    digest.update(piece)
        except OSError as error:
            raise Unreadable(f"{name} cannot be read ({error.strerror or error})") from error
        if digest.hexdigest() != entry.sha256:
            raise Damaged(f"{name} does not match its SHA-256")


def extra_files(folder: Path, manifest: Manifest) -> list[str]:
    """Names in the folder that belong to no checkpoint (they are ignored, and said)."""
    known = {*manifest.files, MANIFEST, VERIFIED}
    return sorted(path.name for path in folder.iterdir() if path.name not in known)


def scan(folder: Path) -> list[SavedCheckpoint]:
    """All checkpoints under `folder`, newest first: by generation, and by step where a manifest is unreadable.

    Looks at manifests and sizes only. CheckpointError when one has a newer format.
    """
    found: list[SavedCheckpoint] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        step = step_of(path.name)
        if step is not None and path.is_dir():
            found.append(_look(path, step))
    good = sorted((saved for saved in found if saved.generation), key=lambda saved: saved.generation, reverse=True)
    # One whose generation is unknown goes before the first good one of a lower step: it was to be newer than that.
    for saved in sorted((saved for saved in found if not saved.generation), key=lambda saved: saved.step):
        place = next((i for i, other in enumerate(good) if other.step <= saved.step), len(good))
        good.insert(place, saved)
    return good


def newest_good(folder: Path) -> SavedCheckpoint | None:
    """The newest checkpoint whose manifest and sizes are right, or None."""
    return next((saved for saved in scan(folder) if not saved.problem), None)


def newest_whole(folder: Path) -> SavedCheckpoint | None:
    """The checkpoint that a run would go on from: the newest that is what was written. Its files are read."""
    return next((saved for saved in scan(folder) if not saved.problem and not content_problem(saved.path)), None)


def content_problem(path: Path) -> str:
    """What is wrong with a checkpoint, its files read; empty for one that is what was written."""
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
        check_content(path, manifest)
    except Damaged as error:
        return str(error)
    return ""


def newest_scalars(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """Name and scalars (counters, config ...) of the newest checkpoint whose state file is whole; None when there is
    none. Tensors are not read."""
    for saved in scan(folder):
        try:
            if not saved.problem:
                return saved.name, read_scalars(saved.path)
        except Damaged:
            continue  # passed over by a resume too, which says so
    return None


def read_scalars(path: Path) -> dict[str, Any]:
    """The scalars of one checkpoint. Damaged when its state file is not what was written."""
    expected = read_manifest(path).files[STATE]
    try:
        body = (path / STATE).read_bytes()
    except OSError as error:
        raise Unreadable(f"{STATE} cannot be read ({error.strerror or error})") from error
    if hashlib.sha256(body).hexdigest() != expected.sha256:
        raise Damaged(f"{STATE} does not match its SHA-256")
    return dict(json.loads(body)["scalars"])


def _look(path: Path, step: int) -> SavedCheckpoint:
    try:
        manifest = read_manifest(path)
    except Damaged as error:
        return SavedCheckpoint(path, step, problem=str(error))
    problem = ""
    try:
        check_sizes(path, manifest)
        if manifest.step != step:
            problem = f"the folder is named for step {step} and holds step {manifest.step}"
    except Damaged as error:
        problem = str(error)
    size = sum(entry.bytes for entry in manifest.files.values())
    verified = (path / VERIFIED).exists()
    return SavedCheckpoint(path, step, manifest.generation, size, manifest.created, verified, problem)


def _encode(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return (json.dumps({**body, "digest": digest}, indent=1, allow_nan=False) + "\n").encode("utf-8")
