"""One run in several processes: process 0 does what every run does, the others compute their share of its steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .processes import Processes, RunOver

if TYPE_CHECKING:
    from ..build import TrainResult
    from ..events import Subscriber
    from ..runs.protocol import Commands

log = logging.getLogger(__name__)


def run_together(
    prepare: Callable[[], Path],
    *,
    commands: Commands,
    sink: Subscriber | None = None,
    limit_s: float = 600.0,
    around: Callable[[Path], Any] | None = None,
) -> TrainResult | None:
    """Train one run in all processes that the launcher started.

    Args:
        prepare: makes the run folder, or changes it for a resume; called in process 0 alone.
        limit_s: seconds a process waits for another's answer or sign of life.
        around: a context around the run in process 0 (its log).

    Returns:
        The result in process 0, None in the others.

    Raises:
        ProcessError: processes are gone, failed, or do not agree (in process 0 it is the run's result instead).
    """
    from contextlib import nullcontext

    processes = Processes(limit_s=limit_s, cuda=torch.cuda.is_available())
    try:
        told = processes.share_json(lambda: _described(prepare()))
        if not processes.first:
            _follow(told, processes, commands)
            return None
        from ..build import run

        with around(Path(told["run_dir"])) if around is not None else nullcontext():
            result = run(told["run_dir"], commands=commands, sink=sink, processes=processes)
        if result.status == "failed":
            processes.tell_failed(result.message)
        else:
            processes.tell_over()
        return result
    except BaseException as error:
        processes.tell_failed(error)
        raise
    finally:
        processes.close()


def _described(run_dir: Path) -> dict[str, Any]:
    from ..runs.folder import RunFolder

    return {"run_dir": str(run_dir.resolve()), "stored": RunFolder(run_dir).read_config()}


def _follow(told: dict[str, Any], processes: Processes, commands: Commands) -> None:
    """Compute this process's share; write nothing, say nothing."""
    from ..assemble import assemble
    from ..config_io import from_dict
    from ..events import EventBus
    from ..runs.folder import RunFolder

    folder, stored = RunFolder(told["run_dir"]), told["stored"]
    try:
        with torch.inference_mode(False), torch.enable_grad():
            assembly = assemble(
                folder,
                stored,
                from_dict(stored["config"]),
                bus=EventBus(run_id=folder.run_id),
                commands=commands,
                database=None,
                processes=processes,
            )
            if assembly is not None:
                assembly.trainer.run()
    except RunOver:
        log.info("process %d: the run is over", processes.rank)
