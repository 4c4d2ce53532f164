"""Adapter kinds of Hugging Face PEFT on our targets: LoRA, DoRA, rsLoRA, LoHa, LoKr, OFT.

PEFT puts its layers in place of the model's. Here they stand beside it: each gets a shadow of its base layer (the same
weights, its own `forward`), and the model's layer hands its input over. So the model keeps its structure, and detaching
leaves it as it was.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config import LoraConfig
from ..errors import AdapterError, ConfigError, Problem
from .foreign_network import BaseParameters, ForeignNetwork, base_parameters_of
from .kohya_module import parse_arguments, seeded
from .peft_keys import from_kohya_keys, to_kohya_keys
from .selection import Selected, select_targets

if TYPE_CHECKING:
    from ..models import SDXLModel

ADAPTER = "default"
KINDS = ("lora", "dora", "rslora", "loha", "lokr", "oft")
_OTHER_WAYS = {"pissa": "use lora.network = 'native' with lora.init = 'pissa', which leaves the base weights alone"}


class PeftContainer(nn.Module):
    """PEFT's layers by kohya name. Only adapter weights count as its parameters: base weights are the model's."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(*args, **kwargs):
            if ".base_layer." not in name:
                yield name, parameter

    def requires_grad_(self, requires_grad: bool = True) -> PeftContainer:
        for _, parameter in self.named_parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def to(self, target: Any) -> PeftContainer:  # type: ignore[override]
        for _, parameter in self.named_parameters():
            parameter.data = parameter.data.to(target)
        return self


