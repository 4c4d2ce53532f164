"""Gradient Health Monitor: how the run's health is judged. It stands before Train; its widget follows the run live."""

from __future__ import annotations

from typing import Any

from .boundary import contained
from .handles import MONITOR, MonitorHandle
from .widgets import Declaration, setting

_PLAIN = {
    "max_grad_norm": "gradient.max_norm",
    "max_rejected_steps": "precision.max_rejected_steps",
    "initial_loss_scale": "precision.initial_loss_scale",
    "loss_scale_growth_interval": "precision.loss_scale_growth_interval",
}


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
        return {"required": required, "hidden": {"unique_id": "UNIQUE_ID"}}

    @contained
    def execute(self, unique_id: str, **inputs: Any) -> tuple[MonitorHandle]:
        return (MonitorHandle(node_id=str(unique_id), settings={key: inputs[name] for name, key in _PLAIN.items()}),)
