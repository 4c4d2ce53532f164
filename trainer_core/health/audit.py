"""Before the first step: does a gradient reach everything that is trained, and does the optimizer hold it?

One forward and backward through the trainer's own path, with every tensor that is still 0 (lora_up) set to small keyed
numbers, so that both factors of every adapter must get a gradient: a zero or missing one is a fault and no matter of
the beginning. Weights, gradients, modes and random streams are put back bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..data.batches import plain_caption
from ..draws import Draws
from .chain_break import Break, watch_chain
from .findings import Finding
from .groups import Tensor, half_cut

if TYPE_CHECKING:
    from ..data import Batch, SampleRef
    from ..trainer import Trainer

_SEED = 20_261_129
_SPREAD = 1e-3
_LOSS_FACTOR = 1024.0
"""Keeps small gradients above zero in half precision; only "zero or not" is asked."""
_DEAD_SHARE = 0.95

OK, NONE, ZERO, NONFINITE = "ok", "none", "zero", "non-finite"


@dataclass(frozen=True)
class TensorAudit:
    """What the probe found of one tensor. `gradient`: ok, none, zero or non-finite. `held`: how many times it is in the
    optimizer; `rate`: its learning rate there before the schedule."""

    gradient: str
    held: int
    rate: float
    dtype: str
    trainable: bool


@dataclass(frozen=True)
class AuditReport:
    """`tensors` by parameter name; `findings`: what is wrong; `broken`: where the chain of gradients is cut."""

    tensors: Mapping[str, TensorAudit]
    findings: tuple[Finding, ...] = ()
    broken: Break | None = None

    @property
    def sound(self) -> bool:
        return not self.findings

    @property
    def named(self) -> frozenset[str]:
        """All tensors that some finding names."""
        return frozenset(name for finding in self.findings for name in finding.tensors)


def audit(trainer: Trainer, tensors: Mapping[str, Tensor], allowed: frozenset[str]) -> AuditReport:
    """Probe the run as it would train. `tensors`: those to look at; `allowed`: those without a gradient by design.
    Changes nothing."""
    network = trainer.parts.network
    everything = {name: p for part in network.parts for name, p in network.parameters_of(part).items()}
    live = {name: parameter for name, parameter in everything.items() if name in tensors}
    with _put_back(trainer, live):
        _fill_zeros(live)
        # Where gradients are cut is only looked for when some are missing: hooks on every module are slow.
        _pass(trainer)
        states = {name: _state(parameter) for name, parameter in live.items()}
        broken = None
        if any(state != OK and name not in allowed for name, state in states.items()):
            for parameter in live.values():
                parameter.grad = None
            with watch_chain(trainer.parts.model, live) as chain:
                _pass(trainer)
            broken = chain.first_break()
    held = _held(trainer)
    found = {
        name: TensorAudit(
            states[name],
            held.get(id(parameter), (0, 0.0))[0],
            held.get(id(parameter), (0, 0.0))[1],
            str(parameter.dtype).removeprefix("torch."),
            parameter.requires_grad,
        )
        for name, parameter in live.items()
    }
    return AuditReport(found, tuple(_findings(found, tensors, allowed)), broken)


def _pass(trainer: Trainer) -> None:
    refs = _smallest(trainer)
    batch = _with_captions(trainer, refs, trainer.load(0, refs))
    with torch.enable_grad():
        loss_B = trainer.loss(0, batch)
        if loss_B.requires_grad:  # else nothing at all is reached, and the states say so
            (loss_B.mean() * _LOSS_FACTOR).backward()


def _smallest(trainer: Trainer) -> tuple[SampleRef, ...]:
    """One sample of the smallest bucket, with a caption where there is one."""
    plan = trainer.parts.plan
    refs = [ref for batch in plan.batches(0) for ref in batch]

    def order(ref: SampleRef) -> tuple[bool, int]:
        item = plan.items[ref.item_index]
        height, width = item.bucket
        return not item.caption, height * width

    return (min(refs, key=order),)


def _with_captions(trainer: Trainer, refs: tuple[SampleRef, ...], batch: Batch) -> Batch:
    """The batch with its captions as written: a dropped one would leave the text encoders without a gradient."""
    if batch.context_BTD is not None:
        return batch
    items = trainer.parts.plan.items
    return replace(batch, captions=tuple(plain_caption(items[ref.item_index]) for ref in refs))


@torch.no_grad()
def _fill_zeros(live: Mapping[str, torch.nn.Parameter]) -> None:
    draws = Draws(_SEED)
    for name, parameter in live.items():
        if not bool(parameter.any()):
            values = draws.normal(0, name, "audit", parameter.shape) * _SPREAD
            parameter.copy_(values.to(parameter.device, parameter.dtype))


def _state(parameter: torch.nn.Parameter) -> str:
    if parameter.grad is None:
        return NONE
    largest = float(parameter.grad.abs().max())
    if largest == 0:
        return ZERO
    return OK if largest < float("inf") else NONFINITE


def _held(trainer: Trainer) -> dict[int, tuple[int, float]]:
    """Parameter id -> (how many times the optimizer holds it, its rate)."""
    held: dict[int, tuple[int, float]] = {}
    for group in trainer.parts.optimizer.param_groups:
        for parameter in group["params"]:
            count, rate = held.get(id(parameter), (0, 0.0))
            held[id(parameter)] = (count + 1, max(rate, float(group["base_lr"])))
    return held


def _findings(
    found: Mapping[str, TensorAudit], tensors: Mapping[str, Tensor], allowed: frozenset[str]
) -> Iterator[Finding]:
    explained: set[str] = set()

    def collect(names: list[str], kind: str, cause: str) -> Iterator[Finding]:
        fresh = [name for name in names if name not in explained]
        explained.update(fresh)
        groups: dict[str, list[str]] = {}
        for name in fresh:
            groups.setdefault(tensors[name].group, []).append(name)
        for group, members in groups.items():
            yield Finding(kind, group, tuple(members), cause, numbers={"tensors": len(members)})

    yield from collect([n for n, t in found.items() if not t.trainable], "FROZEN", "off")
    for part in ("te1", "te2"):
        names = [n for n, t in tensors.items() if t.part == part and n not in allowed and n in found]
        dead = [n for n in names if found[n].gradient in (NONE, ZERO) and n not in explained]
        if names and len(dead) >= _DEAD_SHARE * len(names):
            cause = "none" if found[dead[0]].gradient == NONE else "zero"
            explained.update(dead)
            yield Finding(f"{part.upper()}-DEAD", part, tuple(dead), cause, numbers={"tensors": len(dead)})
    wanted = [name for name in found if name not in allowed]
    missing = [name for name in wanted if found[name].gradient == NONE]
    yield from collect([n for n in missing if half_cut(n, missing, tensors)], "DISCONNECTED", "between")
    yield from collect(missing, "DISCONNECTED", "")
    yield from collect([n for n in wanted if found[n].gradient == ZERO], "DISCONNECTED", "zero")
    yield from collect([n for n in found if found[n].held == 0], "STALE", "outside")
    yield from collect([n for n in found if found[n].held > 1], "STALE", "twice")
    yield from collect([n for n in found if found[n].dtype != "float32"], "STALE", "dtype")
    resting = {name for name in found if found[name].rate == 0 and found[name].held}
    halves = {
        name
        for name in resting
        if any(t.module == tensors[name].module and other not in resting for other, t in tensors.items())
    }
    ups = [name for name in halves if tensors[name].role == "B"]
    yield from collect(ups, "IMBALANCED", "b rate")
    yield from collect(sorted(resting), "FROZEN", "rate")


@contextmanager
def _put_back(trainer: Trainer, live: Mapping[str, torch.nn.Parameter]) -> Iterator[None]:
    """Restore weights, gradients, the training mode and torch's random state; adapter dropout is off inside."""
    network = trainer.parts.network
    values = {name: parameter.detach().clone() for name, parameter in live.items()}
    gradients = {name: parameter.grad for name, parameter in live.items()}
    training = network.container.training
    random = torch.get_rng_state()
    network.eval()
    for parameter in live.values():
        parameter.grad = None
    try:
        yield
    finally:
        network.train(training)
        torch.set_rng_state(random)
        with torch.no_grad():
            for name, parameter in live.items():
                parameter.copy_(values[name])
                parameter.grad = gradients[name]
