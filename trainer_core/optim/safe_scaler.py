"""The fp16 loss scale, composed around torch.amp.GradScaler: a floor, a ceiling, and no step without a verdict.

`GradScaler.step` is never called: its own check would be a second device read, and it applies an update whenever its
own check passes, whatever else is wrong. `unscale_` happens once a step, at one place, so a fused optimizer (whose
unscaling native code leaves to the kernel) takes the same path as any other.

Source: Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2. A floor of 1: below it GradScaler
shrinks gradients, and a persistent NaN drives its scale to exactly 0 in 166 steps, after which every gradient is NaN
for ever.
"""

from __future__ import annotations

from typing import Any

import torch

from ..config import PrecisionConfig

_GROWTH, _BACKOFF = 2.0, 0.5


class SafeScaler:
    """Loss scale of a run on one device; off (`enabled` false) it scales by 1 and keeps no state."""

    def __init__(self, config: PrecisionConfig, device: torch.device, *, enabled: bool) -> None:
        self._config = config
        self._device = device
        self._scaler = torch.amp.GradScaler(
            device.type,
            init_scale=config.initial_loss_scale,
            growth_factor=_GROWTH,
            backoff_factor=_BACKOFF,
            growth_interval=config.loss_scale_growth_interval,
            enabled=enabled,
        )

    @property
    def enabled(self) -> bool:
        return self._scaler.is_enabled()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the scale, for backward. Reads nothing."""
        return self._scaler.scale(loss)

    def current(self) -> torch.Tensor:
        """The scale as a tensor on the device; 1 when off. Reads nothing."""
        return self._scaler.scale(torch.ones((), device=self._device))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale. Once a step; torch raises at a second time."""
        if self.enabled:
            self._scaler.unscale_(optimizer)

    def at_floor(self, scale: float) -> bool:
        """Whether there is no lower scale to go to."""
        return not self.enabled or scale <= self._config.min_loss_scale

    def applied(self, scale: float) -> None:
        """The step was applied at `scale`: native bookkeeping, with growth that stops at the ceiling."""
        if self.enabled:
            self._scaler.set_growth_factor(max(1.0, min(_GROWTH, self._config.max_loss_scale / scale)))
            self._scaler.update()

    def measured(self) -> None:
        """The step was measured and not applied though its gradients were finite: `update` without `step`."""
        if self.enabled:
            self._scaler.update()

    def back_off(self, scale: float) -> float:
        """Halve the scale, not below the floor; its growth begins anew. Returns the new scale.

        Set from the host and not by `update`: with several processes the overflow may be another rank's.
        """
        lower = max(scale * _BACKOFF, self._config.min_loss_scale)
        self.reset(lower)
        return lower

    def keep(self, scale: float) -> None:
        """Forget the step at `scale`: nothing about the scale changes, not even its count towards growth."""
        if self.enabled:
            self._scaler.update(new_scale=float(scale))

    def reset(self, scale: float) -> None:
        """Put the scale to `scale` (within floor and ceiling) and begin its growth anew."""
        if not self.enabled:
            return
        scale = min(max(scale, self._config.min_loss_scale), self._config.max_loss_scale)
        self.current()  # GradScaler makes its tensors at the first use
        self._scaler.update(new_scale=float(scale))
        self._scaler.load_state_dict({**self._settings(), "scale": scale, "_growth_tracker": 0})

    def state_dict(self) -> dict[str, Any]:
        """Scale and growth count; empty when off. Reads the device."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Scale and count come from the checkpoint, growth interval and factors stay the config's."""
        if self.enabled and state:
            self._scaler.load_state_dict({**state, **self._settings()})

    def _settings(self) -> dict[str, Any]:
        return {
            "growth_factor": _GROWTH,
            "backoff_factor": _BACKOFF,
            "growth_interval": self._config.loss_scale_growth_interval,
        }
