"""Number format of a step, loss scaling, and the verdict on its gradients.

One step: `autocast` around every forward, `backward` for every micro-batch, then once `read` (unscale, global norm,
the step's only read from the device), then `apply` or `reject`. The loss scale belongs to fp16 alone: bf16 and fp32
gradients neither overflow nor vanish at a scale of 1.

Sources: Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2 (loss scaling); the scaler itself is
torch.amp.GradScaler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..config import PrecisionConfig

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepReading:
    """What one device read told about a step. `loss_B` has a loss for every sample of every micro-batch, in order;
    `grad_norm` is the global L2 norm of the unscaled gradients before clipping; `loss_scale` the scale they had."""

    loss_B: tuple[float, ...]
    grad_norm: float
    loss_scale: float

    @property
    def loss(self) -> float:
        """Mean over the samples of the step."""
        return math.fsum(self.loss_B) / len(self.loss_B)


@dataclass(frozen=True)
class StepVerdict:
    """`action` is apply, reject or halt; `reason` says why not apply, in plain words."""

    action: str
    reason: str = ""
    kind: str = ""


class Precision:
    """Autocast, scaler and verdict of a run on one device. `compute` is fp32, bf16 or fp16 (not auto)."""

    def __init__(self, config: PrecisionConfig, compute: str, device: torch.device) -> None:
        self.config = config
        self.compute = compute
        self.dtype = COMPUTE_DTYPES[compute]
        self.device = device
        self.rejected_in_a_row = 0
        self._scaler = torch.amp.GradScaler(
            device.type,
            init_scale=config.initial_loss_scale,
            growth_interval=config.loss_scale_growth_interval,
            enabled=compute == "fp16",
        )
        self._losses: list[torch.Tensor] = []

    @property
    def scaled(self) -> bool:
        """Whether gradients carry a loss scale."""
        return self._scaler.is_enabled()

    def autocast(self) -> AbstractContextManager[Any]:
        """Context for every forward of the denoiser and the text encoders."""
        if self.compute == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def backward(self, loss_B: torch.Tensor, samples_in_step: int) -> None:
        """Add this micro-batch's share, sum(loss_B) / samples_in_step, to the gradients. No device read."""
        self._losses.append(loss_B.detach())
        self._scaler.scale(loss_B.sum() / samples_in_step).backward()

    def read(self, optimizer: torch.optim.Optimizer) -> StepReading:
        """Unscale once, measure, and read everything the verdict needs in one transfer."""
        scale = self._scaler.scale(torch.ones((), device=self.device))
        if self.scaled:
            self._scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm(gradients(optimizer))
        values = torch.cat([*self._losses, norm.float().view(1), scale.float().view(1)]).tolist()
        self._losses = []
        return StepReading(loss_B=tuple(values[:-2]), grad_norm=values[-2], loss_scale=values[-1])

    def judge(self, reading: StepReading) -> StepVerdict:
        """apply, reject (this step is discarded) or halt (too many in a row)."""
        kind, reason = self._trouble(reading)
        if not kind:
            return StepVerdict("apply")
        limit = self.config.max_rejected_steps
        if self.rejected_in_a_row + 1 >= limit:
            return StepVerdict("halt", f"{reason}; {limit} rejected steps in a row", kind)
        return StepVerdict("reject", reason, kind)

    def apply(self, optimizer: torch.optim.Optimizer, reading: StepReading, max_norm: float) -> bool:
        """Clip with the norm already measured and update. Returns whether clipping acted; `max_norm` 0 is off."""
        clipped = 0 < max_norm < reading.grad_norm
        if clipped:
            torch._foreach_mul_(gradients(optimizer), max_norm / reading.grad_norm)
        # The verdict replaces GradScaler.step, whose own check would be a second device read.
        optimizer.step()
        self._scaler.update()
        self._clear(optimizer)
        self.rejected_in_a_row = 0
        return clipped

    def reject(self, optimizer: torch.optim.Optimizer, verdict: StepVerdict, reading: StepReading) -> None:
        """Drop the gradients. Only an overflow lowers the loss scale: a NaN in the data is not the scale's fault."""
        if verdict.kind == "overflow":
            self._scaler.update()
        elif self.scaled:
            self._scaler.update(new_scale=reading.loss_scale)
        self._clear(optimizer)
        self.rejected_in_a_row += 1

    def abandon(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget a step that was stopped before its reading."""
        self._losses = []
        optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """JSON-safe state: scaler and rejected steps in a row."""
        return {"scaler": self._scaler.state_dict(), "rejected_in_a_row": self.rejected_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scaled and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        self.rejected_in_a_row = int(state["rejected_in_a_row"])

    def _trouble(self, reading: StepReading) -> tuple[str, str]:
        if not all(math.isfinite(loss) for loss in reading.loss_B):
            return "loss", "the loss is not a finite number"
        if math.isfinite(reading.grad_norm):
            return "", ""
        if self.scaled:
            return "overflow", f"gradients overflowed fp16 at loss scale {reading.loss_scale:g}"
        return "gradient", "the gradients are not finite numbers"

    def _clear(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All gradients that exist, in the optimizer's order. Text encoder 1's last layer never has one."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def nonfinite_parameters(optimizer: torch.optim.Optimizer, most: int = 8) -> tuple[str, ...]:
    """Names of parameters whose gradient is not finite, in order. Reads the device: for rejects only."""
    names: list[str] = []
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                names.append(name)
                if len(names) == most:
                    return tuple(names)
    return tuple(names)


def bad_samples(reading: StepReading, files: Sequence[str]) -> tuple[str, ...]:
    """Files of the samples whose loss is not finite."""
    return tuple(file for file, loss in zip(files, reading.loss_B, strict=True) if not math.isfinite(loss))
