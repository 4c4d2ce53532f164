"""Config section of the device: what is chosen for its memory, and how its own faults are noticed."""

from __future__ import annotations

from dataclasses import dataclass

from .config_option import option

PROFILES = ("off", "auto", "8gb", "12gb", "24gb", "40gb+", "cpu")


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """`profile` fills in settings that still have their default value when a run is made, and says why."""

    profile: str = option(
        "off",
        "choose recomputation, micro-batch and number format for a card of this memory; auto = for the device that is "
        "here; off = as the settings say",
        choices=PROFILES,
    )
    counters: bool = option(
        True, "look at the GPU's error counters every ten seconds and stop when its memory fails", advanced=True
    )
    recheck_spikes: bool = option(
        True,
        "compute a step again before it is applied when its gradient norm is far above the usual: a fault of the "
        "device does not come twice",
        advanced=True,
    )
    compile: str = option(
        "off",
        "run the UNet's blocks through torch.compile with this back end; steps in which something was compiled are "
        "compared with uncompiled ones, and where they differ it goes off; every picture size takes minutes to compile",
        choices=("off", "inductor", "aot_eager", "eager"),
        advanced=True,
    )
    sentinel_every: int = option(
        0,
        "steps between checks that the device computes the same batch twice to the same bits; 0 = never (500 costs "
        "0.4 %)",
        min=0,
        advanced=True,
    )