class PeftNetwork(ForeignNetwork):
    """A network of PEFT layers."""

    def __init__(
        self, kind: str, raw: PeftContainer, model: SDXLModel, base_parameters: BaseParameters, *, draws: bool
    ) -> None:
        super().__init__(f"peft:{kind}", raw, model, base_parameters, draws=draws)
        self.kind = kind

    def set_multiplier(self, multiplier: float) -> None:
        """Strength of all adapters. OFT rotates weights and knows on and off only.

        Raises:
            AdapterError: another strength than 0 or 1 for OFT.
        """
        if self.kind == "oft" and multiplier not in (0.0, 1.0):
            raise AdapterError(f"OFT adapters have no strength; {multiplier} was asked for. Use 0 or 1.")
        self._multiplier = float(multiplier)
        for layer in self.modules.values():
            tuner: Any = layer
            tuner.enable_adapters(multiplier != 0.0)
            if multiplier != 0.0 and self.kind != "oft":
                tuner.set_scale(ADAPTER, multiplier)

    def export_state_dict(self) -> dict[str, torch.Tensor]:
        """Kohya's keys where the kind has them (LoRA, DoRA, LoHa, LoKr), PEFT's short names under kohya's module names
        otherwise (OFT)."""
        scales = {name: self._scale(layer) for name, layer in self.modules.items()}
        tensors = {name: value.detach().float().cpu().clone() for name, value in self.named_parameters()}
        return to_kohya_keys(tensors, scales)

    def load_export(self, state: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
        own = dict(self.named_parameters())
        found = from_kohya_keys(state, own)
        unknown = tuple(sorted(found.keys() - own.keys()))
        self.load_state_dict({name: value for name, value in found.items() if name in own}, strict=False)
        return unknown

    def raw_reads(self, state: Mapping[str, torch.Tensor]) -> bool:
        return True

    def _held(self) -> dict[str, torch.Tensor]:
        return dict(self.named_parameters())

    def _scale(self, layer: nn.Module) -> float:
        scaling = getattr(layer, "scaling", None)
        return 1.0 if not scaling else float(scaling[ADAPTER]) / (self._multiplier or 1.0)


def create_peft_network(
    model: SDXLModel, config: LoraConfig, *, trained_parts: Sequence[str], seed: int
) -> PeftNetwork:
    """Make PEFT adapters of the kind in `config.network` ("peft:dora") on the selected targets; weights float32.

    Raises:
        ConfigError: an unknown kind or argument.
        AdapterError: PEFT cannot make this kind of adapter on a target.
    """
    kind = check_peft_settings(config)
    for root in (model.unet, *model.text_encoders):
        root.requires_grad_(False)
    selected, before = select_targets(model, config, trained_parts), base_parameters_of(model)
    if kind == "oft":
        _refuse_wide_convolutions(selected)
    with seeded(seed), torch.inference_mode(False):
        raw = _inject(kind, selected, config)
    _take_over(raw, selected)
    network = PeftNetwork(kind, raw, model, before, draws=config.dropout > 0)
    network.rebuild = lambda: create_peft_network(model, config, trained_parts=trained_parts, seed=seed)
    network.train()
    return network


def check_peft_settings(config: LoraConfig) -> str:
    """The kind of adapter that `config` asks for ("dora").

    Raises:
        ConfigError: an unknown kind or argument.
    """
    kind = config.network.partition(":")[2].lower()
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        fix = _OTHER_WAYS.get(kind) or (f"Did you mean 'peft:{near[0]}'? " if near else "") + f"Allowed: {KINDS}"
        raise ConfigError([Problem("lora.network", config.network, "PEFT has no such kind here", f"{fix}.")])
    _extra_arguments(_config_class(kind), config)
    return kind


def _refuse_wide_convolutions(selected: Sequence[Selected]) -> None:
    """PEFT's OFT unfolds a convolution's input, rotates the patches and folds them back, which adds overlapping patches
    up: with a 3x3 kernel even the untrained adapter multiplies its input by up to 9 (seen in PEFT 0.21.2)."""
    wide = [one.target.name for one in selected if one.target.is_wide_conv]
    if wide:
        raise AdapterError(
            f"PEFT's OFT computes wrong outputs on 3x3 convolutions, and {len(wide)} were selected, such as "
            f"'{wide[0]}'. Leave them out (lora.conv_rank = 0, or a rule with rank=0), or use lora.network = "
            "'lycoris.kohya' with algo=diag-oft."
        )


def _config_class(kind: str) -> Any:
    import peft

    if kind in ("lora", "dora", "rslora"):
        return peft.LoraConfig
    return {"loha": peft.LoHaConfig, "lokr": peft.LoKrConfig, "oft": peft.OFTConfig}[kind]


def _inject(kind: str, selected: Sequence[Selected], config: LoraConfig) -> PeftContainer:
    import peft

    container = PeftContainer()
    for one in selected:
        container.add_module(one.target.name, _shadow(one.target.module))
    settings = _peft_config(kind, selected, config)
    try:
        peft.inject_adapter_in_model(settings, container, ADAPTER)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        raise AdapterError(
            f"PEFT cannot make '{kind}' adapters here: {type(error).__name__}: {error}. Check lora.network_args and "
            "lora.targets."
        ) from error
    return container


def _shadow(base: nn.Module) -> nn.Module:
    """Another module object over the same weights, with the class's own `forward`."""
    shadow = copy.copy(base)
    shadow.__dict__.pop("forward", None)
    return shadow


def _peft_config(kind: str, selected: Sequence[Selected], config: LoraConfig) -> Any:
    names = [one.target.name for one in selected]
    first = selected[0]
    ranks = {one.target.name: one.rank for one in selected if one.rank != first.rank}
    alphas = {one.target.name: one.alpha for one in selected if one.alpha != first.alpha}
    common: dict[str, Any] = {"target_modules": names}
    cls = _config_class(kind)
    if kind in ("lora", "dora", "rslora"):
        common |= {"r": first.rank, "lora_alpha": first.alpha, "lora_dropout": config.dropout}
        common |= {"use_dora": kind == "dora", "use_rslora": kind == "rslora"}
        common |= {"rank_pattern": ranks, "alpha_pattern": alphas}
    elif kind in ("loha", "lokr"):
        common |= {"r": first.rank, "alpha": first.alpha, "rank_dropout": config.dropout}
        common |= {"rank_pattern": ranks, "alpha_pattern": alphas}
    else:
        common |= {"r": 0, "oft_block_size": first.rank, "module_dropout": config.dropout}
    return cls(**common | _extra_arguments(cls, config))


def _extra_arguments(cls: Any, config: LoraConfig) -> dict[str, Any]:
    known = [field.name for field in fields(cls)]
    extra: dict[str, Any] = {}
    problems = []
    for key, text in parse_arguments(config.network_args).items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            fix = (f"Did you mean '{near[0]}'? " if near else "") + f"See PEFT's {cls.__name__}."
            problems.append(Problem("lora.network_args", key, f"PEFT's {cls.__name__} does not have it", fix))
            continue
        try:
            extra[key] = json.loads(text.lower() if text.lower() in ("true", "false") else text)
        except ValueError:
            extra[key] = text
    if problems:
        raise ConfigError(problems)
    return extra


def _take_over(raw: PeftContainer, selected: Sequence[Selected]) -> None:
    """Let the model's layers hand their input to PEFT's."""
    layers = dict(raw.named_children())
    for one in selected:
        one.target.module.forward = layers[one.target.name].forward  # type: ignore[method-assign]
