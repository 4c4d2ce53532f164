"""What the trainer asks of a network, whatever kind it is: ours, PEFT's, or a foreign kohya module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from .dropout import DropoutDraws

if TYPE_CHECKING:
    from .foreign_network import ForeignNetwork
    from .network import LoraNetwork


class Network(Protocol):
    """Trained parameters by part, under kohya's keys; attached to the model until `detach`."""

    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def container(self) -> nn.Module: ...

    @property
    def multiplier(self) -> float: ...

    def set_multiplier(self, multiplier: float) -> None: ...

    def set_draws(self, draws: DropoutDraws | None) -> None: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def parameters_of(self, part: str) -> dict[str, nn.Parameter]: ...

    def rate_factors(self) -> dict[str, float]: ...

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...

    def to(self, device: torch.device | str) -> Any: ...

    def attach(self) -> None: ...

    def detach(self) -> None: ...

    def detached(self) -> AbstractContextManager[None]: ...

    def state_dict(self, *, copy: bool = True) -> dict[str, torch.Tensor]: ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None: ...

    def apply_max_norm(self, limit: float) -> Any: ...

    def clamp_counts(self) -> torch.Tensor | None: ...


def known_network(network: Network) -> LoraNetwork | ForeignNetwork:
    """The concrete kind of a network, for code that treats kinds differently.

    Raises:
        TypeError: it is neither ours nor a foreign one.
    """
    from .foreign_network import ForeignNetwork
    from .network import LoraNetwork

    if isinstance(network, LoraNetwork | ForeignNetwork):
        return network
    raise TypeError(f"{type(network).__name__} is no network of trainer_core.networks")
