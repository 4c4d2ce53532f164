"""Config section of freezing: which adapters stop learning, and when."""

from __future__ import annotations

from dataclasses import dataclass

from .config_option import option

RULES = ("off", "contribution", "gamma")


@dataclass(frozen=True, kw_only=True)
class FreezingConfig:
    stop_after: tuple[str, ...] = option(
        (),
        "what stops learning, and when, as TARGET:STEP or TARGET:SHARE; targets are parts (unet, te1, te2), blocks "
        "(down1, mid, up0) and groups (down1.cross): te1:0.3",
        advanced=True,
    )
    rule: str = option(
        "off",
        "freeze adapters that have stopped contributing (contribution), or by a falling limit on the gradient norm "
        "(gamma, for comparison only)",
        choices=RULES,
        advanced=True,
    )
    window: int = option(100, "contribution: steps of a window", min=20, advanced=True)
    windows: int = option(3, "contribution: windows in a row below the limit", min=1, advanced=True)
    share: float = option(
        0.1,
        "contribution: limit, as a share of what an adapter contributes on average",
        min=0.0,
        max=1.0,
        advanced=True,
    )
    growth: float = option(
        0.01, "contribution: and the adapter grows less than this in a window", min=0.0, advanced=True
    )
    thaw: float = option(
        1.02,
        "train everything again when the validation loss is this many times its best since",
        min=1.0,
        advanced=True,
    )


def parse_stop(text: str) -> tuple[str, float]:
    """(target, step or share) of a `stop_after` entry.

    Raises:
        ValueError: it is no TARGET:STEP.
    """
    target, mark, when = text.rpartition(":")
    step = float(when)
    if not mark or not target.strip() or not step > 0 or (step >= 1 and not step.is_integer()):
        raise ValueError(text)
    return target.strip(), step
