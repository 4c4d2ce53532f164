"""Rules of what is learnt and how: objective, optimizer, schedule. Gathered by `config_rules.py`.

Nothing here imports torch, except to look at an optimizer class when one beyond plain AdamW is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from .config import ObjectiveConfig, OptimizerConfig, TrainConfig, part_rate, trained_parts
from .config_fields import BadValue
from .config_optimizers import OptimizerKind, find_kind, install_command, parse_arguments, unknown_optimizer
from .config_schedule import parse_step_rules
from .errors import ConfigError, Problem

Found = Iterator[Problem]

_LEAST_FREE_RATE = 0.1
_WEIGHTS = ("min_snr_gamma", "scale_v_pred_loss_like_noise_pred", "v_pred_like_loss", "debiased_estimation")


def weight_problems(config: ObjectiveConfig, prediction_type: str) -> list[Problem]:
    """Loss weights that do not fit what the model predicts ("epsilon" or "v"; "auto" is not known yet)."""
    found: list[Problem] = []
    if config.scale_v_pred_loss_like_noise_pred and prediction_type == "epsilon":
        name, why = "objective.scale_v_pred_loss_like_noise_pred", "the model predicts noise, not v"
        found.append(Problem(name, True, why, "Switch it off, or set model.prediction_type = v if the model is one."))
    if config.v_pred_like_loss > 0 and prediction_type == "v":
        name, why = "objective.v_pred_like_loss", "the model predicts v, its loss is a v loss already"
        found.append(Problem(name, config.v_pred_like_loss, why, "Unset it."))
    return found


def _objective(config: TrainConfig) -> Found:
    objective = config.objective
    if objective.min_timestep >= objective.max_timestep:
        why = f"leaves no timestep below max_timestep = {objective.max_timestep}"
        yield Problem("objective.min_timestep", objective.min_timestep, why, "Make it smaller than max_timestep.")
    if objective.min_snr_gamma == 0:
        why = "0 weighs every loss with 0: nothing would be learnt"
        yield Problem("objective.min_snr_gamma", 0.0, why, "Unset it to switch it off; 5 is usual.")
    yield from weight_problems(objective, config.model.prediction_type)
    for name, needed in (
        ("noise_offset_random_strength", "noise_offset"),
        ("adaptive_noise_scale", "noise_offset"),
        ("ip_noise_gamma_random_strength", "ip_noise_gamma"),
    ):
        value = getattr(objective, name)
        if value and getattr(objective, needed) == 0:
            why = f"has no effect: objective.{needed} is 0"
            yield Problem(f"objective.{name}", value, why, f"Set objective.{needed}, or unset this.")


def _optimizer(config: TrainConfig) -> Found:
    optimizer = config.optimizer
    kind = find_kind(optimizer.type)
    if kind is None:
        yield unknown_optimizer(optimizer.type)
        return
    command = install_command(kind)
    if command is not None:
        why = f"needs the library {kind.package}, which is not installed"
        yield Problem("optimizer.type", optimizer.type, why, f"Install it: {command}")
        return
    refused = list(_adafactor(optimizer, kind)) if kind.name == "adafactor" else []
    yield from refused or _looked_at(*_look(config, kind))[0]
    if kind.rate_free:
        yield from _rate_free(config, kind)
    if kind.schedule_free:
        yield from _schedule_free(config, kind)


def _look(config: TrainConfig, kind: OptimizerKind) -> tuple[OptimizerConfig, str]:
    """What a look at the class depends on: the optimizer without its rates, and the device for 8-bit kernels."""
    names = ("type", "args", "beta1", "beta2", "eps", "weight_decay")
    plain = OptimizerConfig(**{name: getattr(config.optimizer, name) for name in names})
    return plain, config.run.device if kind.package == "bitsandbytes" else "cpu"


@functools.lru_cache(maxsize=64)
def _looked_at(optimizer: OptimizerConfig, device: str) -> tuple[tuple[Problem, ...], str]:
    """Problems of class and arguments, and advice; found by building the optimizer for two small tensors.

    Plain AdamW needs no look.
    """
    if optimizer.type == "adamw" and not optimizer.args:
        return (), ""
    from .optim.trial import try_optimizer

    try:
        return (), try_optimizer(optimizer, device)
    except ConfigError as error:
        return tuple(error.problems), ""


def _rate_free(config: TrainConfig, kind: OptimizerKind) -> Found:
    optimizer = config.optimizer
    rates = {part: part_rate(optimizer, part) for part in trained_parts(config)}
    if len(set(rates.values())) > 1:
        why = f"{kind.name} finds one rate for all parts and cannot give them different ones ({_told(rates)})"
        yield Problem("optimizer.learning_rate", optimizer.learning_rate, why, "Give all trained parts the same rate.")
    for part, rate in list(rates.items())[:1]:
        if 0 < rate < _LEAST_FREE_RATE:
            why = f"{kind.name} finds the rate itself; this is a factor on it, and {rate:g} would all but stop learning"
            name = "learning_rate" if getattr(optimizer, f"{part}_lr") is None else f"{part}_lr"
            yield Problem(f"optimizer.{name}", rate, why, "Write 1.")
    ratio = optimizer.loraplus_ratio or optimizer.loraplus_unet_ratio or optimizer.loraplus_te_ratio
    if ratio:
        why = f"{kind.name} finds one rate for all parts, LoRA+ wants two"
        yield Problem("optimizer.loraplus_ratio", ratio, why, "Unset the LoRA+ ratios, or use adamw.")


def _told(rates: dict[str, float]) -> str:
    return ", ".join(f"{part} {rate:g}" for part, rate in rates.items())


def _schedule_free(config: TrainConfig, kind: OptimizerKind) -> Found:
    if config.schedule.type not in ("constant", "constant_with_warmup"):
        why = f"{kind.name} takes the place of a schedule; a decaying rate works against its averaging"
        yield Problem("schedule.type", config.schedule.type, why, "Write constant (warm-up is allowed), or use adamw.")
    if config.optimizer.ema_decay > 0:
        why = f"{kind.name} averages the weights itself"
        yield Problem("optimizer.ema_decay", config.optimizer.ema_decay, why, "Set it to 0.")


def _adafactor(optimizer: OptimizerConfig, kind: OptimizerKind) -> Found:
    try:
        arguments = parse_arguments(optimizer.args, kind.renamed)
    except BadValue:
        return  # told by the look at the class
    if arguments.get("relative_step"):
        why = "Adafactor would throw the learning rates of all parts away, and the schedule with them"
        yield Problem("optimizer.args", "relative_step=True", why, "Leave it out; the rates are then taken as written.")


def _loraplus(config: TrainConfig) -> Found:
    optimizer = config.optimizer
    for name in ("loraplus_ratio", "loraplus_unet_ratio", "loraplus_te_ratio"):
        if getattr(optimizer, name) == 0:
            why = "a factor of 0 would leave lora_up at 0: nothing would be learnt"
            yield Problem(f"optimizer.{name}", 0.0, why, "Unset it to switch LoRA+ off; 16 is the paper's.")


def _schedule(config: TrainConfig) -> Found:
    schedule = config.schedule
    for name in ("warmup_steps", "decay_steps"):
        value = getattr(schedule, name)
        if value > 1 and not float(value).is_integer():
            why = "is neither whole steps nor a share below 1"
            yield Problem(f"schedule.{name}", value, why, "Write steps (100) or a share (0.1).")
    if schedule.decay_steps > 0 and schedule.type != "warmup_stable_decay":
        why = f"has no effect with the schedule {schedule.type}"
        yield Problem("schedule.decay_steps", schedule.decay_steps, why, "Use warmup_stable_decay, or unset it.")
    if schedule.decay_steps == 0 and schedule.type == "warmup_stable_decay":
        why = "without a decay warmup_stable_decay is constant"
        yield Problem("schedule.decay_steps", 0.0, why, "Write how long the decay is, such as 0.2.")
    yield from _ends(config)
    yield from _length(config)


def _ends(config: TrainConfig) -> Found:
    """Where polynomial and piecewise_constant go."""
    schedule, rate = config.schedule, config.optimizer.learning_rate
    if schedule.type == "polynomial" and schedule.end_lr is not None and 0 < rate <= schedule.end_lr:
        why = f"is not below optimizer.learning_rate = {rate:g}: the rate would rise"
        yield Problem("schedule.end_lr", schedule.end_lr, why, "Lower it, or unset it.")
    if schedule.type == "piecewise_constant":
        try:
            parse_step_rules(schedule.step_rules)
        except BadValue as bad:
            yield Problem("schedule.step_rules", schedule.step_rules, bad.why, bad.fix)
    elif schedule.step_rules:
        why = f"has no effect with the schedule {schedule.type}"
        yield Problem("schedule.step_rules", schedule.step_rules, why, "Use piecewise_constant, or unset it.")


def _length(config: TrainConfig) -> Found:
    steps, schedule = config.run.max_train_steps, config.schedule
    warmup = schedule.warmup_steps
    if steps is not None and warmup >= max(steps, 2):
        why = f"the run has {steps} steps, all of them would be warm-up"
        yield Problem("schedule.warmup_steps", warmup, why, "Write fewer steps, or a share such as 0.1.")
        return
    decay = schedule.decay_steps if schedule.type == "warmup_stable_decay" else 0.0
    known = all(value < 1 for value in (warmup, decay)) or steps is not None
    if known and _steps(warmup, steps) + _steps(decay, steps) > (steps or 1):
        why = f"with a warm-up of {warmup:g} it is longer than the run ({steps or 'all'} steps)"
        yield Problem("schedule.decay_steps", decay, why, "Shorten one of the two.")


def _steps(value: float, total: int | None) -> float:
    return value if total is None else int(value * total) if value < 1 else value


TRAINING_RULES: tuple[Callable[[TrainConfig], Found], ...] = (_objective, _optimizer, _loraplus, _schedule)


def training_advice(config: TrainConfig) -> list[str]:
    """What is allowed and rarely meant, one sentence each."""
    objective, optimizer, schedule = config.objective, config.optimizer, config.schedule
    kind = find_kind(optimizer.type)
    weights = [name for name in _WEIGHTS if getattr(objective, name)]
    conditions: tuple[tuple[bool, str], ...] = (
        (
            objective.loss in ("huber", "smooth_l1")
            and objective.huber_schedule == "snr"
            and objective.huber_scale != 1,
            f"objective.huber_scale = {objective.huber_scale:g} has no effect with the snr schedule (as in sd-scripts)",
        ),
        (
            objective.loss in ("l1", "l2") and (objective.huber_c != 0.1 or objective.huber_schedule != "snr"),
            f"the huber settings have no effect with the loss {objective.loss}",
        ),
        (
            len(weights) > 1,
            f"{' and '.join(f'objective.{name}' for name in weights)} multiply: the same timesteps are weighted twice",
        ),
        (
            config.model.zero_terminal_snr == "true" and config.model.prediction_type == "epsilon",
            "model.zero_terminal_snr with an epsilon model: at the last timestep there is nothing to learn",
        ),
        (
            schedule.power != 1 and schedule.type != "polynomial",
            f"schedule.power = {schedule.power:g} has no effect with the schedule {schedule.type}",
        ),
        (
            schedule.timescale is not None and schedule.type != "inverse_sqrt",
            f"schedule.timescale has no effect with the schedule {schedule.type}",
        ),
        *_unused_timestep_settings(objective),
        *_optimizer_advice(config, kind),
    )
    return [text for holds, text in conditions if holds]


def _unused_timestep_settings(objective: ObjectiveConfig) -> list[tuple[bool, str]]:
    default = ObjectiveConfig()
    return [
        (
            getattr(objective, name) != getattr(default, name) and objective.timestep_distribution != owner,
            f"objective.{name} has no effect with the timestep distribution {objective.timestep_distribution}",
        )
        for name, owner in (
            ("timestep_logit_mean", "logit_normal"),
            ("timestep_logit_std", "logit_normal"),
            ("timestep_mode_scale", "mode"),
            ("timestep_shift", "shifted"),
        )
    ]


def _optimizer_advice(config: TrainConfig, kind: OptimizerKind | None) -> list[tuple[bool, str]]:
    optimizer, default = config.optimizer, OptimizerConfig()
    unused = [
        name
        for name in ("ema_validation", "ema_preview", "ema_export")
        if optimizer.ema_decay == 0 and getattr(optimizer, name) != getattr(default, name)
    ]
    learnt = ""
    if kind is not None and install_command(kind) is None:
        learnt = _looked_at(*_look(config, kind))[1]
    return [
        (bool(unused), f"optimizer.{', optimizer.'.join(unused)}: no effect, optimizer.ema_decay is 0"),
        (bool(learnt), learnt),
    ]
