"""Mending what the audit found, rung by rung, each tried once and looked at again. Never trains more than was asked
for.

requires_grad on -> fp32 weights -> the optimizer's groups hold the live tensors -> no reentrant checkpointing ->
nothing compiled -> text encoders are run instead of read from a cache. What is still broken then is an error with
names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import HealthError
from .audit import AuditReport, audit
from .groups import Tensor
from .sentences import sentence

if TYPE_CHECKING:
    from ..trainer import Trainer


@dataclass(frozen=True)
class Repair:
    """A rung that was tried: what it did, and whether nothing was wrong afterwards."""

    action: str
    mended: bool


def repair(
    trainer: Trainer, tensors: dict[str, Tensor], allowed: frozenset[str], report: AuditReport
) -> tuple[AuditReport, tuple[Repair, ...]]:
    """Try the rungs until the audit is sound; returns the last report and what was done.

    Raises:
        HealthError: the set of trained tensors would have become larger. It never should.
    """
    before = _trained(trainer)
    done: list[Repair] = []
    for rung in _RUNGS:
        if report.sound:
            break
        action = rung(trainer, report)
        if not action:
            continue
        report = audit(trainer, tensors, allowed)
        done.append(Repair(action, report.sound))
    if not _trained(trainer) <= before:
        raise HealthError("A repair would have trained tensors that nobody asked for. Set health.audit = 'check'.")
    return report, tuple(done)


def refusal(report: AuditReport, repairs: tuple[Repair, ...]) -> HealthError:
    """The error of a run that cannot learn what it should."""
    lines = [sentence(finding) for finding in report.findings]
    if report.broken is not None:
        lines.append(f"The chain is cut here: {report.broken.cause}.")
    tried = f" Tried without success: {'; '.join(repair.action for repair in repairs)}." if repairs else ""
    return HealthError(f"The check before the first step failed. {' '.join(lines)}{tried}")


def _trained(trainer: Trainer) -> set[str]:
    network = trainer.parts.network
    return {name for part in network.parts for name in network.parameters_of(part)}


def _live(trainer: Trainer) -> dict[str, torch.nn.Parameter]:
    network = trainer.parts.network
    return {name: p for part in network.parts for name, p in network.parameters_of(part).items()}


def _switch_on(trainer: Trainer, report: AuditReport) -> str:
    off = [name for name, found in report.tensors.items() if not found.trainable]
    live = _live(trainer)
    for name in off:
        live[name].requires_grad_(True)
    return f"requires_grad was switched on for {len(off)} adapter tensors" if off else ""


@torch.no_grad()
def _cast_back(trainer: Trainer, report: AuditReport) -> str:
    coarse = [name for name, found in report.tensors.items() if found.dtype != "float32"]
    live = _live(trainer)
    for name in coarse:
        live[name].grad = None
        live[name].data = live[name].data.float()
        trainer.parts.optimizer.state.pop(live[name], None)
    return f"{len(coarse)} adapter tensors are kept in fp32 again" if coarse else ""


def _rebuild_groups(trainer: Trainer, report: AuditReport) -> str:
    """Put the live tensors into the places that the optimizer keeps for their names; each once."""
    if all(found.held == 1 for found in report.tensors.values()):
        return ""
    live, optimizer = _live(trainer), trainer.parts.optimizer
    seen: set[str] = set()
    changed = 0
    for group in optimizer.param_groups:
        kept: list[tuple[str, Any]] = []
        for name, parameter in zip(group["names"], group["params"], strict=True):
            if name in seen or name not in live:
                changed += 1
                continue
            seen.add(name)
            if parameter is not live[name]:
                optimizer.state.pop(parameter, None)
                changed += 1
            kept.append((name, live[name]))
        group["names"] = [name for name, _ in kept]
        group["params"] = [parameter for _, parameter in kept]
    return f"the optimizer holds the live tensors again ({changed} were replaced or double)" if changed else ""


def _no_reentrant(trainer: Trainer, report: AuditReport) -> str:
    if report.broken is None or report.broken.kind != "reentrant":
        return ""
    model = trainer.parts.model
    found = 0
    for root in model.parts.values():
        for module in root.modules():
            if getattr(module, "gradient_checkpointing", False):
                found += 1
    if found:
        model.set_gradient_checkpointing(True)  # ours is never the reentrant kind
        return f"gradient checkpointing of {found} blocks is no longer reentrant"
    return ""


def _no_compile(trainer: Trainer, report: AuditReport) -> str:
    undone = 0
    for root in trainer.parts.model.parts.values():
        for module in root.modules():
            if getattr(module, "_compiled_call_impl", None) is not None:
                module._compiled_call_impl = None
                undone += 1
    return f"{undone} compiled modules run as they are" if undone else ""


def _run_encoders(trainer: Trainer, report: AuditReport) -> str:
    loader = trainer.parts.loader
    dead = any(finding.kind in ("TE1-DEAD", "TE2-DEAD") for finding in report.findings)
    if not dead or loader.texts is None:
        return ""
    loader.texts = None
    return "the text encoders are run in every step instead of read from the cache"


_RUNGS: tuple[Callable[[Any, AuditReport], str], ...] = (
    _switch_on,
    _cast_back,
    _rebuild_groups,
    _no_reentrant,
    _no_compile,
    _run_encoders,
)
