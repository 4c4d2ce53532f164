"""Settings that suit a card's memory, each with its reason (`hardware.profile`).

The choice follows from the estimate of `memory/estimate.py` and not from the name of a card: without recomputation
where one picture fits that way (recomputing costs 37 % more arithmetic on SDXL), and as many pictures in one forward
and backward as fit. None of it changes what a step computes, only how; what would (picture size, optimizer, which parts
are trained) is never chosen here, and said where nothing else fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..config import TrainConfig
from ..config_fields import FIELDS
from ..config_io import with_settings
from ..memory.estimate import GIB, cheaper, sdxl_need

CAPACITIES = {"8gb": 8.0, "12gb": 12.0, "24gb": 24.0, "40gb+": 40.0}
"""GiB that a profile takes the card to have."""

FILLED = 0.9
"""Share of a device's memory that the estimate may fill: it is good to about a tenth."""


@dataclass(frozen=True)
class Device:
    """What was found: `kind` is cuda, mps or cpu; `gib` the device's memory; `bf16` whether it computes in it."""

    kind: str
    gib: float
    bf16: bool = True


@dataclass
class Choice:
    """`name`: the profile taken; `settings` by `section.field` and `reasons` in the same order; `notes`: what else is
    to be said."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    reasons: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    def set(self, name: str, value: Any, reason: str) -> None:
        self.settings[name] = value
        self.reasons.append(f"{name} = {_shown(value)}: {reason}")


def probe() -> Device:
    """The device that `run.device = auto` takes here."""
    import torch

    from ..device import choose_device

    device = choose_device("auto")
    if device.type == "cuda":
        size = torch.cuda.get_device_properties(device).total_memory
        return Device("cuda", size / GIB, torch.cuda.is_bf16_supported(including_emulation=False))
    import psutil

    return Device(device.type, psutil.virtual_memory().total / GIB, False)


def choose(profile: str, asked: dict[str, Any], device: Device) -> Choice:
    """The settings of `profile` for a run of full-size SDXL.

    Args:
        asked: the arguments of `sdxl_need` for the run as its settings are.
        device: what is here; its memory counts for `auto` only.
    """
    if profile == "cpu" or (profile == "auto" and device.kind != "cuda"):
        return _cpu()
    capacity = device.gib if profile == "auto" else CAPACITIES[profile]
    choice = Choice(_nearest(capacity) if profile == "auto" else profile)
    compute = "bf16" if device.bf16 or device.kind != "cuda" else "fp16"
    why = "no loss scale is needed, and the range is fp32's" if compute == "bf16" else "this card has no bf16"
    choice.set("precision.compute", compute, why)
    asked = {**asked, "compute": compute}
    need = partial(sdxl_need, **{key: value for key, value in asked.items() if key not in ("recompute", "batch")})
    limit = FILLED * capacity * GIB
    whole = need(recompute=False, batch=1).total
    recompute = whole > limit
    estimate = f"estimated {whole / GIB:.1f} of {capacity:g} GiB"
    if recompute:
        text = f"without it one picture does not fit ({estimate}); it costs about a third of the speed"
    else:
        text = f"one picture fits without it ({estimate}), and it would cost about a third of the speed"
    choice.set("precision.gradient_checkpointing", recompute, text)
    most = _most(lambda batch: need(recompute=recompute, batch=batch).total <= limit, asked["batch"])
    total = need(recompute=recompute, batch=most).total / GIB
    if most < asked["batch"] or total > FILLED * capacity:
        text = (
            f"pictures in one forward and backward; the step stays that of {asked['batch']} (estimated {total:.1f} GiB)"
        )
        choice.set("memory.micro_batch", most, text)
    if total > FILLED * capacity:
        choice.notes.append(_too_little(asked, capacity))
    return choice


def apply_profile(config: TrainConfig, device: Device | None = None) -> tuple[TrainConfig, list[str]]:
    """`config` with its profile's settings where a setting still has its default value, and what to tell about it.

    A profile is for full-size SDXL; other models keep their settings, and it is said.
    """
    profile = config.hardware.profile
    if profile == "off":
        return config, []
    device = device or probe()
    asked = _asked(config)
    if asked is None:
        return config, [f"hardware.profile = {profile}: the model is not a full-size SDXL, so nothing was changed."]
    choice = choose(profile, asked, device)
    kept = {key: value for key, value in choice.settings.items() if not _is_default(config, key)}
    chosen = {key: value for key, value in choice.settings.items() if key not in kept}
    lines = [f"profile {choice.name}: {reason}" for reason in choice.reasons if reason.partition(" ")[0] in chosen]
    lines += [
        f"profile {choice.name}: {key} stays {_shown(_value(config, key))}, as you set it"
        for key, value in kept.items()
        if _value(config, key) != value
    ]
    return with_settings(config, chosen), [*lines, *(f"profile {choice.name}: {note}" for note in choice.notes)]


def _cpu() -> Choice:
    choice = Choice("cpu")
    choice.set("precision.compute", "fp32", "CPUs compute fp16 and mostly bf16 more slowly, or not at all")
    choice.set("memory.micro_batch", 1, "a CPU is as fast with one picture at a time, and memory stays small")
    return choice


def _most(fits: Callable[[int], bool], batch: int) -> int:
    """The largest micro-batch up to `batch` that fits; 1 when none does."""
    return next((size for size in range(batch, 1, -1) if fits(size)), 1)


def _too_little(asked: dict[str, Any], capacity: float) -> str:
    ways = cheaper(sdxl_need, FILLED * capacity * GIB, **{**asked, "recompute": True, "batch": 1})
    words = "; ".join(f"{text}: {size / GIB:.1f} GiB" for text, size in ways)
    more = words or "a smaller dataset.resolution, or lora.preset = attention"
    return f"this does not fit by the estimate. What would help, and changes the result: {more}."


def _nearest(gib: float) -> str:
    """The profile of the largest memory that is not above `gib` (cards have a little less than they are sold with)."""
    names = [name for name, size in CAPACITIES.items() if size <= gib * 1.05]
    return names[-1] if names else "8gb"


def _asked(config: TrainConfig) -> dict[str, Any] | None:
    from ..memory.before_loading import asked_of
    from ..memory.estimate import SDXL_UNET
    from ..models import inspect_model

    info = inspect_model(config.model.path, config_dir=config.model.config_dir)
    if info.parameters.get("unet") != SDXL_UNET:
        return None
    return {**asked_of(config, "bf16", info.native_size), "batch": config.dataset.batch_size}


def _value(config: TrainConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _is_default(config: TrainConfig, key: str) -> bool:
    return bool(_value(config, key) == FIELDS[key].default)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
