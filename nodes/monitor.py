"""Gradient Health Monitor: how the run's health is judged. It stands before Train; its widget follows the run live."""

from __future__ import annotations

from typing import Any

from .. import trainer_core as core
from .boundary import contained
from .handles import MONITOR, MonitorHandle
from .widgets import Declaration, setting, text

_PLAIN = {
    "max_grad_norm": "gradient.max_norm",
    "clip": "gradient.clip",
    "max_rejected_steps": "precision.max_rejected_steps",
    "drop_bad_pictures": "safety.drop_samples",
    "ladder": "safety.ladder",
    "watch": "health.enabled",
    "audit": "health.audit",
}
"""Inputs by config field. The order is part of saved workflows: new ones go to the end."""

_WORDS = {"stop_on": "health.stop_on", "ignore": "health.ignore"}
"""Inputs that are words with commas."""

_SECTIONS = ("gradient", "precision", "safety", "health")


class SafeScalerGradientMonitor:
    CATEGORY = "Safe-Scaler"
    DESCRIPTION = (
        "Sets how steps are judged and shows the gradients' health live: norms per part, verdicts, loss scale, memory. "
        "Link it to Train; during the run this node shows what happens."
    )
    FUNCTION = "execute"
    RETURN_TYPES = (MONITOR,)
    RETURN_NAMES = ("monitor",)
    OUTPUT_TOOLTIPS = ("The judging rules, for Safe-Scaler Train.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:
        required: dict[str, Declaration] = {name: setting(key) for name, key in _PLAIN.items()}
        optional: dict[str, Declaration] = {
            "stop_on": text("", "Verdicts that end the run, with commas, such as: TE1-DEAD, COLLAPSING."),
            "ignore": text("", "Verdicts that are never spoken, with commas."),
            "thresholds": text(
                "",
                "Any other threshold of the sections gradient, precision, safety and health, one a line, such as "
                "health.spike_z = 6 (docs/configuration.md).",
                lines=True,
                advanced=True,
            ),
        }
        return {"required": required, "optional": optional, "hidden": {"unique_id": "UNIQUE_ID"}}

    @contained
    def execute(self, unique_id: str, thresholds: str = "", **inputs: Any) -> tuple[MonitorHandle]:
        settings = {key: inputs[name] for name, key in _PLAIN.items() if name in inputs}
        for name, key in _WORDS.items():
            settings[key] = tuple(word.strip() for word in inputs.get(name, "").split(",") if word.strip())
        return (MonitorHandle(node_id=str(unique_id), settings={**settings, **read_thresholds(thresholds)}),)


def read_thresholds(written: str) -> dict[str, Any]:
    """Settings by `section.field`. ConfigError with every line that is none of the monitor's."""
    settings, problems = core.read_lines(written)
    for key, value in settings.items():
        if key.partition(".")[0] not in _SECTIONS:
            why = "is no threshold of the monitor"
            problems.append(core.Problem(key, value, why, "Write it into more_settings of Train."))
    if problems:
        raise core.ConfigError(problems)
    return settings
