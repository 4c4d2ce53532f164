"""ComfyUI input declarations, made from the core's config fields so that ranges and help texts exist once."""

from __future__ import annotations

from typing import Any

from .. import trainer_core as core

Declaration = tuple[Any, dict[str, Any]]

_STEP = {"optimizer.learning_rate": 1e-6, "optimizer.unet_lr": 1e-6, "optimizer.te1_lr": 1e-6, "optimizer.te2_lr": 1e-6}


def setting(key: str, default: Any = None, *, tooltip: str = "", low: float | None = None) -> Declaration:
    """The widget of config field `key` (`section.field`). `tooltip` and `default` replace the field's own.

    `low`: another lower limit, where a node gives a value below the field's range a meaning of its own (0, -1 = auto).
    """
    spec = core.FIELDS[key]
    value = spec.default if default is None else default
    options: dict[str, Any] = {"default": value, "tooltip": tooltip or _sentence(spec.help)}
    if spec.advanced:
        options["advanced"] = True
    if spec.choices:
        return list(spec.choices), options
    if spec.kind in ("whole number", "number"):
        options["min"] = spec.min if low is None else low
        options["max"] = min(spec.max if spec.max is not None else 1_000_000, 2**53)
        if options["min"] is None:
            options["min"] = 0
    if spec.kind == "whole number":
        options["min"], options["max"], options["step"] = int(options["min"]), int(options["max"]), 1
        return "INT", options
    if spec.kind == "number":
        options["step"] = _STEP.get(key, 0.01)
        options["round"] = False
        return "FLOAT", options
    if spec.kind == "true or false":
        return "BOOLEAN", options
    return "STRING", options


def text(default: str, tooltip: str, *, lines: bool = False, **more: Any) -> Declaration:
    """A text widget; `lines` makes it a box of several lines."""
    return "STRING", {"default": default, "tooltip": tooltip, "multiline": lines, **more}


def choice(values: list[str], tooltip: str, default: str | None = None, **more: Any) -> Declaration:
    """A drop-down list."""
    return values, {"default": values[0] if default is None else default, "tooltip": tooltip, **more}


def socket(kind: str, tooltip: str, **more: Any) -> Declaration:
    """An input that takes a link only."""
    return kind, {"tooltip": tooltip, **more}


def _sentence(help_text: str) -> str:
    return help_text[:1].upper() + help_text[1:] + "."
