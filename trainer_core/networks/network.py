"""The LoRA network: all adapters of a model, by name, and what the trainer does with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..config import LoraConfig
from ..draws import Draws
from ..errors import AdapterError, ConfigError, Problem
from .dropout import DropoutDraws, DropoutRates
from .initial import keyed_down
from .input_recompute import InputSources
from .lora import DropoutContext, LoraModule
from .max_norm import MaxNormResult, apply_max_norm
from .pissa import initialise_pissa
from .selection import Selected, select_targets
from .targets import part_root

if TYPE_CHECKING:
    from ..models import SDXLModel

LAYER_KEYS = ("alpha", "lora_down.weight", "lora_up.weight")
"""What a file holds for every module, in kohya's order."""


class LoraNetwork:
    """Adapters of the parts that are trained. Made by `create_lora_network`; attached until `detach`."""

    def __init__(
        self,
        modules: Sequence[LoraModule],
        context: DropoutContext | None = None,
        roots: Sequence[nn.Module] = (),
    ) -> None:
        self.modules: dict[str, LoraModule] = {module.name: module for module in modules}
        if len(self.modules) != len(modules):
            raise AdapterError("Two layers of the model would get the same name in the LoRA file.")
        self._context = context or DropoutContext()
        self._container = nn.ModuleDict(self.modules)
        # Where inputs of adapted layers can be computed again instead of kept (see input_recompute.py).
        self._roots = list(roots)
        self._sources: InputSources | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts that have adapters, in file order."""
        return tuple(dict.fromkeys(module.part for module in self.modules.values()))

    @property
    def container(self) -> nn.ModuleDict:
        """All adapters as one torch module (for wrappers that need one)."""
        return self._container

    @property
    def multiplier(self) -> float:
        return next(iter(self.modules.values())).multiplier if self.modules else 1.0

    def set_multiplier(self, multiplier: float) -> None:
        """Strength of all adapters; 0 computes the base model alone."""
        for module in self.modules.values():
            module.multiplier = float(multiplier)

    def set_draws(self, draws: DropoutDraws | None) -> None:
        """Name the samples of the micro-batch that is computed next; adapter dropout needs to know."""
        self._context.current = draws

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All trained weights as (`<kohya name>.lora_down.weight`, parameter)."""
        yield from self._container.named_parameters()

    def parameters_of(self, part: str) -> dict[str, nn.Parameter]:
        """Trained weights of one part ("unet", "te1", "te2")."""
        return {
            f"{name}.{key}": parameter
            for name, module in self.modules.items()
            if module.part == part
            for key, parameter in module.named_parameters()
        }

    def rate_factors(self) -> dict[str, float]:
        """Factor on the part's learning rate for every trained weight, by parameter name."""
        return {
            f"{name}.{key}": module.lr_factor
            for name, module in self.modules.items()
            for key, _ in module.named_parameters()
        }

    def train(self, mode: bool = True) -> LoraNetwork:
        """Turn adapter dropout on (training) or off."""
        self._container.train(mode)
        return self

    def eval(self) -> LoraNetwork:
        return self.train(False)

    def to(self, device: torch.device | str) -> LoraNetwork:
        """Move the adapters; their number format stays float32."""
        self._container.to(device)
        return self

    def attach(self) -> None:
        """Put all adapters on their layers. Does nothing where they already are."""
        for module in self.modules.values():
            module.attach()
        if self._roots and self._sources is None:
            self._sources = InputSources(self._roots)

    def detach(self) -> None:
        """Take all adapters off; the base model is then as it was, bit for bit."""
        for module in self.modules.values():
            module.detach()
        if self._sources is not None:
            self._sources.remove()
            self._sources = None

    @contextmanager
    def detached(self) -> Iterator[None]:
        """The base model alone inside the block."""
        self.detach()
        try:
            yield
        finally:
            self.attach()

    def apply_max_norm(self, limit: float) -> MaxNormResult:
        """Scale adapters down whose weight change is larger than `limit` (see `max_norm.py`)."""
        return apply_max_norm(self.modules.values(), limit)

    def clamp_counts(self) -> torch.Tensor | None:
        """(2,): adapter outputs that the clamp cut since the last call, and all of them; None when the clamp is off.
        Reads nothing from the device."""
        clamped = [module for module in self.modules.values() if module.clamp > 0]
        if not clamped:
            return None
        counts_2 = torch.stack([torch.stack([module.clamped, module.seen]) for module in clamped]).double().sum(0)
        for module in clamped:
            module.clamped.zero_()
            module.seen.zero_()
        return counts_2

    def state_dict(self, *, copy: bool = True) -> dict[str, torch.Tensor]:
        """Copies of all tensors under kohya's keys, float32 on the CPU, alpha as 0-dim tensors. Without `copy` they
        may be the live ones, on their device."""
        return {
            f"{name}.{key}": value.detach().to("cpu" if copy else value.device, torch.float32, copy=copy)
            for name, module in self.modules.items()
            for key, value in module.export_tensors().items()
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Take over weights and alphas (the scale follows alpha).

        Raises:
            AdapterError: keys are missing or left over (with `strict`), or a shape differs; nothing is changed then.
        """
        wanted = {f"{name}.{key}" for name in self.modules for key in LAYER_KEYS}
        missing, unknown = wanted - state.keys(), state.keys() - wanted
        if strict and (missing or unknown):
            raise AdapterError(_mismatch_text(missing, unknown, len(wanted)))
        self._check_shapes(state)
        for name, module in self.modules.items():
            own = {key: state[f"{name}.{key}"] for key in LAYER_KEYS if f"{name}.{key}" in state}
            module.import_tensors(own)

    def _check_shapes(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, module in self.modules.items():
            for short, own in module.export_tensors().items():
                key = f"{name}.{short}"
                if key in state and short != "alpha" and state[key].shape != own.shape:
                    raise AdapterError(
                        f"'{key}' has the shape {tuple(state[key].shape)}, the network needs {tuple(own.shape)}. "
                        "The weights were made with another rank or for another model."
                    )


def create_lora_network(
    model: SDXLModel, config: LoraConfig, *, trained_parts: Sequence[str], seed: int
) -> LoraNetwork:
    """Make the adapters of `trained_parts`, attach them and switch them to training mode.

    The base model is frozen (`requires_grad` off) as a whole. Parts of rank 0 get no adapters. First weights are keyed
    by module name, so they do not depend on which other modules are trained.

    Raises:
        ConfigError: a target rule cannot be read or matches nothing.
        AdapterError: a part that was asked for has no layer that can be adapted, or nothing is left to train.
    """
    refuse_combinations(config)
    context = DropoutContext()
    for root in (model.unet, *model.text_encoders):
        root.requires_grad_(False)
    # ComfyUI runs nodes under inference mode, in which new tensors could never be trained.
    with torch.inference_mode(False):
        modules = [_create_module(one, config, context) for one in select_targets(model, config, trained_parts)]
        roots = [part_root(model, part) for part in dict.fromkeys(module.part for module in modules)]
        network = LoraNetwork(modules, context, roots)
        initialise(network, seed)
        if config.init == "pissa":
            initialise_pissa(network.modules.values(), seed)
    network.train()
    network.attach()
    return network


def refuse_combinations(config: LoraConfig) -> None:
    if config.init != "pissa":
        return
    names = ("dropout", "rank_dropout", "module_dropout", "max_norm", "weights")
    why = "PiSSA subtracts the weights it began with, and this would change the two apart"
    problems = [
        Problem(f"lora.{name}", getattr(config, name), why, "Unset it, or use lora.init = 'default'.")
        for name in names
        if getattr(config, name)
    ]
    if problems:
        raise ConfigError(problems)


def initialise(network: LoraNetwork, seed: int) -> None:
    """Give all adapters their first weights: down from a draw keyed by the module's name, up zero."""
    draws = Draws(seed)
    with torch.no_grad():
        for name, module in network.modules.items():
            nn.init.zeros_(module.lora_up.weight)
            if module.lora_down.weight.device.type != "meta":
                module.lora_down.weight.copy_(keyed_down(draws, name, module.lora_down.weight.shape))


def _create_module(selected: Selected, config: LoraConfig, context: DropoutContext) -> LoraModule:
    rates = DropoutRates(neuron=selected.dropout, rank=config.rank_dropout, module=config.module_dropout)
    # rsLoRA divides by sqrt(rank) instead of rank (Kalajdzievski 2023, arXiv:2312.03732). In kohya's format, where
    # every loader computes alpha / rank, that is a larger alpha.
    alpha = selected.alpha * selected.rank**0.5 if config.rs_lora else selected.alpha
    module = LoraModule(selected.target, selected.rank, alpha, rates=rates, context=context)
    module.lr_factor = selected.lr_factor
    module.clamp = config.clamp
    return module


def _mismatch_text(missing: set[str], unknown: set[str], count: int) -> str:
    def sample(keys: set[str]) -> str:
        return ", ".join(sorted(keys)[:3]) + (" ..." if len(keys) > 3 else "")

    lines = [f"The weights do not fit the network, which holds {count} tensors."]
    if missing:
        lines.append(f"{len(missing)} are missing: {sample(missing)}.")
    if unknown:
        lines.append(f"{len(unknown)} have no place in it: {sample(unknown)}.")
    return " ".join(lines)
