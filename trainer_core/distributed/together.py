"""Where an assembly differs when several processes share a run. With one process every method does the plain thing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from ..optim.phases import Trigger
from .alignment import check_start, describe_optimizer, fingerprint
from .processes import Processes

if TYPE_CHECKING:
    from ..resume import RunIdentity
    from ..session import Session
    from ..trainer import Trainer


class Together:
    """The processes of a run while it is put together; `processes` is None with one."""

    def __init__(self, processes: Processes | None) -> None:
        self.processes = processes

    @property
    def count(self) -> int:
        return 1 if self.processes is None else self.processes.count

    @property
    def first(self) -> bool:
        return self.processes is None or self.processes.first

    def device(self, chosen: torch.device) -> torch.device:
        """`chosen`, or this process's own GPU of this machine."""
        if self.processes is None or chosen.type != "cuda":
            return chosen
        device = torch.device("cuda", self.processes.local_rank)
        torch.cuda.set_device(device)
        return device

    def wait_for_caches(self) -> None:
        """Process 0 scans and caches first; the others then find everything done (or do it on their own disk)."""
        if self.processes is not None and not self.processes.first:
            self.processes.gate("caches")

    def caches_are_there(self) -> None:
        if self.processes is not None and self.processes.first:
            self.processes.gate("caches")

    def should_stop(self, session: Session) -> Callable[[], bool]:
        """Polled in a step. With several processes it must not block or do slow work: the others would wait."""
        return session.should_stop if self.processes is None else session.commands.should_stop

    def after_step(self, session: Session) -> Callable[[int], None]:
        return session.after_step if self.first else lambda step: None

    def check(self, trainer: Trainer, identity: RunIdentity) -> None:
        """Wait until all are assembled, then compare what they are about to train.

        Raises:
            ProcessError: naming what differs.
        """
        if self.processes is None:
            return
        self.processes.meet("assembled")
        from ..config_io import to_dict
        from ..resume import library_versions

        parameters = [p for group in trainer.parts.optimizer.param_groups for p in group["params"]]
        check_start(
            self.processes,
            {
                "trained tensors (names, shapes, types, groups)": describe_optimizer(trainer.parts.optimizer),
                "their first values": str(fingerprint(parameters)),
                "base model": identity.model_fingerprint,
                "data set": identity.data_digest,
                "steps": f"{trainer.total_steps} {trainer.parts.plan.micro_batches_per_epoch}",
                "settings": json.dumps(to_dict(identity.config), sort_keys=True),
                "library versions": json.dumps(library_versions(), sort_keys=True),
            },
        )


def agreed_trigger(processes: Processes, own: Trigger | None) -> Trigger | None:
    """What the ladder is asked for after a step, the same in every process: the first process's that has a trigger.
    Measurements may arrive on the host a step later in one process than in another."""
    if not any(processes.any_of(own is not None)):
        return None
    found = [json.loads(text) for text in processes.gather(json.dumps(None if own is None else asdict(own)))]
    return Trigger(**next(told for told in found if told is not None))
