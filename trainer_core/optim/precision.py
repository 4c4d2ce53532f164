"""Number format of a step, loss scaling, and the verdict on its gradients.

One step: `autocast` around every forward, `backward` for every micro-batch, then once `read` (unscale, norms, the
step's only read from the device), then `judge`, and `apply`, `reject`, or `redo` (a poisoned picture is left out and
the step computed again). The loss scale belongs to fp16 alone: bf16 and fp32 gradients neither overflow nor vanish at
a scale of 1; the checks are the same for all.

Classes of a bad step (`phases.py` has their names):
POISON: a loss is not finite. OVERFLOW: losses are finite, a gradient is not, and the scale can be lowered. FLOOR: the
same with no lower scale. NORM-OVERFLOW: every element is finite, the norm is not, or its square does not fit fp32.
WEIGHTS: trained weights or optimizer state are not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..config import GradientConfig, PrecisionConfig, SafetyConfig
from .clipping import Clip, Clipping
from .phases import FLOOR, NORM_OVERFLOW, OVERFLOW, POISON, SANITIZED, WEIGHTS, Phases
from .reading import Agree, StepReading, gradients_finite, named, take_reading, total_norm, weights_finite
from .safe_scaler import SafeScaler

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAFER = {"fp16": "bf16", "bf16": "fp32"}
"""The next safer number format."""

_RESTART_SHARE = 16.0


@dataclass(frozen=True)
class StepVerdict:
    """`action` is apply or reject; `kind` the class of a bad step; `reason` says why not apply, in plain words.

    SANITIZED is applied without `left_out`.
    """

    action: str
    reason: str = ""
    kind: str = ""
    left_out: tuple[str, ...] = ()


class Precision:
    """Autocast, scaler, verdict and clipping of a run on one device. `compute` is fp32, bf16 or fp16 (not auto).

    `agree`: reduces flags over all processes, so that every rank decides the same.
    """

    def __init__(
        self,
        config: PrecisionConfig,
        compute: str,
        device: torch.device,
        *,
        gradient: GradientConfig | None = None,
        safety: SafetyConfig | None = None,
        agree: Agree | None = None,
    ) -> None:
        self.config = config
        self.safety = safety or SafetyConfig()
        self.compute = compute
        self.dtype = COMPUTE_DTYPES[compute]
        self.device = device
        self.agree = agree
        self.clipping = Clipping(gradient or GradientConfig())
        self.scaler = SafeScaler(config, device, enabled=compute == "fp16")
        self.phases = Phases(config, self.safety, scaled=self.scaled)
        self.losses: list[torch.Tensor] = []
        """Losses (B,) of the step's micro-batches so far; with several processes, of all of them."""
        self.read_along: Callable[[], torch.Tensor | None] = lambda: None
        """Numbers (n,) that come with the step's one reading, for others (`StepReading.extra`)."""
        self._until_check = 0

    @property
    def scaled(self) -> bool:
        """Whether gradients carry a loss scale."""
        return self.scaler.enabled

    @property
    def rejected_in_a_row(self) -> int:
        return self.phases.rejected_in_a_row

    def autocast(self) -> AbstractContextManager[Any]:
        """Context for every forward of the denoiser and the text encoders."""
        if self.compute == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def backward(self, loss_B: torch.Tensor, samples_in_step: int) -> None:
        """Add this micro-batch's share, sum(loss_B) / samples_in_step, to the gradients. No device read."""
        self.losses.append(loss_B.detach())
        self.scaler.scale(loss_B.sum() / samples_in_step).backward()

    def read(self, optimizer: torch.optim.Optimizer) -> StepReading:
        """Unscale once, measure, and read everything the verdict needs in one transfer."""
        scale = self.scaler.current()
        self.scaler.unscale(optimizer)
        reading = take_reading(
            optimizer,
            self.losses,
            scale,
            with_weights=self.clipping.needs_weights,
            check_weights=self._weights_due(),
            agree=self.agree,
            extra=self.read_along(),
        )
        self.losses = []
        return reading

    def judge(self, optimizer: torch.optim.Optimizer, reading: StepReading) -> StepVerdict:
        """Apply, or reject with the class of the step. Only a bad step reads the device again."""
        sound = not reading.bad_losses and not reading.other_loss and not reading.other_gradient
        if sound and reading.norm_is_sound and reading.weights_finite is not False:
            return StepVerdict("apply")
        if reading.weights_finite is False or not weights_finite(optimizer):
            return StepVerdict("reject", "trained weights or optimizer state are not finite numbers", WEIGHTS)
        if reading.bad_losses or reading.other_loss:
            return StepVerdict("reject", "the loss is not a finite number", POISON)
        if not reading.other_gradient and gradients_finite(optimizer):
            return StepVerdict("reject", "the gradients are finite and too large to be measured", NORM_OVERFLOW)
        if not self.scaled:
            return StepVerdict("reject", "the gradients are not finite numbers", FLOOR)
        if self.scaler.at_floor(reading.loss_scale):
            text = f"gradients overflowed fp16 at the lowest loss scale {reading.loss_scale:g}"
            return StepVerdict("reject", text, FLOOR)
        return self._overflow(reading)

    def apply(self, optimizer: torch.optim.Optimizer, reading: StepReading, verdict: StepVerdict | None = None) -> Clip:
        """Clip with the norms already measured and update. Returns how it was clipped."""
        clip = self.update(optimizer, reading, verdict)
        self.settle(optimizer, reading, clip, verdict)
        return clip

    def update(
        self, optimizer: torch.optim.Optimizer, reading: StepReading, verdict: StepVerdict | None = None
    ) -> Clip:
        """The first half of `apply`, which may be made again from the same weights, moments and gradients."""
        left_out = verdict.left_out if verdict is not None else ()
        if left_out:
            reading = _without(optimizer, reading, left_out)
        clip = self.clipping.decide(reading)
        self.clipping.apply(optimizer, clip)
        # The verdict replaces GradScaler.step, whose own check would be a second device read.
        optimizer.step()
        return clip

    def settle(
        self, optimizer: torch.optim.Optimizer, reading: StepReading, clip: Clip, verdict: StepVerdict | None = None
    ) -> None:
        """The second half: loss scale and clipping learn from the step, its gradients go."""
        left_out = verdict.left_out if verdict is not None else ()
        if left_out:
            self.scaler.back_off(reading.loss_scale)
        else:
            self.scaler.applied(reading.loss_scale)
        self.clipping.learn(reading, clip)
        self._clear(optimizer)

    def reject(self, optimizer: torch.optim.Optimizer, verdict: StepVerdict, reading: StepReading) -> None:
        """Drop the gradients. Only an overflow lowers the loss scale: a NaN in the data is not the scale's fault."""
        if verdict.kind in (OVERFLOW, FLOOR):
            self.scaler.back_off(reading.loss_scale)
        elif verdict.kind == NORM_OVERFLOW:
            self.scaler.measured()
        else:
            self.scaler.keep(reading.loss_scale)
        self._clear(optimizer)

    def redo(self, optimizer: torch.optim.Optimizer, reading: StepReading) -> None:
        """Forget the step's gradients, to compute it again at the same loss scale."""
        self.scaler.keep(reading.loss_scale)
        self._clear(optimizer)

    def unread(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget a step whose reading failed half-way, to compute it again at the same loss scale. Reads the device."""
        if self.scaled:
            self.scaler.keep(float(self.scaler.current()))
        self.abandon(optimizer)

    def abandon(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget a step that was stopped before its reading."""
        self.losses = []
        optimizer.zero_grad(set_to_none=True)

    def restart(self, compute: str | None = None) -> None:
        """A rung of the ladder was taken: another number format, or a lower loss scale, and counters anew."""
        if compute is not None and compute != self.compute:
            self.switch(compute)
        elif self.scaled:
            self.scaler.reset(self.config.initial_loss_scale / _RESTART_SHARE)
        self.phases.restart()

    def switch(self, compute: str) -> None:
        """Compute in another number format from here on; the model's own weights are the caller's."""
        self.compute = compute
        self.dtype = COMPUTE_DTYPES[compute]
        self.scaler = SafeScaler(self.config, self.device, enabled=compute == "fp16")
        self.phases.scaled = self.scaled

    def state_dict(self) -> dict[str, Any]:
        """JSON-safe state: scaler, phases, clipping. Reads the device. The number format is the config's or the
        ladder's."""
        return {
            "scaler": self.scaler.state_dict(),
            "phases": self.phases.state_dict(),
            "clipping": self.clipping.state_dict(),
            "until_check": self._until_check,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Checkpoints of earlier versions hold the scaler alone."""
        self.scaler.load_state_dict(state["scaler"])
        if "phases" in state:
            self.phases.load_state_dict(state["phases"])
            self.clipping.load_state_dict(state["clipping"])
            self._until_check = int(state["until_check"])

    def _weights_due(self) -> bool:
        every = self.safety.check_weights_every
        if every <= 0:
            return False
        due = self._until_check <= 0
        self._until_check = every - 1 if due else self._until_check - 1
        return due

    def _overflow(self, reading: StepReading) -> StepVerdict:
        reason = f"gradients overflowed fp16 at loss scale {reading.loss_scale:g}"
        bad = reading.bad_gradients
        few = len(bad) <= self.safety.sanitize_share * len(reading.names)
        if self.safety.sanitize and few and bad and self.agree is None:
            return StepVerdict("apply", reason, SANITIZED, bad)
        return StepVerdict("reject", reason, OVERFLOW)

    def _clear(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)


def _without(optimizer: torch.optim.Optimizer, reading: StepReading, left_out: tuple[str, ...]) -> StepReading:
    """`reading` without these tensors, whose gradients are taken away (not zeroed: Adam would still move them)."""
    from dataclasses import replace

    out = frozenset(left_out)
    for name, parameter in named(optimizer):
        if name in out:
            parameter.grad = None
    kept = [place for place, name in enumerate(reading.names) if name not in out]
    norms = tuple(reading.norms[place] for place in kept)
    weights = tuple(reading.weight_norms[place] for place in kept) if reading.weight_norms else ()
    return replace(
        reading,
        names=tuple(reading.names[place] for place in kept),
        norms=norms,
        weight_norms=weights,
        grad_norm=total_norm(norms),
    )
