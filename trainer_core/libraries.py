"""The heavy libraries, imported in one go by a process that is about to train."""

from __future__ import annotations

import gc
import os
import sys

from .collector import collector_paused


def import_libraries() -> None:
    """Import torch, diffusers and transformers as far as training needs them; nothing where they are there already.

    Called where a process of our own begins to train: start and end of such a process, without the training, took
    15.2 s of processor time before and 7.3 s with this (torch 2.13, bitsandbytes installed).
    """
    if "diffusers" in sys.modules:
        return
    # Only hardware.compile compiles anything (and takes this back), but bitsandbytes decorates its CPU functions with
    # torch.compile when it is imported (diffusers imports it wherever it is installed), and that imports the whole of
    # torch._inductor.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Thousands of modules are made and none is thrown away: the collector would walk through them again and again,
    # here, during training, and when Python ends.
    with collector_paused():
        from diffusers import AutoencoderKL, UNet2DConditionModel  # noqa: F401
        from transformers import CLIPTextModel, CLIPTextModelWithProjection, PreTrainedTokenizerFast  # noqa: F401

        from . import build  # noqa: F401
    gc.freeze()
