"""The fast record of a step, from what the trainer knows on the host. No device read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..config import part_rate
from ..data.captions import CaptionMoment, caption_stream, process_caption
from ..optim.phases import CALIBRATE
from ..optim.schedules import learning_rate_factor
from .records import FastRecord

if TYPE_CHECKING:
    import torch

    from ..optim.clipping import Clip
    from ..optim.precision import StepVerdict
    from ..optim.reading import StepReading
    from ..step_work import StepWork
    from ..trainer import Trainer

Parameters = Mapping[str, "torch.nn.Parameter"]


def fast_record(
    trainer: Trainer,
    parameters: Parameters,
    work: StepWork,
    reading: StepReading,
    verdict: StepVerdict,
    clip: Clip | None,
) -> FastRecord:
    """What is known of the step that was just decided."""
    norms = dict(zip(reading.names, reading.norms, strict=True))
    for name in parameters.keys() - norms.keys():
        # A tensor that the optimizer does not hold keeps its gradient: it is not cut off, only not updated.
        if parameters[name].grad is not None:
            norms[name] = 1.0
    applied = verdict.action == "apply"
    share = 1.0
    if clip is not None and clip.acted and reading.grad_norm > 0:
        share = clip.norm / reading.grad_norm
    return FastRecord(
        step=trainer.state.step,
        applied=trainer.state.applied,
        outcome="applied" if applied else verdict.kind or "other",
        loss=reading.loss,
        losses=reading.loss_B,
        grad_norm=reading.grad_norm,
        loss_scale=reading.loss_scale,
        clip=share,
        norms=norms,
        zero_rate=_zero_rate(trainer, parameters) if applied else frozenset(),
        not_trainable=frozenset(name for name, parameter in parameters.items() if not parameter.requires_grad),
        captions_dropped=_captions_dropped(trainer, work),
        calibrating=trainer.parts.precision.phases.phase == CALIBRATE,
        time=time.time(),
    )


def _zero_rate(trainer: Trainer, parameters: Parameters) -> frozenset[str]:
    """Tensors that were updated with a rate of 0 although the schedule says more."""
    resting = [group for group in trainer.parts.optimizer.param_groups if float(group["lr"]) == 0.0]
    if not resting:
        return frozenset()
    config = trainer.config
    factor = learning_rate_factor(config.schedule, trainer.state.applied - 1, trainer.total_steps)
    if factor * trainer.lr_factor == 0:
        return frozenset()
    factors = trainer.parts.network.rate_factors()
    return frozenset(
        name
        for group in resting
        if part_rate(config.optimizer, group["part"]) > 0
        for name in group["names"]
        if factors.get(name, 1.0) > 0 and name in parameters
    )


def _captions_dropped(trainer: Trainer, work: StepWork) -> bool:
    """Whether every caption of the step was the empty one."""
    items = [trainer.parts.plan.items[ref.item_index] for ref in work.refs]
    if not items or not all(item.rules.may_be_empty or not item.caption for item in items):
        return False
    moment = CaptionMoment(epoch=work.epoch, step=trainer.state.applied, total_steps=trainer.total_steps)
    return not any(
        process_caption(item.caption, item.rules, caption_stream(trainer.draws, work.epoch, ref.key), moment)
        for item, ref in zip(items, work.refs, strict=True)
    )
