"""Full measurements around one update, on the device, read one step late.

The optimizer's own hooks call `before` and `after` its update, so the weights are seen on both sides of it and
gradients are those that were used. Of every tensor a fixed sample of at most 4096 elements is taken: columns of
lora_down and rows of lora_up, so that the r x r Grams of both are estimated by the same factor, which cancels in their
quotient. Tensors of one sample shape are stacked, and everything is a few dozen kernels whatever the number of
adapters.

RMS: Wortsman et al. 2023 (StableAdamW). Consistency: sum m^2 / sum v, between (1 - b1) / (1 + b1) for noise and 1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .groups import Tensor
from .records import HIGHEST_EXPONENT, LOWEST_EXPONENT, FastRecord, SlowRecord, TensorSample

SAMPLE = 4096
_BINS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
_STATS = ("zero", "changed", "grad", "weight", "update", "amax", "gain", "rms", "consistency", "spread", "age")

Live = Sequence[tuple[Tensor, torch.nn.Parameter]]


@dataclass
class _Stack:
    """Tensors of one sample shape: their places in the list of trained tensors, and what was taken of them."""

    places: list[int]
    factors: list[float]
    gradient: torch.Tensor
    before: torch.Tensor
    difference: torch.Tensor | None = None


@dataclass
class _Pending:
    """A measurement on its way to the host."""

    values: torch.Tensor
    ready: Any
    stacks: list[_Stack]
    pairs: list[str]
    rates: dict[str, float]
    without_gradient: list[int]
    dtypes: list[str] = field(default_factory=list)


class UpdateProbe:
    """Measures updates of `optimizer` when `due` is set. `live`: the network's own tensors, whatever the optimizer
    holds.
    """

    def __init__(self, live: Live, optimizer: torch.optim.Optimizer) -> None:
        self.live = live
        self.due = False
        self._optimizer = optimizer
        self._groups = sorted({tensor.group for tensor, _ in live})
        self._stacks: list[_Stack] | None = None
        self._fresh: _Pending | None = None
        self._bound: deque[tuple[FastRecord, _Pending]] = deque()
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._before()),
            optimizer.register_step_post_hook(lambda *_: self._after()),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def waiting(self) -> bool:
        """Whether the last update was measured and is not bound to a record."""
        return self._fresh is not None

    def forget(self, *, everything: bool = False) -> None:
        """Drop the measurement of the last update, or all that were not read yet."""
        self._fresh = None
        if everything:
            self._bound.clear()

    def bind(self, record: FastRecord) -> None:
        """The measurement of the last update belongs to this step."""
        if self._fresh is not None:
            self._bound.append((record, self._fresh))
            self._fresh = None

    def ready(self, *, everything: bool = False) -> Iterator[tuple[FastRecord, SlowRecord]]:
        """Measurements that have arrived on the host, oldest first, each once; `everything` waits for the others
        too.
        """
        while self._bound:
            record, pending = self._bound[0]
            if pending.ready is not None:
                if everything:
                    pending.ready.synchronize()
                elif not pending.ready.query():
                    return
            self._bound.popleft()
            yield record, self._parse(pending, record)

    @torch.no_grad()
    def _before(self) -> None:
        self._stacks = None
        if not self.due:
            return
        by_shape: dict[tuple[Any, ...], list[int]] = {}
        for place, (tensor, parameter) in enumerate(self.live):
            if parameter.grad is not None:
                key = (tensor.role, tuple(parameter.shape), parameter.dtype, parameter.device)
                by_shape.setdefault(key, []).append(place)
        self._stacks = [
            _Stack(
                places,
                [_factor(self.live[place][1]) for place in places],
                self._sampled(places, [self.live[place][1].grad for place in places]),
                self._sampled(places, [self.live[place][1].detach() for place in places]),
            )
            for places in by_shape.values()
        ]

    @torch.no_grad()
    def _after(self) -> None:
        stacks, self._stacks = self._stacks, None
        if stacks is None:
            return
        self.due = False
        group_of = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        # By identity: a tensor that was replaced keeps its name, and its optimizer the old one.
        rates = {t.name: float(group_of[id(p)]["lr"]) for t, p in self.live if id(p) in group_of}
        pieces = [piece for stack in stacks for piece in self._measure(stack, group_of)]
        pairs, quotients = self._quotients(stacks)
        pieces.extend(quotients)
        pieces.append(self._exponents(stacks))
        values = torch.cat([piece.reshape(-1).float() for piece in pieces])
        seen = {place for stack in stacks for place in stack.places}
        missing = [place for place in range(len(self.live)) if place not in seen]
        host, ready = to_host(values)
        for stack in stacks:
            stack.difference = None
        self._fresh = _Pending(host, ready, stacks, pairs, rates, missing, [_dtype(p) for _, p in self.live])

    def _sampled(self, places: list[int], tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
        """(tensors, sample...) in float32."""
        taken = []
        for place, tensor in zip(places, tensors, strict=True):
            assert tensor is not None, "only tensors with a gradient are sampled"
            taken.append(_sample(tensor, self.live[place][0].role))
        return torch.stack(taken).float()

    def _measure(self, stack: _Stack, group_of: dict[int, Any]) -> list[torch.Tensor]:
        """The numbers of `_STATS`, each (tensors,)."""
        parameters = [self.live[place][1] for place in stack.places]
        after = self._sampled(stack.places, [parameter.detach() for parameter in parameters])
        stack.difference = after - stack.before
        gradient, moved = stack.gradient.flatten(1), stack.difference.flatten(1)
        squares = moved * moved
        fourth = (squares * squares).sum(1)
        spread = squares.sum(1) ** 2 / (fourth * moved.shape[1])
        amax = torch._foreach_norm([p.grad for p in parameters if p.grad is not None], math.inf)
        return [
            (gradient == 0).float().mean(1),
            (moved != 0).float().mean(1),
            gradient.norm(dim=1),
            after.flatten(1).norm(dim=1),
            moved.norm(dim=1),
            torch.stack([value.float() for value in amax]),
            -(gradient * moved).sum(1),
            *self._moments(stack, gradient, group_of),
            spread,
            self._ages(parameters, gradient),
        ]

    def _moments(self, stack: _Stack, gradient: torch.Tensor, group_of: dict[int, Any]) -> list[torch.Tensor]:
        parameters = [self.live[place][1] for place in stack.places]
        unknown = gradient.new_full((len(parameters),), math.nan)
        settings = [_adam_settings(self._optimizer, p, group_of.get(id(p))) for p in parameters]
        first = settings[0]
        if first is None or any(found != first for found in settings):
            return [unknown, unknown]
        states = [self._optimizer.state[parameter] for parameter in parameters]
        beta1, beta2, eps = first
        ages = self._ages(parameters, gradient)[:, None]
        mean = self._sampled(stack.places, [state["exp_avg"] for state in states]).flatten(1) / (1 - beta1**ages)
        square = self._sampled(stack.places, [state["exp_avg_sq"] for state in states]).flatten(1) / (1 - beta2**ages)
        rms = (gradient * gradient / square.clamp_min(max(eps * eps, 1e-38))).mean(1).sqrt()
        return [rms, (mean * mean).sum(1) / square.sum(1)]

    def _ages(self, parameters: list[torch.nn.Parameter], like: torch.Tensor) -> torch.Tensor:
        states = [self._optimizer.state.get(parameter, {}) for parameter in parameters]
        steps = [state.get("step") for state in states]
        if any(step is None for step in steps):
            return like.new_tensor([math.nan if step is None else float(step) for step in steps])
        counted = [step for step in steps if isinstance(step, torch.Tensor)]
        if len(counted) == len(steps):
            return torch.stack([step.float().reshape(()) for step in counted]).to(like.device, non_blocking=True)
        return like.new_tensor([float(step) for step in steps if step is not None])

    def _quotients(self, stacks: list[_Stack]) -> tuple[list[str], list[torch.Tensor]]:
        """Modules with lora_down and lora_up, and (||dB A||^2, ||B dA||^2) of each as (modules, 2), up to one
        factor.
        """
        where = {place: (number, row) for number, stack in enumerate(stacks) for row, place in enumerate(stack.places)}
        sides: dict[str, dict[str, tuple[int, int]]] = {}
        for place, (tensor, _) in enumerate(self.live):
            if place in where and tensor.role in ("A", "B"):
                sides.setdefault(tensor.module, {})[tensor.role] = where[place]
        by_stacks: dict[tuple[int, int], list[str]] = {}
        for module, found in sides.items():
            if len(found) == 2:
                by_stacks.setdefault((found["A"][0], found["B"][0]), []).append(module)
        grams: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        names: list[str] = []
        values: list[torch.Tensor] = []
        for (down, up), modules in by_stacks.items():
            for number in (down, up):
                if number not in grams:
                    grams[number] = _grams(stacks[number], by_rows=number == down)
            rows_a = [sides[module]["A"][1] for module in modules]
            rows_b = [sides[module]["B"][1] for module in modules]
            weight_a, moved_a = (gram[rows_a] for gram in grams[down])
            weight_b, moved_b = (gram[rows_b] for gram in grams[up])
            values.append(torch.stack([(moved_b * weight_a).sum((1, 2)), (weight_b * moved_a).sum((1, 2))], dim=1))
            names.extend(modules)
        return names, values

    def _exponents(self, stacks: list[_Stack]) -> torch.Tensor:
        """(groups, bins + 1): sampled gradient elements by binary exponent, zeros last."""
        counts: torch.Tensor | None = None
        for stack in stacks:
            gradient = stack.gradient.flatten(1).abs()
            if counts is None:
                counts = gradient.new_zeros(len(self._groups) * (_BINS + 1))
            bins = torch.frexp(gradient).exponent.to(torch.int64) - 1 - LOWEST_EXPONENT
            bins = torch.where(gradient == 0, _BINS, bins.clamp(0, _BINS - 1))
            rows = [self._groups.index(self.live[place][0].group) for place in stack.places]
            offsets = torch.tensor(rows, device=gradient.device)[:, None] * (_BINS + 1)
            counts.scatter_add_(0, (bins + offsets).reshape(-1), torch.ones_like(gradient).reshape(-1))
        return torch.zeros(0) if counts is None else counts

    def _parse(self, pending: _Pending, record: FastRecord) -> SlowRecord:
        # The tensor lies in host memory already: this is no read of the device.
        numbers: list[float] = pending.values.numpy().tolist()
        rest = iter(numbers)
        back = 1.0 / record.clip if record.clip > 0 else 1.0
        tensors: dict[str, TensorSample] = {}
        for stack in pending.stacks:
            columns = {stat: [next(rest) for _ in stack.places] for stat in _STATS}
            for row, place in enumerate(stack.places):
                name, root = self.live[place][0].name, math.sqrt(stack.factors[row])
                own = {stat: columns[stat][row] for stat in _STATS}
                for stat in ("grad", "weight", "update"):
                    own[stat] *= root
                own["gain"] *= stack.factors[row]
                for stat in ("grad", "amax", "gain"):
                    own[stat] *= back
                known, rate = name in pending.rates, pending.rates.get(name, 0.0)
                tensors[name] = TensorSample(True, known, pending.dtypes[place], rate, **own)
        for place in pending.without_gradient:
            name = self.live[place][0].name
            known, rate = name in pending.rates, pending.rates.get(name, 0.0)
            tensors[name] = TensorSample(False, known, pending.dtypes[place], rate)
        quotients = {}
        for module in pending.pairs:
            by_b, by_a = next(rest), next(rest)
            quotients[module] = _log_quotient(by_b, by_a)
        exponents, zeros = {}, {}
        shift = round(math.log2(back)) if back > 0 else 0
        for group in self._groups if pending.stacks else ():
            counts = [int(next(rest)) for _ in range(_BINS + 1)]
            zeros[group] = counts.pop()
            exponents[group] = tuple(_shifted(counts, shift))
        return SlowRecord(record.step, record.loss, record.loss_scale, tensors, quotients, exponents, zeros)


def _sample(tensor: torch.Tensor, role: str) -> torch.Tensor:
    """A fixed sample of at most about 4096 elements: columns (A), rows (B), elements (W). A view."""
    stride = max(1, -(-tensor.numel() // SAMPLE))
    if role == "W" or tensor.dim() < 2:
        return tensor.reshape(-1)[::stride]
    flat = tensor.flatten(1)
    return flat[:, ::stride] if role == "A" else flat[::stride]


def _factor(parameter: torch.nn.Parameter) -> float:
    """Elements of the tensor for each one sampled (nearly: the stride)."""
    return float(max(1, -(-parameter.numel() // SAMPLE)))


def _grams(stack: _Stack, *, by_rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """r x r Grams of the weights and of their change, (tensors, r, r)."""
    assert stack.difference is not None, "measured before"
    weight, moved = stack.before, stack.difference
    if not by_rows:
        weight, moved = weight.transpose(1, 2), moved.transpose(1, 2)
    return weight @ weight.transpose(1, 2), moved @ moved.transpose(1, 2)


def _log_quotient(by_b: float, by_a: float) -> float:
    """log10 of the ratio of two norms, given their squares; within +-20."""
    if by_b <= 0 and by_a <= 0:
        return math.nan
    if by_a <= 0:
        return 20.0
    return max(-20.0, min(20.0, 0.5 * math.log10(by_b / by_a))) if by_b > 0 else -20.0


def _shifted(counts: list[int], shift: int) -> list[int]:
    """Counts by exponent after multiplying all elements by 2^shift."""
    if shift == 0:
        return counts
    moved = [0] * len(counts)
    for place, count in enumerate(counts):
        moved[max(0, min(len(counts) - 1, place + shift))] += count
    return moved


def _adam_settings(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, group: Any
) -> tuple[float, float, float] | None:
    """(b1, b2, eps) where the optimizer keeps Adam's moments of this tensor as they are in the paper, else None."""
    state: Any = optimizer.state.get(parameter)
    if not state:
        return None
    moments = [state.get(key) for key in ("exp_avg", "exp_avg_sq")]
    if not all(isinstance(m, torch.Tensor) and m.is_floating_point() and m.shape == parameter.shape for m in moments):
        return None
    # Prodigy and D-Adapt scale their moments by d.
    if group is None or "betas" not in group or "d" in group:
        return None
    beta1, beta2 = group["betas"][:2]
    return float(beta1), float(beta2), float(group.get("eps") or 1e-8)


def _dtype(parameter: torch.nn.Parameter) -> str:
    return str(parameter.dtype).removeprefix("torch.")


def to_host(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """`values` on their way to host memory, and the event after which they are there (None: they are)."""
    if values.device.type != "cuda":
        return values.cpu(), None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event
