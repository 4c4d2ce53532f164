"""The micro toy: a random, frozen SDXL of the smallest widths, for tests that run by the hundred."""

from __future__ import annotations

from pathlib import Path


def make_micro(folder: str | Path, *, seed: int = 0, small: bool = False) -> Path:
    """Write the micro toy (UNet widths 32/32/64, random weights, the toy's tokenizers, fp32) and return `folder`.

    It knows nothing: use it where only the machinery matters. The same seed gives the same bytes.
    `small`: one layer a block instead of two or more; a step takes half the time.
    """
    import torch

    from .folder import MICRO, SMALL_MICRO, build_models, write_folder

    target = Path(folder)
    write_folder(
        target, build_models(SMALL_MICRO if small else MICRO, seed=seed), dtype=torch.float32, scaling_factor=0.18
    )
    return target
