"""What a checkpoint holds of a run, and which settings may differ when it is taken up again."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from . import __version__
from .config import TrainConfig
from .config_io import to_dict
from .health.goodness import goodness
from .optim import load_optimizer_state, optimizer_state
from .resume_rules import refusal as refusal
from .resume_rules import setting_differences as setting_differences
from .trainer import Trainer, TrainerParts, TrainState

if TYPE_CHECKING:
    from .checkpoints.store import RunState
    from .data import Item
    from .distributed.processes import Processes
    from .session import Session

_EMA = "ema:average/"
_LIBRARIES = ("torch", "diffusers", "transformers", "safetensors", "numpy")


@dataclass(frozen=True)
class RunIdentity:
    """What must be the same for an exact resume: settings, base-model weights, pictures and captions."""

    config: TrainConfig
    model_fingerprint: str
    data_digest: str
    processes: int = 1


@dataclass(frozen=True)
class Restored:
    """Which checkpoint was taken, which settings differ (allowed ones), which damaged ones were passed over, and the
    last event before it was taken."""

    name: str
    differences: tuple[str, ...]
    passed_over: tuple[str, ...]
    event_seq: int = 0


def capture_state(parts: TrainerParts, state: TrainState, session: Session, identity: RunIdentity) -> RunState:
    """The whole state of a run after its last decided step. Tensors may be the live ones: copy or write them before
    the next step."""
    from .checkpoints.store import RunState

    # A checkpoint may be asked for while validation or a preview looks at averaged weights: the parameters hold those
    # again afterwards.
    swapped = parts.live.swapped
    with parts.live.training():
        adapter = parts.network.state_dict(copy=swapped)
        tensors, numbers = optimizer_state(parts.optimizer, copy=swapped)
    ema, updates = ({}, 0) if parts.live.ema is None else (parts.live.ema.averages, parts.live.ema.updates)
    keepers = {} if session.trainer is None else session.trainer.keepers
    return RunState(
        adapter=adapter,
        optimizer={**tensors, **{_EMA + name: value for name, value in ema.items()}},
        scalars={
            "counters": state.to_dict(),
            "optimizer": numbers,
            "ema_updates": updates,
            "scaler": parts.precision.state_dict(),
            **{name: keeper.state_dict() for name, keeper in keepers.items()},
            "validation": session.validation_history,
            "good": {} if session.trainer is None else goodness(session.trainer, session.validation_history),
            "event_seq": session.bus.seq,
            "total_steps": session.trainer.total_steps if session.trainer else 0,
            "config": to_dict(identity.config),
            "model_fingerprint": identity.model_fingerprint,
            "data_digest": identity.data_digest,
            "processes": identity.processes,
            "versions": library_versions(),
        },
    )


def restore_state(session: Session, trainer: Trainer, processes: Processes | None = None) -> Restored | None:
    """Load the newest good checkpoint of the run into `trainer`; None when there is none. With several processes,
    process 0 reads it and all take it.

    Raises:
        CheckpointError: something that must not change has changed (each by name), or no checkpoint is readable though
            some exist.
    """

    def load() -> RunState | None:
        had_some = session.store.list() or session.store.aside()
        return session.store.load("latest") if had_some else None

    if processes is None:
        loaded = load()
    else:
        from .distributed.shared_state import share_state

        loaded = share_state(processes, load)
    if loaded is None:
        return None
    bound, free = differences(loaded.scalars, session.identity)
    if bound:
        raise refusal(loaded.name, bound)
    free += put_back(loaded, session, trainer)
    session.went_on_from(loaded.name, trainer.state.step)
    return Restored(loaded.name, tuple(free), loaded.passed_over, int(loaded.scalars.get("event_seq", 0)))


def put_back(loaded: RunState, session: Session, trainer: Trainer) -> list[str]:
    """Give `trainer` and `session` the state that `capture_state` took. Returns, in words, what the state lacked."""
    scalars, parts = loaded.scalars, trainer.parts
    parts.network.load_state_dict(loaded.adapter)
    averages = {name: value for name, value in loaded.optimizer.items() if name.startswith(_EMA)}
    tensors = {name: value for name, value in loaded.optimizer.items() if name not in averages}
    parts.optimizer.state.clear()  # a rollback must not keep moments that the checkpoint does not have
    load_optimizer_state(parts.optimizer, tensors, scalars["optimizer"])
    if parts.live.ema is not None:
        plain = {name.removeprefix(_EMA): value for name, value in averages.items()}
        parts.live.ema.load_state(plain, int(scalars["ema_updates"]))
    parts.precision.load_state_dict(scalars["scaler"] if "scaler" in scalars else scalars["precision"])
    trainer.state = TrainState.from_dict(scalars["counters"])
    session.validation_history[:] = scalars["validation"]
    lacking: list[str] = []
    for name, keeper in trainer.keepers.items():
        if name in scalars:
            keeper.load_state_dict(scalars[name])
        else:
            lacking.append(f"{name}: the checkpoint holds none of it; it starts anew")
    return lacking


def differences(scalars: dict[str, Any], now: RunIdentity) -> tuple[list[str], list[str]]:
    """What differs between a checkpoint and the present run: (must not differ, may differ), each in words."""
    bound, free = setting_differences(scalars["config"], now.config)
    if scalars["model_fingerprint"] != now.model_fingerprint:
        bound.append("the base model: other weights than the checkpoint was made with")
    if scalars["data_digest"] != now.data_digest:
        bound.append("the data set: pictures or captions were added, removed or edited")
    if (before := int(scalars.get("processes", 1))) != now.processes:
        free.append(f"processes: {before} in the checkpoint, {now.processes} now (exact draws, rounding differs)")
    free.extend(_version_changes(scalars.get("versions", {})))
    return bound, free


def data_digest(items: Iterable[Item]) -> str:
    """Identity of what is trained on: every picture's place, content and caption."""
    digest = hashlib.blake2b(digest_size=16)
    for item in items:
        digest.update(f"{item.file}\x1f{item.content_hash}\x1f{item.caption}\x1e".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


@functools.cache
def library_versions() -> dict[str, str]:
    """Versions of this pack and of the libraries that compute."""
    found = {"safe-scaler-lora": __version__}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _version_changes(before: dict[str, str]) -> list[str]:
    now = library_versions()
    return [
        f"{name}: version {old} in the checkpoint, {now.get(name)} now (rounding may differ)"
        for name, old in before.items()
        if now.get(name) != old
    ]
