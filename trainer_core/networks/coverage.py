"""Coverage report: which layers have adapters, and which adapters a gradient reaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import AdapterError
from .coverage_probe import reached_weights
from .naming import text_layer_of_name
from .selection import all_places
from .targets import PART_LABELS, PART_ORDER, part_root

if TYPE_CHECKING:
    from ..models import SDXLModel
    from .network import LoraNetwork

NOT_USED = "its output is not used: SDXL reads text encoder 1 before its last layer"
NO_GRADIENT = "no gradient came back to it in the probe"


@dataclass(frozen=True)
class BlockCoverage:
    """One block: layers that could carry adapters, those that do, and how many of these a gradient reached.

    `reached` is None when no probe was made. `reason` says why some were not reached ("" when all were).
    """

    part: str
    block: str
    layers: int
    adapters: int
    parameters: int
    base_parameters: int
    reached: int | None = None
    reason: str = ""

    @property
    def state(self) -> str:
        """One of: "none" (no adapters), "unknown" (not probed), "reached", "unused" (known, harmless), "broken"."""
        if self.adapters == 0:
            return "none"
        if self.reached is None:
            return "unknown"
        if self.reached == self.adapters:
            return "reached"
        return "unused" if self.reason == NOT_USED else "broken"


@dataclass(frozen=True)
class CoverageReport:
    """Coverage of a network by part and block, and the modules that no gradient reached with the reason."""

    blocks: tuple[BlockCoverage, ...]
    unreached: Mapping[str, str]

    @property
    def broken(self) -> tuple[BlockCoverage, ...]:
        """Blocks with adapters that should have had a gradient and had none."""
        return tuple(block for block in self.blocks if block.state == "broken")

    def part(self, part: str) -> list[BlockCoverage]:
        return [block for block in self.blocks if block.part == part]

    def to_dict(self) -> dict[str, Any]:
        return {
            "blocks": [{**asdict(block), "state": block.state} for block in self.blocks],
            "unreached": dict(self.unreached),
        }

    @property
    def text(self) -> str:
        """A table for the terminal."""
        lines = ["part            block     adapters of layers  weights     share   gradient"]
        for part in PART_ORDER:
            rows = self.part(part)
            if not any(row.adapters for row in rows):
                lines.append(f"{PART_LABELS[part]:<15} not trained")
                continue
            lines += [_row(row) for row in rows if row.adapters or part == "unet"]
            lines.append(_total(part, rows))
        lines += [f"  not reached: {name}: {reason}" for name, reason in list(self.unreached.items())[:10]]
        if len(self.unreached) > 10:
            lines.append(f"  ... and {len(self.unreached) - 10} more")
        return "\n".join(lines)

    def svg(self) -> str:
        """The way from prompt to picture as a diagram; broken stretches are red."""
        from .coverage_svg import coverage_svg

        return coverage_svg(self)


def coverage(model: SDXLModel, network: LoraNetwork, *, probe: bool = True) -> CoverageReport:
    """Compare `network` with what `model` has, and see with a small probe batch which adapters learn.

    Raises:
        AdapterError: a part that is trained was not reached by any gradient.
    """
    reached = reached_weights(model, network) if probe else None
    unreached = {} if reached is None else _unreached(model, network, reached)
    report = CoverageReport(tuple(_blocks(model, network, unreached if probe else None)), unreached)
    for part in network.parts if probe else ():
        modules = [name for name, module in network.modules.items() if module.part == part]
        if all(name in unreached for name in modules):
            raise AdapterError(
                f"{PART_LABELS[part]} is to be trained, but no gradient reaches any of its {len(modules)} adapters. "
                "Its output does not take part in the loss. For a text encoder: do not cache its outputs, and check "
                "that cross-attention is not detached."
            )
    return report


def _unreached(model: SDXLModel, network: LoraNetwork, reached: Mapping[str, bool]) -> dict[str, str]:
    last = int(model.text_encoders[0].config.num_hidden_layers) - 1
    found: dict[str, str] = {}
    for name, module in network.modules.items():
        if not all(reached[f"{name}.{key}"] for key, _ in module.named_parameters()):
            unused = module.part == "te1" and text_layer_of_name(name) == last
            found[name] = NOT_USED if unused else NO_GRADIENT
    return found


def _blocks(model: SDXLModel, network: LoraNetwork, unreached: Mapping[str, str] | None) -> list[BlockCoverage]:
    rows = []
    for part in PART_ORDER:
        places = all_places(part_root(model, part), part)
        labels = sorted({place.block for place in places}, key=lambda block: _order(part, block))
        for label in labels:
            inside = [place for place in places if place.block == label]
            adapters = [network.modules[p.target.name] for p in inside if p.target.name in network.modules]
            missed = [] if unreached is None else [m.name for m in adapters if m.name in unreached]
            reasons = {unreached[name] for name in missed} if unreached else set()
            rows.append(
                BlockCoverage(
                    part=part,
                    block=label,
                    layers=len(inside),
                    adapters=len(adapters),
                    parameters=sum(p.numel() for module in adapters for p in module.parameters()),
                    base_parameters=sum(place.target.module.weight.numel() for place in inside),
                    reached=None if unreached is None else len(adapters) - len(missed),
                    reason=NO_GRADIENT if NO_GRADIENT in reasons else next(iter(reasons), ""),
                )
            )
    return rows


def _order(part: str, block: str) -> tuple[int, int]:
    kinds = ("base", "IN", "MID", "OUT", "layer")
    kind = block.rstrip("0123456789").strip()
    return kinds.index(kind), int("".join(filter(str.isdigit, block)) or 0)


def _row(row: BlockCoverage) -> str:
    share = 100 * row.parameters / row.base_parameters if row.base_parameters else 0.0
    gradient = {
        "none": "-",
        "unknown": "not probed",
        "reached": "yes",
        "unused": f"{row.reached} of {row.adapters} ({row.reason})",
        "broken": f"BROKEN: {row.reached} of {row.adapters}",
    }[row.state]
    return (
        f"{PART_LABELS[row.part]:<15} {row.block:<9} {row.adapters:>8} of {row.layers:<6}  {row.parameters:>10,}  "
        f"{share:>5.2f} %  {gradient}"
    )


def _total(part: str, rows: list[BlockCoverage]) -> str:
    adapters, layers = sum(row.adapters for row in rows), sum(row.layers for row in rows)
    parameters = sum(row.parameters for row in rows)
    return f"{PART_LABELS[part]:<15} together  {adapters:>8} of {layers:<6}  {parameters:>10,}"
