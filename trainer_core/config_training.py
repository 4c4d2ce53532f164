"""Config sections of what is learnt and how: objective, optimizer, learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

from .config_option import STEPS_OR_SHARE, option


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    loss: str = option("l2", "elementwise loss", choices=("l2", "l1", "huber", "smooth_l1"))
    huber_c: float = option(0.1, "Huber threshold", min=1e-6, advanced=True)
    huber_schedule: str = option(
        "snr", "how the Huber threshold follows the timestep", choices=("snr", "exponential", "constant"), advanced=True
    )
    huber_scale: float = option(
        1.0, "factor on the Huber threshold (not used by the snr schedule, as in kohya)", min=1e-6, advanced=True
    )
    min_snr_gamma: float | None = option(None, "min-SNR weighting (Hang et al. 2023); 5 is usual", min=0.0)
    debiased_estimation: bool = option(False, "debiased estimation weighting", advanced=True)
    scale_v_pred_loss_like_noise_pred: bool = option(
        False, "weight a v model's loss as if it predicted noise: snr / (snr + 1)", advanced=True
    )
    v_pred_like_loss: float = option(
        0.0, "add this share of a v-like loss to an epsilon model's loss; 0 = off", min=0.0, max=100.0, advanced=True
    )
    noise_offset: float = option(0.0, "offset noise", min=0.0, max=1.0)
    noise_offset_random_strength: bool = option(
        False, "draw the strength of the offset noise for each sample, from 0 to noise_offset", advanced=True
    )
    adaptive_noise_scale: float = option(
        0.0, "add this times |mean of each latent channel| to noise_offset; 0 = off", min=-1.0, max=1.0, advanced=True
    )
    multires_noise_iterations: int = option(0, "pyramid noise levels", min=0, max=16, advanced=True)
    multires_noise_discount: float = option(0.3, "pyramid noise discount", min=0.0, max=1.0, advanced=True)
    ip_noise_gamma: float = option(0.0, "input perturbation", min=0.0, max=1.0, advanced=True)
    ip_noise_gamma_random_strength: bool = option(
        False, "draw the strength of the input perturbation for each sample, from 0 to ip_noise_gamma", advanced=True
    )
    latents: str = option(
        "sample",
        "latents of a picture: drawn anew each time from what the VAE gives, or their mode (the mean), always the same",
        choices=("sample", "mode"),
        advanced=True,
    )
    min_timestep: int = option(0, "lowest training timestep", min=0, max=999, advanced=True)
    max_timestep: int = option(1000, "training timesteps end before this", min=1, max=1000, advanced=True)
    timestep_distribution: str = option(
        "uniform",
        "how often each timestep is trained (Esser et al. 2024)",
        choices=("uniform", "logit_normal", "mode", "shifted"),
        advanced=True,
    )
    timestep_logit_mean: float = option(
        0.0, "logit_normal: its mean; above 0 = more noise", min=-10.0, max=10.0, advanced=True
    )
    timestep_logit_std: float = option(1.0, "logit_normal: its width", min=0.01, max=10.0, advanced=True)
    timestep_mode_scale: float = option(
        1.29, "mode: above 0 = more of the middle, below 0 = more of the ends", min=-1.0, max=1.75, advanced=True
    )
    timestep_shift: float = option(
        3.0, "shifted: above 1 = more noise, 1 = uniform", min=0.01, max=100.0, advanced=True
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    type: str = option(
        "adamw",
        "optimizer: adamw, adamw8bit, lion, prodigy, dadaptadam, adafactor, adamwschedulefree, came ... "
        "(docs/optimizers.md), or the dotted name of a class in an installed library",
    )
    args: tuple[str, ...] = option((), "arguments of the optimizer as name=value", advanced=True)
    learning_rate: float = option(1e-4, "learning rate", min=0.0, max=10.0)
    unet_lr: float | None = option(
        None, "learning rate of the UNet; unset = learning_rate, 0 = not trained", min=0.0, max=10.0
    )
    te1_lr: float | None = option(
        0.0, "learning rate of text encoder 1; unset = learning_rate, 0 = not trained", min=0.0, max=10.0
    )
    te2_lr: float | None = option(
        0.0, "learning rate of text encoder 2; unset = learning_rate, 0 = not trained", min=0.0, max=10.0
    )
    beta1: float | None = option(
        None, "first beta; unset = the optimizer's own (AdamW: 0.9)", min=0.0, max=0.9999, advanced=True
    )
    beta2: float | None = option(
        None, "second beta; unset = the optimizer's own (AdamW: 0.999)", min=0.0, max=0.99999, advanced=True
    )
    eps: float | None = option(
        None, "epsilon; unset = the optimizer's own (AdamW: 1e-8)", min=1e-16, max=1.0, advanced=True
    )
    weight_decay: float | None = option(
        None, "weight decay; unset = the optimizer's own (AdamW: 0.01)", min=0.0, max=10.0, advanced=True
    )
    loraplus_ratio: float | None = option(
        None, "LoRA+ (Hayou et al. 2024): factor on the rate of lora_up; 16 is theirs, unset = off", min=0.0, max=1000.0
    )
    loraplus_unet_ratio: float | None = option(
        None, "LoRA+ factor in the UNet; unset = loraplus_ratio", min=0.0, max=1000.0, advanced=True
    )
    loraplus_te_ratio: float | None = option(
        None, "LoRA+ factor in the text encoders; unset = loraplus_ratio", min=0.0, max=1000.0, advanced=True
    )
    ema_decay: float = option(
        0.0, "keep an exponential moving average of the adapter; 0.99 to 0.999 is usual, 0 = off", min=0.0, max=0.99999
    )
    ema_validation: bool = option(True, "validate with the averaged adapter (when ema_decay is on)", advanced=True)
    ema_preview: bool = option(True, "make previews with the averaged adapter", advanced=True)
    ema_export: bool = option(True, "write the averaged adapter into LoRA files", advanced=True)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    type: str = option(
        "constant",
        "learning-rate schedule",
        choices=(
            "constant",
            "constant_with_warmup",
            "linear",
            "cosine",
            "cosine_with_restarts",
            "polynomial",
            "inverse_sqrt",
            "cosine_with_min_lr",
            "warmup_stable_decay",
            "piecewise_constant",
        ),
    )
    warmup_steps: float = option(
        0.0, "applied steps of linear warm-up; below 1 = share of the run", min=0.0, unit=STEPS_OR_SHARE
    )
    decay_steps: float = option(
        0.0,
        "warmup_stable_decay: applied steps of decay at the end; below 1 = share of the run",
        min=0.0,
        unit=STEPS_OR_SHARE,
        advanced=True,
    )
    cycles: int = option(
        1,
        "waves of cosine_with_restarts; half waves of cosine_with_min_lr and warmup_stable_decay",
        min=1,
        max=1000,
    )
    power: float = option(1.0, "power of polynomial", min=0.01, max=100.0, advanced=True)
    end_lr: float | None = option(
        None,
        "polynomial: where learning_rate ends, the rates of the parts in proportion; unset = by min_lr_ratio",
        min=0.0,
        max=10.0,
        advanced=True,
    )
    step_rules: str = option(
        "",
        "piecewise_constant: factor:until step, ..., last factor, such as 1:500,0.1:900,0.01; a step below 1 = "
        "share of the run",
        advanced=True,
    )
    timescale: int | None = option(
        None, "timescale of inverse_sqrt; unset = the warm-up, or 10000 without one", min=1, advanced=True
    )
    min_lr_ratio: float = option(
        0.0, "the schedule never falls below this share of the learning rate", min=0.0, max=1.0, advanced=True
    )
