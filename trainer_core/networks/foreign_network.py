"""A foreign kohya network behind the interface of ours (`interface.Network`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import AdapterError
from .dropout import DropoutDraws
from .naming import foreign_part

if TYPE_CHECKING:
    from ..models import SDXLModel

BaseParameters = dict[nn.Module, dict[str, nn.Parameter | None]]


class ForeignNetwork:
    """Adapters that a foreign module put on a model.

    Args:
        name: dotted name of the module, for messages.
        raw: its network, after `apply_to`.
        model: the model it was put on.
        base_parameters: every layer's own weights before that (see `base_parameters_of`).
        draws: whether it draws from global random streams while it computes.
        rates: weights that it trains, with their factor on the part's learning rate; None = all, at factor 1.
    """

    def __init__(
        self,
        name: str,
        raw: Any,
        model: SDXLModel,
        base_parameters: BaseParameters,
        *,
        draws: bool,
        rates: Mapping[nn.Parameter, float] | None = None,
    ) -> None:
        self.name, self.raw = name, raw
        self._draws = draws
        self._roots = [model.unet, *model.text_encoders]
        raw.to(torch.float32).requires_grad_(True)
        self._rates = None if rates is None else dict(rates)
        if rates is not None:
            for parameter in raw.parameters():
                parameter.requires_grad_(parameter in rates)
        self._taken = _taken_over(self._roots, base_parameters)
        self.modules: dict[str, nn.Module] = {key: child for key, child in raw.named_children() if foreign_part(key)}
        self._multiplier = 1.0
        self.messages: tuple[str, ...] = ()
        """What the module printed while it was made."""
        self.rebuild: Callable[[], ForeignNetwork] | None = None
        """Makes the same network anew, attached and untrained; for the proof after saving."""

    @property
    def parts(self) -> tuple[str, ...]:
        found = {foreign_part(key) for key, parameter in self.named_parameters() if parameter.requires_grad}
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
        """Foreign modules draw (dropout, DyLoRA's ranks) from the global streams of torch and Python; give these a
        start that depends on the micro-batch only."""
        if self._draws and draws is not None:
            keys = "+".join(draws.sample_keys)
            start = draws.draws.integer(0, 2**62, draws.epoch, keys, f"dropout/{self.name}")
            torch.manual_seed(start)
            random.seed(start)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.raw.named_parameters()

    def parameters_of(self, part: str) -> dict[str, nn.Parameter]:
        return {
            key: parameter
            for key, parameter in self.named_parameters()
            if foreign_part(key) == part and (self._rates is None or parameter in self._rates)
        }

    def rate_factors(self) -> dict[str, float]:
        rates = {} if self._rates is None else self._rates
        return {key: rates.get(parameter, 1.0) for key, parameter in self.named_parameters()}

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
        for taken in self._taken:
            taken.module.__dict__["forward"] = taken.forward
            taken.module._parameters.update(taken.parameters)
            for name in taken.base.keys() - taken.parameters.keys():
                taken.module._parameters.pop(name, None)

    def detach(self) -> None:
        """Take the adapters off; the base model is then as it was.

        Raises:
            AdapterError: something else was put on top of a layer since.
        """
        for taken in self._taken:
            current = taken.module.__dict__.get("forward")
            if current is not None and current != taken.forward:
                raise AdapterError(f"The adapters of '{self.name}' cannot be taken off: something lies on top of them.")
            for key in [key for key in taken.module.__dict__ if key == "forward" or key.startswith("_lycoris_")]:
                del taken.module.__dict__[key]
            taken.module._parameters.update(taken.base)

    @contextmanager
    def detached(self) -> Iterator[None]:
        self.detach()
        try:
            yield
        finally:
            self.attach()

    def state_dict(self, *, copy: bool = True) -> dict[str, torch.Tensor]:
        """Copies of all weights and buffers as they are held, on the CPU: what a checkpoint needs. Without `copy` the
        live ones, on their device. Files hold `export_state_dict`, which some kinds make from these."""
        held = {name: tensor.detach() for name, tensor in self._held().items()}
        return {name: tensor.to("cpu", copy=True) for name, tensor in held.items()} if copy else held

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Take over what `state_dict` gave.

        Raises:
            AdapterError: keys are missing or left over (with `strict`), or a shape differs; nothing is changed then.
        """
        held = self._held()
        missing, unknown = sorted(held.keys() - state.keys()), sorted(state.keys() - held.keys())
        wrong = [name for name in held.keys() & state.keys() if held[name].shape != state[name].shape]
        if wrong or (strict and (missing or unknown)):
            raise AdapterError(
                f"The weights do not fit the network of '{self.name}': {_some(missing)} are missing, {_some(unknown)} "
                f"have no place, {_some(wrong)} have another shape."
            )
        with torch.no_grad():
            for name in held.keys() & state.keys():
                held[name].copy_(state[name])

    def export_state_dict(self) -> dict[str, torch.Tensor]:
        """What a file holds: tensors under the module's own keys (kohya names), float32 on the CPU."""
        state = {
            key: value.detach().to("cpu", torch.float32 if value.is_floating_point() else value.dtype, copy=True)
            for key, value in self.raw.state_dict().items()
        }
        for name, module in self.modules.items():
            if hasattr(module, "up_list") and hasattr(module, "block_size"):
                _mend_lycoris_dylora(state, name, module)
        return state

    def load_export(self, state: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
        """Take over a file's tensors with the module's own loading; returns keys that found no place.

        Raises:
            AdapterError: the module refuses them.
        """
        try:
            result = self.raw.load_state_dict(dict(state), strict=False)
        except RuntimeError as error:
            raise AdapterError(f"The weights do not fit the network of '{self.name}': {error}") from error
        return tuple(result.unexpected_keys)

    def raw_reads(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Whether the module can read a file of these keys back. LyCORIS' DyLoRA cannot: it holds lists of ranks;
        sd-scripts' one has a way of loading of its own."""
        own = nn.Module._load_from_state_dict
        if any(type(child)._load_from_state_dict is not own for child in self.modules.values()):
            return True
        held = self._held().keys()
        return all(key in held or not key.endswith((".lora_up.weight", ".lora_down.weight")) for key in state)

    def _held(self) -> dict[str, torch.Tensor]:
        return {**dict(self.raw.named_parameters()), **dict(self.raw.named_buffers())}

    def apply_max_norm(self, limit: float) -> Any:
        """The module's own max-norm.

        Raises:
            AdapterError: the module has none.
        """
        apply = getattr(self.raw, "apply_max_norm_regularization", None)
        if apply is None:
            raise AdapterError(f"'{self.name}' has no max-norm. Set lora.max_norm to 0.")
        return apply(limit, next(self.raw.parameters()).device)

    def clamp_counts(self) -> torch.Tensor | None:
        """Foreign modules have no clamp."""
        return None


@dataclass(frozen=True)
class _Taken:
    """A layer that a foreign module took over: its new `forward`, its weights now, and its own ones before. Some kinds
    (LyCORIS' "full") take the base weight away while they are on."""

    module: nn.Module
    forward: Any
    parameters: dict[str, nn.Parameter | None]
    base: dict[str, nn.Parameter | None]


def base_parameters_of(model: SDXLModel) -> BaseParameters:
    """References to every layer's own weights; to be taken before a foreign module touches the model."""
    roots: list[nn.Module] = [model.unet, *model.text_encoders]
    return {module: dict(module._parameters) for root in roots for module in root.modules() if module._parameters}


def _taken_over(roots: list[nn.Module], base: BaseParameters) -> list[_Taken]:
    modules = [module for root in roots for module in root.modules()]
    return [
        _Taken(module, module.__dict__["forward"], dict(module._parameters), base.get(module, {}))
        for module in modules
        if "forward" in module.__dict__
    ]


def _mend_lycoris_dylora(state: dict[str, torch.Tensor], name: str, module: Any) -> None:
    """Make a file of LyCORIS' DyLoRA compute what was trained.

    At its full rank it trains with alpha / (number of blocks) (`DyLoraModule.get_weight`, lycoris 4.1.3) but writes
    alpha as it was given, which every loader divides by the rank: the file would act `block_size` times too weakly.
    A convolution's `lora_up` gets the four dimensions that loaders expect.
    """
    state[f"{name}.alpha"] = state[f"{name}.alpha"].float() * module.block_size
    up, down = state[f"{name}.lora_up.weight"], state[f"{name}.lora_down.weight"]
    state[f"{name}.lora_up.weight"] = up.reshape(*up.shape[:2], *[1] * (down.dim() - 2))


def _some(keys: list[str]) -> str:
    return f"{len(keys)} tensors" + (f" ({', '.join(keys[:3])})" if keys else "")
