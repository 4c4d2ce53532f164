"""Freezing: parts, blocks or groups from a step on, or adapters that have stopped contributing.

A frozen tensor's gradient is taken away right before the update, so it neither moves nor decays, whatever the optimizer
is; requires_grad stays as it is (nothing is compiled or set up again). The backward pass is not cheaper for it: the
gradient passes through later layers to earlier ones all the same.

contribution: the first-order gain -g . dtheta (Lan et al. 2019, LCA) of every adapter, from the full measurements.
gamma: the rule of an article, gamma(t) = 0.012 exp(-t / 500) on the gradient norm every 5 steps. What it does is in
docs/gradient_health.md; it is here to be compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..config_freezing import FreezingConfig, parse_stop
from ..events import Intervention
from ..optim.schedules import steps_of
from .groups import Tensor, group_words

if TYPE_CHECKING:
    from ..events import EventBus
    from .engine import Measurement
    from .records import SlowRecord

_GAMMA, _GAMMA_STEPS, _GAMMA_EVERY = 0.012, 500.0, 5


class Freezing:
    """Decides what is frozen, and keeps it from moving. In checkpoints under "freezing".

    Args:
        tensors: the trained tensors by name.
        step: the number of the last decided step.
        tell_engine: gets the names of all frozen tensors whenever they change.
    """

    def __init__(
        self,
        config: FreezingConfig,
        optimizer: torch.optim.Optimizer,
        tensors: Mapping[str, Tensor],
        bus: EventBus,
        *,
        total_steps: int,
        step: Callable[[], int],
        tell_engine: Callable[[frozenset[str]], None],
    ) -> None:
        self._config = config
        self._optimizer = optimizer
        self._tensors = tensors
        self._bus = bus
        self._step = step
        self._tell = tell_engine
        self._stops = [(target, steps_of(at, total_steps)) for target, at in map(parse_stop, config.stop_after)]
        self._told: set[str] = set()
        self.frozen: set[str] = set()
        """Modules frozen by the rule."""
        self._gains: dict[str, float] = {}
        self._sizes: dict[str, float] = {}
        self._below: dict[str, int] = {}
        self._window_from = 0
        self._best = math.inf
        self._handle: Any = optimizer.register_step_pre_hook(lambda *_: self._withhold())
        bus.subscribe(self._validated)

    def close(self) -> None:
        self._handle.remove()

    def names(self, step: int) -> frozenset[str]:
        """All tensors that do not move in `step`."""
        stopped = [target for target, at in self._stops if step > at]
        return frozenset(
            name
            for name, tensor in self._tensors.items()
            if tensor.module in self.frozen or any(_belongs(tensor, target) for target in stopped)
        )

    def measured(self, measurement: Measurement) -> None:
        """A listener of the health engine."""
        fast, slow = measurement.fast, measurement.slow
        if self._config.rule == "gamma" and slow is None and fast.was_applied and fast.step % _GAMMA_EVERY == 0:
            self._by_gamma(fast.step, fast.norms)
        if self._config.rule == "contribution" and slow is not None:
            self._gather(slow)
            if slow.step - self._window_from >= self._config.window:
                self._judge(slow.step)

    def state_dict(self) -> dict[str, Any]:
        return {
            "frozen": sorted(self.frozen),
            "gains": self._gains,
            "sizes": self._sizes,
            "below": self._below,
            "window_from": self._window_from,
            "best": self._best if math.isfinite(self._best) else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.frozen = set(state["frozen"])
        self._gains, self._sizes = dict(state["gains"]), dict(state["sizes"])
        self._below, self._window_from = dict(state["below"]), int(state["window_from"])
        self._best = math.inf if state["best"] is None else float(state["best"])

    def _withhold(self) -> None:
        step = self._step() + 1
        frozen = self.names(step)
        self._announce(step)
        self._tell(frozen)
        if not frozen:
            return
        for group in self._optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if name in frozen:
                    parameter.grad = None

    def _announce(self, step: int) -> None:
        for target, at in self._stops:
            if step > at and target not in self._told:
                self._told.add(target)
                self._say(step, f"{_words(target)} is frozen", f"freezing.stop_after, after step {at}")

    def _gather(self, record: SlowRecord) -> None:
        for name, sample in record.tensors.items():
            tensor = self._tensors.get(name)
            if tensor is not None and sample.has_gradient:
                self._gains[tensor.module] = self._gains.get(tensor.module, 0.0) + sample.gain

    def _judge(self, step: int) -> None:
        """The end of a window: who has contributed next to nothing and does not grow, `windows` times in a row?"""
        live = {m: max(0.0, gain) for m, gain in self._gains.items() if m not in self.frozen}
        total = sum(live.values())
        limit = self._config.share * total / len(live) if live else 0.0
        for module, gain in live.items():
            self._below[module] = self._below.get(module, 0) + 1 if gain < limit else 0
        now = {module for module in live if self._below[module] >= self._config.windows}
        grown = {module for module in now if self._growth(module) >= self._config.growth}
        for module in sorted(now - grown):
            self.frozen.add(module)
            reason = (
                f"it contributed less than {self._config.share:.0%} of the average in {self._config.windows} windows"
            )
            self._say(step, f"{module} is frozen", reason)
        self._sizes = self._norms()
        self._gains = {}
        self._window_from = step

    @torch.no_grad()
    def _norms(self) -> dict[str, float]:
        """Norm of lora_up by module; one read, at the end of a window."""
        pairs = [
            (name, parameter)
            for group in self._optimizer.param_groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
            if self._tensors[name].role != "A"
        ]
        norms = torch.stack([n.float() for n in torch._foreach_norm([p.detach() for _, p in pairs])]).tolist()
        return {self._tensors[name].module: norm for (name, _), norm in zip(pairs, norms, strict=True)}

    def _growth(self, module: str) -> float:
        before = self._sizes.get(module, 0.0)
        if before <= 0:
            return 0.0
        return self._norms()[module] / before - 1.0

    def _by_gamma(self, step: int, norms: Mapping[str, float]) -> None:
        gamma = _GAMMA * math.exp(-step / _GAMMA_STEPS)
        modules: dict[str, float] = {}
        for name, norm in norms.items():
            if name in self._tensors:
                module = self._tensors[name].module
                modules[module] = math.hypot(modules.get(module, 0.0), norm)
        before = len(self.frozen)
        self.frozen = {module for module, norm in modules.items() if norm < gamma}
        if len(self.frozen) != before:
            self._say(
                step, f"{len(self.frozen)} of {len(modules)} adapters are frozen", f"gradient norm below {gamma:.4f}"
            )

    def _validated(self, wire: dict[str, Any]) -> None:
        if wire["type"] != "ValidationFinished" or wire["data"]["validation_loss"] is None:
            return
        loss = float(wire["data"]["validation_loss"])
        if self.frozen and self._config.rule == "contribution" and loss > self._config.thaw * self._best:
            self._say(int(wire["step"]), f"{len(self.frozen)} adapters learn again", f"validation loss {loss:.4f}")
            self.frozen, self._below, self._best = set(), {}, loss
        self._best = min(self._best, loss)

    def _say(self, step: int, action: str, reason: str) -> None:
        self._bus.emit(Intervention(step=step, action=action, reason=reason))


def _belongs(tensor: Tensor, target: str) -> bool:
    """Whether a tensor is of a part, block or group."""
    return target in (tensor.part, tensor.group, tensor.group.partition(".")[0])


def _words(target: str) -> str:
    if target == "unet":
        return "the UNet"
    return group_words(target) if "." in target or target.startswith("te") else f"block {target}"
