"""A foreign kohya network behind the interface of ours (`interface.Network`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import AdapterError
from .dropout import DropoutDraws
from .naming import part_of_name

if TYPE_CHECKING:
    from ..models import SDXLModel


class ForeignNetwork:
    """Adapters that a foreign module put on a model.

    Args:
        name: dotted name of the module, for messages.
        raw: its network, after `apply_to`.
        model: the model it was put on.
        has_dropout: whether it draws dropout masks from torch's global random stream.
    """

    def __init__(self, name: str, raw: Any, model: SDXLModel, *, has_dropout: bool) -> None:
        self.name, self.raw = name, raw
        self._has_dropout = has_dropout
        self._roots = [model.unet, *model.text_encoders]
        raw.to(torch.float32).requires_grad_(True)
        self._forwards = _taken_over(self._roots)
        self.modules: dict[str, nn.Module] = {key: child for key, child in raw.named_children() if part_of_name(key)}
        self._multiplier = 1.0
        self.messages: tuple[str, ...] = ()
        """What the module printed while it was made."""
        self.rebuild: Callable[[], ForeignNetwork] | None = None
        """Makes the same network anew, attached and untrained; for the proof after saving."""

    @property
    def parts(self) -> tuple[str, ...]:
        found = {part_of_name(key) for key, parameter in self.named_parameters() if parameter.requires_grad}
        return tuple(part for part in ("te1", "te2", "unet") if part in found)

    @property
    def container(self) -> nn.Module:
        return self.raw

    @property
    def multiplier(self) -> float:
        return self._multiplier

    def set_multiplier(self, multiplier: float) -> None:
        self._multiplier = float(multiplier)
        for lora in self.modules.values():
            lora.multiplier = float(multiplier)  # type: ignore[assignment]

    def set_draws(self, draws: DropoutDraws | None) -> None:
        """Foreign dropout uses torch's global stream; give it a start that depends on the micro-batch only."""
        if self._has_dropout and draws is not None:
            keys = "+".join(draws.sample_keys)
            torch.manual_seed(draws.draws.integer(0, 2**62, draws.epoch, keys, f"dropout/{self.name}"))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.raw.named_parameters()

    def parameters_of(self, part: str) -> dict[str, nn.Parameter]:
        return {key: parameter for key, parameter in self.named_parameters() if part_of_name(key) == part}

    def rate_factors(self) -> dict[str, float]:
        return {key: 1.0 for key, _ in self.named_parameters()}

    def train(self, mode: bool = True) -> ForeignNetwork:
        self.raw.train(mode)
        return self

    def eval(self) -> ForeignNetwork:
        return self.train(False)

    def to(self, device: torch.device | str) -> ForeignNetwork:
        self.raw.to(device)
        return self

    def attach(self) -> None:
        """Put the adapters back on their layers."""
        for module, forward in self._forwards:
            module.forward = forward  # type: ignore[method-assign]

    def detach(self) -> None:
        """Take the adapters off; the base model is then as it was.

        Raises:
            AdapterError: something else was put on top of a layer since.
        """
        for module, forward in self._forwards:
            current = module.__dict__.get("forward")
            if current is not None and current != forward:
                raise AdapterError(f"The adapters of '{self.name}' cannot be taken off: something lies on top of them.")
            for key in [key for key in module.__dict__ if key == "forward" or key.startswith("_lycoris_")]:
                del module.__dict__[key]

    @contextmanager
    def detached(self) -> Iterator[None]:
        self.detach()
        try:
            yield
        finally:
            self.attach()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors under the module's own keys (kohya names), float32 on the CPU."""
        return {
            key: value.detach().to("cpu", torch.float32 if value.is_floating_point() else value.dtype, copy=True)
            for key, value in self.raw.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Take over weights.

        Raises:
            AdapterError: keys are missing or left over (with `strict`), or a shape differs.
        """
        try:
            result = self.raw.load_state_dict(dict(state), strict=False)
        except RuntimeError as error:
            raise AdapterError(f"The weights do not fit the network of '{self.name}': {error}") from error
        if strict and (result.missing_keys or result.unexpected_keys):
            raise AdapterError(
                f"The weights do not fit the network of '{self.name}': {len(result.missing_keys)} tensors are missing "
                f"({', '.join(result.missing_keys[:3])}), {len(result.unexpected_keys)} have no place "
                f"({', '.join(result.unexpected_keys[:3])})."
            )

    def apply_max_norm(self, limit: float) -> Any:
        """The module's own max-norm.

        Raises:
            AdapterError: the module has none.
        """
        apply = getattr(self.raw, "apply_max_norm_regularization", None)
        if apply is None:
            raise AdapterError(f"'{self.name}' has no max-norm. Set lora.max_norm to 0.")
        return apply(limit, next(self.raw.parameters()).device)

    def clamp_rate(self) -> float | None:
        """Foreign modules have no clamp."""
        return None


def _taken_over(roots: list[nn.Module]) -> list[tuple[nn.Module, Any]]:
    """Layers whose `forward` was replaced on the object, with the replacement."""
    modules = [module for root in roots for module in root.modules()]
    return [(module, module.__dict__["forward"]) for module in modules if "forward" in module.__dict__]
