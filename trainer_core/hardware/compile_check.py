"""Steps computed with torch.compile are computed once more without it whenever something new was compiled.

The step in which graphs appeared and the next one (when lora_up is no longer zero, so that lora_down gets a gradient)
are compared tensor by tensor: direction and size of the gradient, and which tensors get one at all (diagnostics
section 6). Where they agree the compiled gradient is used, as it would be without the comparison; where they do not,
the other one is used and the rest of the run goes without the compiler. So nothing that a compiler got wrong reaches
the weights.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..events import Verdict
from ..memory.shortage import first_line
from ..models.compiled import CompiledBlocks, compiler_errors

if TYPE_CHECKING:
    from ..memory.ladder import Area
    from ..optim.reading import StepReading
    from ..step_work import StepWork
    from ..trainer import Trainer

log = logging.getLogger(__name__)

COMPILE = "COMPILE"
_COMPARED_STEPS = 2
_SURPRISES = 3
"""Steps that compiled something although their shapes had been compiled before, until that is too often."""
_MOST_NAMES = 3
_LIMITS = {"fp32": (0.9999, 1e-3), "bf16": (0.99, 0.05), "fp16": (0.99, 0.05)}
"""Least cosine, and most difference of log10 of the norms (diagnostics section 6, [D])."""
_NOISE = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 1e-3}
"""A gradient below this share of the largest one is rounding: its direction says nothing."""


@dataclass(frozen=True)
class Deviation:
    """How one tensor's gradient differs: `cosine` to the uncompiled one, `decades` = log10 of the ratio of norms. Both
    NaN: only one of the two exists, or is finite."""

    name: str
    cosine: float
    decades: float

    def __str__(self) -> str:
        if math.isnan(self.cosine):
            return f"{self.name} (missing, zero or not finite in one of the two)"
        return f"{self.name} (cosine {self.cosine:.4g}, size x {10**self.decades:.4g})"


class CompileCheck:
    """Measures the steps of a run with compiled blocks; `measure` stands in for `Accumulation.measure`."""

    def __init__(self, trainer: Trainer, blocks: CompiledBlocks) -> None:
        self._trainer = trainer
        self._blocks: CompiledBlocks | None = blocks
        self._due = 0
        self._shapes: set[tuple[Area, int]] = set()
        self._surprises = 0
        parts = trainer.parts
        self._named = {name: p for part in parts.network.parts for name, p in parts.network.parameters_of(part).items()}

    def measure(self, work: StepWork) -> StepReading | None:
        """The step's gradients and its reading; None when asked to stop.

        Raises:
            ResourceError: memory ends again and again.
        """
        plain = self._trainer.accumulation.measure
        blocks = self._blocks
        if blocks is None:
            return plain(work)
        known = blocks.graphs
        try:
            with blocks.on():
                reading = plain(work)
        except compiler_errors() as error:
            cause = getattr(error, "inner_exception", error)  # dynamo's own first line names no cause
            self._give_up(f"torch.compile ({blocks.backend}) failed: {type(cause).__name__}: {first_line(cause)}")
            self._trainer.parts.precision.abandon(self._trainer.parts.optimizer)
            return plain(work)
        if reading is None:
            return None
        if blocks.graphs > known:
            self._due = _COMPARED_STEPS
            if self._too_often(work):
                self._trainer.parts.precision.redo(self._trainer.parts.optimizer, reading)
                return plain(work)
        return self._compared(work, reading) if self._due > 0 else reading

    def _too_often(self, work: StepWork) -> bool:
        """Whether steps keep compiling what they had compiled before; the compiler is off then. Notes the shapes."""
        shapes = {(self._trainer.area(refs), len(refs)) for refs in work.batches}
        self._surprises += shapes <= self._shapes
        self._shapes |= shapes
        if self._surprises <= _SURPRISES:
            return False
        self._give_up(
            f"torch.compile compiled {self._surprises} times what it had compiled before: something that it takes for "
            "fixed changes from step to step"
        )
        return True

    def _compared(self, work: StepWork, reading: StepReading) -> StepReading | None:
        parts = self._trainer.parts
        compiled = {name: None if p.grad is None else p.grad.clone() for name, p in self._named.items()}
        parts.precision.redo(parts.optimizer, reading)
        again = self._trainer.accumulation.measure(work)
        if again is None:
            return None
        plain = {name: p.grad for name, p in self._named.items()}
        found = deviations(plain, compiled, parts.precision.compute)
        if found:
            self._differs(found)
            return again
        self._due -= 1
        if self._due == 0:
            self._agrees()
        for name, parameter in self._named.items():
            gradient = compiled[name]
            if gradient is not None and parameter.grad is not None:
                parameter.grad.copy_(gradient)
        return reading

    def _differs(self, found: list[Deviation]) -> None:
        log.warning("torch.compile: %d tensors differ: %s", len(found), "; ".join(map(str, found)))
        names = "; ".join(str(deviation) for deviation in found[:_MOST_NAMES])
        more = f" and {len(found) - _MOST_NAMES} more (all in run.log)" if len(found) > _MOST_NAMES else ""
        self._give_up(f"With torch.compile the gradient of {names}{more} is another one than without it")

    def _give_up(self, what: str) -> None:
        self._blocks = None
        sentence = (
            f"{what}. The step was computed without it, and the rest of the run is too. Try another torch version, "
            "or hardware.compile = 'aot_eager' to see whether the back end is the cause; 'off' spares the attempt."
        )
        self._tell(sentence, "warning")

    def _agrees(self) -> None:
        blocks = self._blocks
        assert blocks is not None
        sentence = (
            f"torch.compile ({blocks.backend}): {blocks.graphs} graphs, {blocks.graph_breaks} graph breaks; the "
            "gradients of the last two steps are those without it."
        )
        self._tell(sentence, "ok")

    def _tell(self, sentence: str, severity: str) -> None:
        step = self._trainer.state.step + 1
        self._trainer.bus.emit(Verdict(step=step, kind=COMPILE, sentence=sentence, severity=severity))


Gradients = dict[str, torch.Tensor | None]


def deviations(plain: Gradients, compiled: Gradients, compute: str) -> list[Deviation]:
    """Tensors whose gradients differ by more than the rounding of `compute` ("fp32", "bf16", "fp16") explains, worst
    first. Reads the device once."""
    least, most = _LIMITS[compute]
    rows = [_numbers(plain[name], compiled[name]) for name in plain]
    table = torch.stack([row.to(rows[0].device) for row in rows]).tolist()
    sizes = [size for row in table for size in row[:2] if math.isfinite(size)]
    noise = _NOISE[compute] * max(sizes, default=0.0)
    found: list[Deviation] = []
    for name, (first, second, product) in zip(plain, table, strict=True):
        finite = math.isfinite(first), math.isfinite(second)
        if finite == (False, False) or (all(finite) and max(first, second) <= noise):
            continue
        if not all(finite) or min(first, second) == 0.0:
            found.append(Deviation(name, math.nan, math.nan))
            continue
        cosine, decades = product / (first * second), math.log10(second / first)
        if cosine < least or abs(decades) > most:
            found.append(Deviation(name, cosine, decades))
    return sorted(found, key=lambda deviation: -2.0 if math.isnan(deviation.cosine) else deviation.cosine)


def _numbers(plain: torch.Tensor | None, compiled: torch.Tensor | None) -> torch.Tensor:
    """Norms of both and their inner product (3,), summed in float64 where the device has it; a missing one is zero."""
    one = plain if plain is not None else compiled
    if one is None:
        return torch.zeros(3)
    first = torch.zeros_like(one) if plain is None else plain
    second = torch.zeros_like(one) if compiled is None else compiled
    exact = torch.float32 if one.device.type == "mps" else torch.float64
    first, second = first.flatten().to(exact), second.flatten().to(exact)
    return torch.stack([first.norm(), second.norm(), first @ second]).float()


def compile_blocks(trainer: Trainer, backend: str) -> CompileCheck:
    """Let the steps of `trainer` run compiled, and checked."""
    check = CompileCheck(trainer, CompiledBlocks(trainer.parts.model.unet, backend))
    trainer.measure = check.measure
    return check
