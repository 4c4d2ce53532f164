"""From config to the list of layers that receive an adapter, each with its rank, alpha, dropout and rate factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from ..config import LoraConfig, alpha_share, part_alpha, part_rank
from ..errors import AdapterError, ConfigError, Problem
from .kohya_blocks import BlockLists, parse_block_lists
from .layer_kinds import Place, place_of
from .naming import module_names
from .target_misses import explain_miss
from .target_presets import PRESETS, Preset
from .target_rules import TargetRule, parse_rules
from .targets import PART_LABELS, PART_ORDER, Target, is_default_target, ordered_parts, part_root

if TYPE_CHECKING:
    from ..models import SDXLModel


@dataclass(frozen=True)
class Selected:
    """A layer and its adapter's settings. `lr_factor` multiplies the part's learning rate."""

    place: Place
    rank: int
    alpha: float
    dropout: float
    lr_factor: float = 1.0

    @property
    def target(self) -> Target:
        return self.place.target


def select_targets(model: SDXLModel, config: LoraConfig, trained_parts: Sequence[str]) -> list[Selected]:
    """All layers that receive an adapter, in file order.

    Raises:
        ConfigError: a rule or block list cannot be read, or a rule matches nothing (with the reason).
        AdapterError: nothing is left to train, or a part that was asked for is left without adapters.
    """
    rules, lists = parse_rules(config.targets), parse_block_lists(config)
    preset = PRESETS[config.preset]
    parts = [part for part in ordered_parts(trained_parts) if part_rank(config, part) > 0]
    places = {part: all_places(part_root(model, part), part) for part in PART_ORDER}
    _refuse_misses(rules, places, parts, model)
    selected: list[Selected] = []
    for part in parts:
        chosen = [one for place in places[part] if (one := _select(place, config, preset, rules, lists)) is not None]
        if not chosen:
            raise AdapterError(_empty_part(part, config, len(places[part])))
        selected += chosen
    if not selected:
        raise AdapterError(
            f"There is nothing to train: of the parts {list(trained_parts)} none has a rank above 0. "
            "Set rank, unet_rank, te1_rank or te2_rank."
        )
    return selected


def all_places(root: nn.Module, part: str) -> list[Place]:
    """Every layer of a part that could carry an adapter and has a name in files."""
    names = module_names(part, root)
    return [
        place_of(Target(part, path, names[path], module))
        for path, module in root.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and path in names
    ]


def _select(
    place: Place, config: LoraConfig, preset: Preset, rules: Sequence[TargetRule], lists: BlockLists
) -> Selected | None:
    chosen = _from_preset(place, config, preset, lists)
    for rule in rules:
        if rule.matches(place):
            chosen = _changed(chosen, place, rule, config)
    if chosen is not None and chosen.rank > 0 and chosen.alpha == 0:
        raise AdapterError(f"'{place.target.path}' would get alpha 0: its adapter could do nothing. Set an alpha.")
    return chosen if chosen is not None and chosen.rank > 0 and chosen.lr_factor > 0 else None


def _from_preset(place: Place, config: LoraConfig, preset: Preset, lists: BlockLists) -> Selected | None:
    with_conv = config.conv_rank > 0 or preset.conv or lists.conv_dims is not None
    if not is_default_target(place.target, with_conv) or not preset.contains(place):
        return None
    rank, alpha = _basic(place, config, lists)
    index = place.block_index
    factor = 1.0 if lists.lr_factors is None or index is None else lists.lr_factors[index]
    # kohya makes no adapters where the block's rate is 0.
    return Selected(place, rank, alpha, config.dropout, factor) if factor > 0 else None


def _basic(place: Place, config: LoraConfig, lists: BlockLists) -> tuple[int, float]:
    """Rank and alpha before rules: the block lists', else those of the part or of the 3x3 convolutions."""
    part, index, share = place.target.part, place.block_index, alpha_share(config)
    wide = part == "unet" and place.target.is_wide_conv
    dims, alphas = (lists.conv_dims, lists.conv_alphas) if wide else (lists.dims, lists.alphas)
    if dims is not None and index is not None:
        rank = dims[index]
        return rank, alphas[index] if alphas is not None else rank * share
    if wide and config.conv_rank > 0:
        own = config.conv_alpha
        return config.conv_rank, config.conv_rank * share if own is None else own
    return part_rank(config, part), part_alpha(config, part)


def _changed(chosen: Selected | None, place: Place, rule: TargetRule, config: LoraConfig) -> Selected | None:
    """`chosen` with the settings of a rule; a rule with a rank also takes in layers that the preset left out."""
    if chosen is None:
        if not rule.rank:
            return None
        chosen = Selected(place, rule.rank, rule.rank * alpha_share(config), config.dropout)
    share = chosen.alpha / chosen.rank if chosen.rank else alpha_share(config)
    rank = chosen.rank if rule.rank is None else rule.rank
    return replace(
        chosen,
        rank=rank,
        alpha=rank * share if rule.alpha is None else rule.alpha,
        dropout=chosen.dropout if rule.dropout is None else rule.dropout,
        lr_factor=chosen.lr_factor if rule.lr is None else rule.lr,
    )


def _refuse_misses(
    rules: Sequence[TargetRule], places: dict[str, list[Place]], parts: Sequence[str], model: SDXLModel
) -> None:
    problems = []
    for rule in rules:
        if not any(rule.matches(place) for part in parts for place in places[part]):
            everything = [place for part in PART_ORDER for place in places[part]]
            why = explain_miss(rule, everything, parts, [part_root(model, part) for part in PART_ORDER])
            problems.append(Problem("lora.targets", rule.text, why, "Correct the rule or remove it."))
    if problems:
        raise ConfigError(problems)


def _empty_part(part: str, config: LoraConfig, count: int) -> str:
    if count == 0:
        return (
            f"{PART_LABELS[part]} has no layer that an adapter fits on: none of its modules is a linear or convolution "
            "layer at one of SDXL's places. Is this an SDXL model?"
        )
    return (
        f"{PART_LABELS[part]} is to be trained, but preset '{config.preset}' and the rules leave none of its {count} "
        f"layers. Change lora.preset or lora.targets, or set lora.{part}_rank to 0."
    )
