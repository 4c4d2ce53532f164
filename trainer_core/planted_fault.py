"""A fault on purpose in an ordinary run that somebody watches: `run.drill`, for the built-in toy only.

`safe-scaler drill` tries faults one after the other and judges what was seen; this shows one of them in ComfyUI's
nodes, the panel and the report.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .config import TrainConfig
from .drill.command import ONSET
from .drill.faults import Fault, find_fault
from .drill.run import with_sections
from .drill.site import Site
from .events import Warned

if TYPE_CHECKING:
    from .trainer import Trainer


def drill_settings(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """`config` with what its fault needs, labelled in the LoRA file too; and what to tell."""
    fault = _fault(config)
    config = with_sections(config, fault.sections)
    comment = f"DRILL: {fault.name} was put into this run on purpose; not a LoRA to use"
    config = replace(config, metadata=replace(config.metadata, comment=comment))
    return config, [_told(fault, config)]


def plant(trainer: Trainer) -> None:
    """Put the fault of `run.drill` into a run that is put together and has not begun."""
    fault, seed = _fault(trainer.config), trainer.config.run.seed
    assert seed is not None, "create_run draws the seed"
    fault.inject(Site(trainer, seed, _onset(fault)))
    trainer.bus.emit(Warned(step=trainer.state.step, topic="drill", message=_told(fault, trainer.config)))


def _told(fault: Fault, config: TrainConfig) -> str:
    onset, steps = _onset(fault), config.run.max_train_steps
    last = onset + fault.horizon
    short = f" The run ends before that, at step {steps}." if steps is not None and steps < last else ""
    return (
        f"DRILL, a fault on purpose: {fault.title}, from step {onset}. {' or '.join(fault.verdicts)} should be said by "
        f"step {last}.{short} The LoRA of this run is of no use."
    )


def _onset(fault: Fault) -> int:
    return 1 if fault.early else ONSET


def _fault(config: TrainConfig) -> Fault:
    fault = find_fault(config.run.drill)
    assert fault is not None, "checked by config_rules_safety"
    return fault
