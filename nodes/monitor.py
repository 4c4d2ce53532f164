"""Gradient Health Monitor: how the run's health is judged. It stands before Train; its widget follows the run live."""

from __future__ import annotations

from typing import Any

from .boundary import contained
from .handles import MONITOR, MonitorHandle
from .widgets import Declaration, setting, text

_MAIN = {
    "max_grad_norm": "gradient.max_norm",
    "clip": "gradient.clip",
    "max_rejected_steps": "precision.max_rejected_steps",
    "drop_bad_pictures": "safety.drop_samples",
    "ladder": "safety.ladder",
    "watch": "health.enabled",
    "audit": "health.audit",
}
_ADVANCED = {
    "initial_loss_scale": "precision.initial_loss_scale",
    "loss_scale_growth_interval": "precision.loss_scale_growth_interval",
    "min_loss_scale": "precision.min_loss_scale",
    "quarantine_after": "safety.quarantine_after",
    "data_fault_share": "safety.data_fault_share",
    "max_rollbacks": "safety.max_rollbacks",
    "max_precision_moves": "safety.max_precision_moves",
    "max_lr_cuts": "safety.max_lr_cuts",
    "lr_cut": "safety.lr_cut",
    "rejected_share": "safety.rejected_share",
    "recovered_after": "safety.recovered_after",
    "check_weights_every": "safety.check_weights_every",
    "diagnose": "safety.diagnose",
    "exploding_acts": "health.act",
    "measure_every": "health.slow_every",
    "spike_decades": "health.spike_decades",
    "spike_z": "health.spike_z",
    "spikes": "health.spikes",
    "rms_warn": "health.rms_warn",
    "rms_alarm": "health.rms_alarm",
    "zero_share": "health.zero_share",
    "vanishing_tensors": "health.vanishing_tensors",
    "changed_share": "health.changed_share",
    "imbalance": "health.imbalance",
}
_WORDS = {"stop_on": "health.stop_on", "ignore": "health.ignore"}
"""Inputs that are words with commas."""
_PLAIN = {**_MAIN, **_ADVANCED}
"""Inputs by config field. The order is part of saved workflows: new ones go to the end."""


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
        required: dict[str, Declaration] = {name: setting(key) for name, key in _MAIN.items()}
        optional: dict[str, Declaration] = {
            "stop_on": text("", "Verdicts that end the run, with commas, such as: TE1-DEAD, COLLAPSING."),
            "ignore": text("", "Verdicts that are never spoken, with commas."),
            **{name: setting(key) for name, key in _ADVANCED.items()},
        }
        return {"required": required, "optional": optional, "hidden": {"unique_id": "UNIQUE_ID"}}

    @contained
    def execute(self, unique_id: str, **inputs: Any) -> tuple[MonitorHandle]:
        settings = {key: inputs[name] for name, key in _PLAIN.items() if name in inputs}
        for name, key in _WORDS.items():
            settings[key] = tuple(word.strip() for word in inputs.get(name, "").split(",") if word.strip())
        return (MonitorHandle(node_id=str(unique_id), settings=settings),)
