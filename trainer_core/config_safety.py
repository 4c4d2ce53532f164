"""Config sections of numerical safety: number format, gradient and clipping, and what is done when steps fail.

Numbers marked [D] are our own choice; the others come from torch or the papers named in docs/numerical_safety.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config_option import option

RUNGS = ("rollback", "precision", "learning_rate", "reset_optimizer", "freeze_module")
"""What the escalation ladder may try, by name. The last two are off unless asked for."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    compute: str = option("auto", "number format of forward and backward", choices=("auto", "fp32", "bf16", "fp16"))
    initial_loss_scale: float = option(65536.0, "first fp16 loss scale", min=1.0, advanced=True)
    loss_scale_growth_interval: int = option(
        500, "applied steps without overflow before the loss scale doubles (torch: 2000)", min=1, advanced=True
    )
    min_loss_scale: float = option(
        1.0, "the loss scale never falls below this; below 1 it would shrink gradients", min=1.0, advanced=True
    )
    max_loss_scale: float = option(2.0**24, "the loss scale never grows above this", min=1.0, advanced=True)
    max_rejected_steps: int = option(
        8, "rejected steps in a row that start the escalation ladder, or end the run without it", min=1, max=1000
    )
    gradient_checkpointing: bool = option(False, "recompute activations in backward: less memory, about a third slower")
    base_format: str = option(
        "compute",
        "how the UNet's frozen linear layers are kept: in the format that is computed in, or in 8 bits (needs torchao; "
        "rounds the base)",
        choices=("compute", "int8", "fp8"),
        advanced=True,
    )


@dataclass(frozen=True, kw_only=True)
class GradientConfig:
    accumulation: int = option(1, "micro-batches in one step", min=1, max=4096)
    max_norm: float = option(1.0, "clip the global gradient norm to this; 0 = off", min=0.0)
    clip: str = option(
        "fixed",
        "what is clipped: the norm to max_norm, or also outliers of its own history (zclip), to a percentile of it, or "
        "each tensor by the size of its weights (module)",
        choices=("fixed", "zclip", "percentile", "module"),
        advanced=True,
    )
    zclip_z: float = option(
        2.5, "zclip: clip norms this many standard deviations above the mean of log norms", min=0.1, advanced=True
    )
    zclip_decay: float = option(0.97, "zclip: decay of mean and variance", min=0.0, max=0.9999, advanced=True)
    zclip_warmup: int = option(25, "zclip: applied steps before it acts", min=2, max=10000, advanced=True)
    clip_percentile: float = option(
        10.0,
        "percentile: clip to this percentile of all norms so far (AutoClip: 10)",
        min=0.1,
        max=100.0,
        advanced=True,
    )
    module_clip: float = option(
        0.01, "module: largest gradient norm as a share of the weight norm (AGC)", min=1e-6, advanced=True
    )


@dataclass(frozen=True, kw_only=True)
class SafetyConfig:
    drop_samples: bool = option(
        True, "leave out single pictures whose loss is not finite and compute the step again without them"
    )
    quarantine_after: int = option(
        2, "times a picture may fail before it is left out for the rest of the run", min=1, max=1000, advanced=True
    )
    data_fault_share: float = option(
        0.01,
        "when steps keep failing and more than this share of the pictures is quarantined, stop: the data are at fault",
        min=0.0,
        max=1.0,
        advanced=True,
    )
    sanitize: bool = option(
        False,
        "fp16: leave the few tensors that overflowed out of the update instead of rejecting the step (not recommended)",
        advanced=True,
    )
    sanitize_share: float = option(
        0.01, "sanitize: at most this share of the tensors may be left out", min=0.0, max=1.0, advanced=True
    )
    ladder: bool = option(True, "when steps keep failing go back to the last good checkpoint and try rung after rung")
    rungs: tuple[str, ...] = option(
        ("rollback", "precision", "learning_rate"),
        "rungs of the ladder, in order: rollback, precision, learning_rate, reset_optimizer, freeze_module",
        advanced=True,
    )
    max_rollbacks: int = option(3, "rollbacks in a run at most", min=0, max=100, advanced=True)
    max_precision_moves: int = option(
        2, "changes to a safer number format in a run at most", min=0, max=2, advanced=True
    )
    max_lr_cuts: int = option(2, "learning-rate cuts in a run at most", min=0, max=100, advanced=True)
    lr_cut: float = option(0.5, "factor of a learning-rate cut", min=0.01, max=0.99, advanced=True)
    skip_beyond: float = option(
        0.1,
        "a rollback also leaves out this share more of the data that led to the failure",
        min=0.0,
        max=10.0,
        advanced=True,
    )
    recovered_after: int = option(
        200, "applied steps without new trouble after which a recovery has held", min=1, advanced=True
    )
    rejected_share: float = option(
        0.2, "rejected share of the last 100 steps that starts the ladder", min=0.01, max=1.0, advanced=True
    )
    check_weights_every: int = option(
        100,
        "steps between checks that weights and optimizer state are finite; 0 = on rejected steps only",
        min=0,
        advanced=True,
    )
    diagnose: bool = option(
        True, "compute a failed step once more to find the layer and micro-batch that failed first", advanced=True
    )
