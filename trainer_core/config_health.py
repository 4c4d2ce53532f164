"""Config section of gradient health: what is measured, when a verdict is spoken, and what follows from it.

Thresholds are those of docs/gradient_health.md. They are upper bounds: after `learn_steps` steps a run uses percentiles
of its own beginning where these are stricter.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config_option import option

VERDICTS = (
    "NON-FINITE",
    "TE1-DEAD",
    "TE2-DEAD",
    "DISCONNECTED",
    "DTYPE-CHANGED",
    "STATE-LOST",
    "FROZEN",
    "MISSING-CONTRIBUTION",
    "EXPLODING",
    "VANISHING",
    "STALE",
    "IMBALANCED",
    "COLLAPSING",
    "CLIP-SATURATED",
    "CLIP-DRIFT",
    "SCALE-COLLAPSING",
)
"""Verdicts that can be spoken, in order of precedence: an earlier one explains later ones on the same tensors."""

STOPPABLE = (
    "TE1-DEAD",
    "TE2-DEAD",
    "DISCONNECTED",
    "DTYPE-CHANGED",
    "STATE-LOST",
    "FROZEN",
    "MISSING-CONTRIBUTION",
    "VANISHING",
    "STALE",
    "IMBALANCED",
    "COLLAPSING",
)
"""Verdicts that may end a run (`health.stop_on`). The others belong to the safe scaler and its ladder, or to
clipping.
"""


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    enabled: bool = option(True, "watch gradients, weights and updates and say what is wrong")
    audit: str = option(
        "repair",
        "before the first step see that a gradient reaches everything that is trained, and mend what can be mended "
        "(repair), only tell (check), or leave it (off)",
        choices=("repair", "check", "off"),
    )
    slow_every: int = option(50, "steps between full measurements", min=1, advanced=True)
    slow_every_early: int = option(10, "the same in the first early_steps steps", min=1, advanced=True)
    early_steps: int = option(200, "steps at the beginning that are measured more often", min=0, advanced=True)
    watch_steps: int = option(20, "steps in a row that are measured in full after a warning", min=0, advanced=True)
    learn_steps: int = option(
        100, "steps after which thresholds come from the run's own beginning; 0 = never", min=0, advanced=True
    )
    spike_decades: float = option(
        1.0, "a spike: the gradient norm is this many powers of ten above its median", min=0.1, max=10.0, advanced=True
    )
    spike_z: float = option(6.0, "and this many robust standard deviations", min=1.0, max=100.0, advanced=True)
    spikes: int = option(3, "spikes in ten steps that mean EXPLODING", min=1, max=10, advanced=True)
    rms_warn: float = option(
        4.0, "gradient in units of Adam's second moment from which it is told", min=1.0, advanced=True
    )
    rms_alarm: float = option(8.0, "the same from which it means EXPLODING", min=1.0, advanced=True)
    zero_share: float = option(
        0.5,
        "a tensor's gradient vanishes when more than this share of it is exactly 0",
        min=0.01,
        max=1.0,
        advanced=True,
    )
    vanishing_tensors: float = option(
        0.1, "share of the UNet's tensors that must vanish for VANISHING", min=0.001, max=1.0, advanced=True
    )
    changed_share: float = option(
        0.5, "a tensor is stale when less than this share of it moves in an update", min=0.001, max=1.0, advanced=True
    )
    imbalance: float = option(
        2.0, "IMBALANCED: one factor of an adapter moves the layer this many powers of ten more", min=0.5, advanced=True
    )
    ignore: tuple[str, ...] = option((), "verdicts that are never spoken, by name", advanced=True)
    stop_on: tuple[str, ...] = option((), "verdicts that end the run, by name", advanced=True)
    act: bool = option(True, "EXPLODING starts the escalation ladder (safety.ladder)", advanced=True)
    fire_counters: bool = option(
        False,
        "count how often every tensor gets a gradient, to tell which micro-batch gave none (slower)",
        advanced=True,
    )
    headroom_every: int = option(
        0,
        "steps between looks at how far activations are from fp16's largest number; 0 = never",
        min=0,
        advanced=True,
    )
    ring_steps: int = option(
        4096,
        "steps that the flight recorder keeps (readable after a crash); 0 = none",
        min=0,
        max=1_000_000,
        advanced=True,
    )
    prometheus_port: int = option(0, "port on this machine for Prometheus; 0 = off", min=0, max=65535, advanced=True)
    tensorboard: bool = option(False, "write TensorBoard files into the run folder", advanced=True)
    export_json: bool = option(False, "write health.json into the run folder at every full measurement", advanced=True)
