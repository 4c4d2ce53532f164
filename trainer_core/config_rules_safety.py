"""Rules of numerical safety: limits that cannot hold and policies that contradict each other, with both names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from .config import TrainConfig, trained_parts
from .config_fields import did_you_mean
from .config_safety import RUNGS
from .errors import Problem

Found = Iterator[Problem]

_COUNTS = {
    "rollback": "max_rollbacks",
    "precision": "max_precision_moves",
    "learning_rate": "max_lr_cuts",
}


def _scale(config: TrainConfig) -> Found:
    precision = config.precision
    low, first, high = precision.min_loss_scale, precision.initial_loss_scale, precision.max_loss_scale
    if low > first:
        why = f"is above precision.initial_loss_scale = {first:g}"
        yield Problem("precision.min_loss_scale", low, why, "Lower it; 1 is the usual floor.")
    if high < first:
        why = f"is below precision.initial_loss_scale = {first:g}"
        yield Problem("precision.max_loss_scale", high, why, "Raise it, or lower the initial scale.")


def _base_format(config: TrainConfig) -> Found:
    kind = config.precision.base_format
    if kind == "compute":
        return
    if find_spec("torchao") is None:
        why = "needs the library torchao, which is not installed"
        yield Problem("precision.base_format", kind, why, f"Install it: {sys.executable} -m pip install torchao")
    if config.lora.network != "native":
        why = f"goes with our own LoRA only, and lora.network = {config.lora.network}"
        yield Problem("precision.base_format", kind, why, "Write compute, or lora.network = native.")
    if config.lora.init == "pissa":
        why = "rounds the weights that lora.init = pissa is made from"
        yield Problem("precision.base_format", kind, why, "Write compute, or another init.")


def _compile(config: TrainConfig) -> Found:
    kind, lora = config.hardware.compile, config.lora
    on = [name for name in ("dropout", "rank_dropout", "module_dropout") if getattr(lora, name) > 0]
    if kind != "off" and on:
        why = f"compiles anew in every step with lora.{on[0]} on, whose masks are drawn on the host"
        yield Problem("hardware.compile", kind, why, f"Write off, or lora.{on[0]} = 0.")


def _text_encoders(config: TrainConfig) -> Found:
    trained = sorted({"te1", "te2"} & set(trained_parts(config)))
    if config.memory.text_encoders == "host" and trained:
        why = f"cannot hold {' and '.join(trained)}, which are trained on the device"
        fix = "Write auto, or train the UNet alone (te1_lr = te2_lr = 0)."
        yield Problem("memory.text_encoders", "host", why, fix)


def _sanitize(config: TrainConfig) -> Found:
    if config.safety.sanitize and config.precision.compute in ("bf16", "fp32"):
        why = f"acts on overflows of fp16, and precision.compute = {config.precision.compute} has no loss scale"
        yield Problem("safety.sanitize", True, why, "Switch it off, or compute in fp16.")


def _rungs(config: TrainConfig) -> Found:
    safety = config.safety
    if not safety.ladder:
        return
    names = safety.rungs
    for name in names:
        if name == "full_weights":
            why = "is not in this version: no rung trains the full weights of the target modules"
            yield Problem("safety.rungs", name, why, f"Take it out; known are {', '.join(RUNGS)}.")
        elif name not in RUNGS:
            fix = did_you_mean(name, RUNGS, f"Known are {', '.join(RUNGS)}.")
            yield Problem("safety.rungs", name, "is no rung of the ladder", fix)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        why = f"names {', '.join(twice)} twice"
        yield Problem(
            "safety.rungs", list(names), why, "Name every rung once; how often it is taken is a count of its own."
        )
    if "freeze_module" in names and not safety.diagnose:
        why = "holds freeze_module, and safety.diagnose = false never finds the module that was hit first"
        yield Problem("safety.rungs", list(names), why, "Take freeze_module out, or set safety.diagnose = true.")
    if not names:
        fix = "Name some rungs, or set safety.ladder = false."
        yield Problem("safety.rungs", [], "is empty while safety.ladder is on", fix)
    for name, count in _COUNTS.items():
        if name in names and getattr(safety, count) == 0:
            why = f"holds {name}, and safety.{count} = 0 never allows it"
            yield Problem("safety.rungs", list(names), why, f"Take {name} out, or raise safety.{count}.")


def _needs_checkpoints(config: TrainConfig) -> Found:
    checkpoint = config.checkpoint
    if config.safety.ladder and checkpoint.every_steps == 0 and checkpoint.every_minutes == 0:
        why = (
            "every rung goes back to a checkpoint, and checkpoint.every_steps = 0 with checkpoint.every_minutes = 0 "
            "writes none"
        )
        fix = "Set checkpoint.every_steps (250 is the default), or safety.ladder = false."
        yield Problem("safety.ladder", True, why, fix)


def _clipping(config: TrainConfig) -> Found:
    gradient = config.gradient
    defaults = type(gradient)()
    for name, owner in (
        ("zclip_z", "zclip"),
        ("zclip_decay", "zclip"),
        ("zclip_warmup", "zclip"),
        ("clip_percentile", "percentile"),
        ("module_clip", "module"),
    ):
        value = getattr(gradient, name)
        if value != getattr(defaults, name) and gradient.clip != owner:
            why = f"has no effect with gradient.clip = {gradient.clip}"
            yield Problem(f"gradient.{name}", value, why, f"Set gradient.clip = {owner}, or unset it.")


def _drill(config: TrainConfig) -> Found:
    name = config.run.drill
    if not name:
        return
    from .drill.faults import FAULTS, find_fault  # torch, which only a drill needs here

    if find_fault(name) is None:
        known = [fault.name for fault in FAULTS]
        fix = did_you_mean(name, known, f"Known are {', '.join(known)}.")
        yield Problem("run.drill", name, "is no fault of the drill", fix)
    if config.model.path != "toy":
        why = f"breaks a run on purpose, and model.path = {config.model.path} is no toy"
        yield Problem("run.drill", name, why, "Write model.path = toy, or take it out (safe-scaler drill --config).")


SAFETY_RULES: tuple[Callable[[TrainConfig], Found], ...] = (
    _scale,
    _base_format,
    _compile,
    _text_encoders,
    _sanitize,
    _rungs,
    _needs_checkpoints,
    _clipping,
    _drill,
)


def safety_advice(config: TrainConfig) -> list[str]:
    """What is allowed and rarely meant, one sentence each."""
    safety, gradient = config.safety, config.gradient
    conditions = (
        (
            gradient.clip == "percentile" and gradient.clip_percentile < 50,
            f"gradient.clip = percentile at {gradient.clip_percentile:g}: "
            f"{100 - gradient.clip_percentile:g} % of the steps are clipped by design",
        ),
        (
            safety.sanitize,
            "safety.sanitize: an update without its overflowed tensors is biased; rejecting is the default",
        ),
        (
            not safety.drop_samples and safety.quarantine_after != type(safety)().quarantine_after,
            "safety.quarantine_after counts less without safety.drop_samples: a bad picture rejects its whole step",
        ),
    )
    return [text for holds, text in conditions if holds]
