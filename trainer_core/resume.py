"""What a checkpoint holds of a run, and which settings may differ when it is taken up again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from . import __version__
from .config import TrainConfig
from .config_io import to_dict
from .errors import CheckpointError
from .optim import load_optimizer_state, optimizer_state
from .trainer import Trainer, TrainerParts, TrainState

if TYPE_CHECKING:
    from .checkpoints.store import RunState
    from .data import Item
    from .session import Session

_EMA = "ema:average/"
_LIBRARIES = ("torch", "diffusers", "transformers", "safetensors", "numpy")

# Sections and fields that decide nothing about what has been trained so far; a change is allowed and logged.
_FREE_SECTIONS = frozenset({"checkpoint", "preview", "metadata", "validation"})
_FREE_FIELDS = frozenset(
    {
        "run.max_train_steps",
        "run.max_train_epochs",
        "run.output_name",
        "run.output_dir",
        "run.device",
        "optimizer.learning_rate",
        "optimizer.unet_lr",
        "optimizer.te1_lr",
        "optimizer.te2_lr",
        "optimizer.loraplus_ratio",
        "optimizer.loraplus_unet_ratio",
        "optimizer.loraplus_te_ratio",
        "optimizer.ema_validation",
        "optimizer.ema_preview",
        "optimizer.ema_export",
        "schedule.type",
        "schedule.warmup_steps",
        "schedule.decay_steps",
        "schedule.cycles",
        "schedule.power",
        "schedule.timescale",
        "schedule.min_lr_ratio",
        "dataset.workers",
        "dataset.cache_dir",
        "dataset.cache_text",
        "precision.max_rejected_steps",
        "precision.gradient_checkpointing",
        "model.path",  # the fingerprint below decides whether it is the same model
        "model.vae",
    }
)
# validation.split decides which pictures are trained on.
_BOUND_FIELDS = frozenset({"validation.split", "validation.enabled", "validation.max_pictures"})


@dataclass(frozen=True)
class RunIdentity:
    """What must be the same for an exact resume: settings, base-model weights, pictures and captions."""

    config: TrainConfig
    model_fingerprint: str
    data_digest: str


@dataclass(frozen=True)
class Restored:
    """Which checkpoint was taken, which settings differ (allowed ones), and which damaged ones were passed over."""

    name: str
    differences: tuple[str, ...]
    passed_over: tuple[str, ...]


def capture_state(parts: TrainerParts, state: TrainState, session: Session, identity: RunIdentity) -> RunState:
    """The whole state of a run after its last decided step."""
    from .checkpoints.store import RunState

    # A checkpoint may be asked for while validation or a preview looks at averaged weights.
    with parts.live.training():
        adapter = parts.network.state_dict()
        tensors, numbers = optimizer_state(parts.optimizer)
    ema, updates = ({}, 0) if parts.live.ema is None else parts.live.ema.state()
    return RunState(
        adapter=adapter,
        optimizer={**tensors, **{_EMA + name: value for name, value in ema.items()}},
        scalars={
            "counters": state.to_dict(),
            "optimizer": numbers,
            "ema_updates": updates,
            "precision": parts.precision.state_dict(),
            "validation": session.validation_history,
            "total_steps": session.trainer.total_steps if session.trainer else 0,
            "config": to_dict(identity.config),
            "model_fingerprint": identity.model_fingerprint,
            "data_digest": identity.data_digest,
            "versions": library_versions(),
        },
    )


def restore_state(session: Session, trainer: Trainer) -> Restored | None:
    """Load the newest good checkpoint of the run into `trainer`; None when there is none.

    Raises:
        CheckpointError: something that must not change has changed (each by name), or no checkpoint is readable though
            some exist.
    """
    if not session.store.list():
        return None
    loaded = session.store.load("latest")
    scalars = loaded.scalars
    bound, free = differences(scalars, session.identity)
    if bound:
        raise refusal(loaded.name, bound)
    parts = trainer.parts
    parts.network.load_state_dict(loaded.adapter)
    averages = {name: value for name, value in loaded.optimizer.items() if name.startswith(_EMA)}
    tensors = {name: value for name, value in loaded.optimizer.items() if name not in averages}
    load_optimizer_state(parts.optimizer, tensors, scalars["optimizer"])
    if parts.live.ema is not None:
        plain = {name.removeprefix(_EMA): value for name, value in averages.items()}
        parts.live.ema.load_state(plain, int(scalars["ema_updates"]))
    parts.precision.load_state_dict(scalars["precision"])
    trainer.state = TrainState.from_dict(scalars["counters"])
    session.validation_history[:] = scalars["validation"]
    session.went_on_from(loaded.name, trainer.state.step)
    return Restored(loaded.name, tuple(free), loaded.passed_over)


def differences(scalars: dict[str, Any], now: RunIdentity) -> tuple[list[str], list[str]]:
    """What differs between a checkpoint and the present run: (must not differ, may differ), each in words."""
    bound, free = setting_differences(scalars["config"], now.config)
    if scalars["model_fingerprint"] != now.model_fingerprint:
        bound.append("the base model: other weights than the checkpoint was made with")
    if scalars["data_digest"] != now.data_digest:
        bound.append("the data set: pictures or captions were added, removed or edited")
    free.extend(_version_changes(scalars.get("versions", {})))
    return bound, free


def setting_differences(before: dict[str, Any], now: TrainConfig) -> tuple[list[str], list[str]]:
    """Settings that differ from a stored config: (must not differ, may differ), each in words."""
    bound: list[str] = []
    free: list[str] = []
    current = to_dict(now)
    for section, fields in before.items():
        if not isinstance(fields, dict):
            continue
        for name, old in fields.items():
            new = current.get(section, {}).get(name)
            if _plain(old) == _plain(new):
                continue
            full = f"{section}.{name}"
            (free if _is_free(section, full) else bound).append(f"{full}: {old!r} in the checkpoint, {new!r} now")
    return bound, free


def refusal(name: str, bound: list[str]) -> CheckpointError:
    """The error of a run that cannot go on exactly from checkpoint `name`."""
    return CheckpointError(
        f"The run cannot go on exactly from {name}, because this has changed:\n"
        + "\n".join(f"  - {line}" for line in bound)
        + "\nPut it back, or start a new run from the LoRA (lora.weights = ...), which is a warm start.",
        differences=bound,
    )


def data_digest(items: Iterable[Item]) -> str:
    """Identity of what is trained on: every picture's place, content and caption."""
    digest = hashlib.blake2b(digest_size=16)
    for item in items:
        digest.update(f"{item.file}\x1f{item.content_hash}\x1f{item.caption}\x1e".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


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


def _is_free(section: str, full: str) -> bool:
    return full not in _BOUND_FIELDS and (section in _FREE_SECTIONS or full in _FREE_FIELDS)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
