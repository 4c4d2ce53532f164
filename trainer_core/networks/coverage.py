"""Coverage report: which layers have adapters, and which adapters a gradient reaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import AdapterError
from .coverage_probe import reached_weights
from .interface import Network
from .naming import foreign_part, text_layer_of_name
from .network import LoraNetwork
from .selection import all_places
from .targets import PART_LABELS, PART_ORDER, part_root

if TYPE_CHECKING:
    from ..models import SDXLModel

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


def coverage(model: SDXLModel, network: Network, *, probe: bool = True, live_text: bool = True) -> CoverageReport:
    """Compare `network` with what `model` has, and see with a small probe batch which adapters learn.

    Args:
        probe: compute; without it nothing is said about gradients.
        live_text: the text encoders run in every step; False where their outputs are cached before training.

    Raises:
        AdapterError: a part that is trained was not reached by any gradient.
    """
    report = measure_coverage(model, network, probe=probe, live_text=live_text)
    require_reached(report)
    return report


def require_reached(report: CoverageReport) -> None:
    """Refuse a network of which a whole part cannot learn.

    Raises:
        AdapterError: names the part.
    """
    for part in PART_ORDER:
        rows = [row for row in report.part(part) if row.adapters]
        if rows and all(row.reached == 0 for row in rows):
            raise AdapterError(
                f"{PART_LABELS[part]} is to be trained, but no gradient reaches any of its "
                f"{sum(row.adapters for row in rows)} adapters. Its output does not take part in the loss. For a text "
                "encoder: do not cache its outputs, and check that cross-attention is not detached."
            )


def measure_coverage(
    model: SDXLModel, network: Network, *, probe: bool = True, live_text: bool = True
) -> CoverageReport:
    """The report of `coverage`, also where a part is not reached."""
    adapters = _adapters(network)
    unreached: dict[str, str] | None = None
    if probe:
        reached = reached_weights(model, network, live_text=live_text)
        # Kinds with several factors (LoHa, LoKr) need more steps until each has had a gradient: one will do there.
        enough = all if isinstance(network, LoraNetwork) else any
        missed = [name for name, weights in adapters.items() if not enough(reached[key] for key in weights)]
        last = int(model.text_encoders[0].config.num_hidden_layers) - 1
        unreached = {name: NOT_USED if _is_unused(name, last) else NO_GRADIENT for name in missed}
    return CoverageReport(tuple(_blocks(model, adapters, unreached)), unreached or {})


def _is_unused(name: str, last_layer: int) -> bool:
    return foreign_part(name) == "te1" and text_layer_of_name(name) == last_layer


def _adapters(network: Network) -> dict[str, dict[str, int]]:
    """Adapters by the kohya name of their layer: trained weights with their sizes, by parameter name."""
    found: dict[str, dict[str, int]] = {}
    for part in network.parts:
        for key, parameter in network.parameters_of(part).items():
            name = key.split(".")[0].replace("oft_unet_", "lora_unet_", 1)
            found.setdefault(name, {})[key] = parameter.numel()
    return found


def _blocks(
    model: SDXLModel, adapters: Mapping[str, Mapping[str, int]], unreached: Mapping[str, str] | None
) -> list[BlockCoverage]:
    rows = []
    for part in PART_ORDER:
        places = all_places(part_root(model, part), part)
        labels = sorted({place.block for place in places}, key=lambda block: _order(part, block))
        for label in labels:
            inside = [place for place in places if place.block == label]
            names = [place.target.name for place in inside if place.target.name in adapters]
            missed = [] if unreached is None else [name for name in names if name in unreached]
            reasons = {unreached[name] for name in missed} if unreached else set()
            rows.append(
                BlockCoverage(
                    part=part,
                    block=label,
                    layers=len(inside),
                    adapters=len(names),
                    parameters=sum(sum(adapters[name].values()) for name in names),
                    base_parameters=sum(place.target.module.weight.numel() for place in inside),
                    reached=None if unreached is None else len(names) - len(missed),
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
