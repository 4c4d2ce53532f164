"""Looking at a run from outside: stable validation loss and preview pictures. Neither changes what is trained.

`prompts` needs no torch, so settings can be checked without it; the other names are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .prompts import PreviewPrompt, SizeRule, parse_prompt_line, prompt_problems, read_prompts

if TYPE_CHECKING:
    from .holdout import Holdout, choose_holdout, hold_out
    from .isolation import undisturbed
    from .previews import PreviewResult, make_previews
    from .samplers import SAMPLERS, Conditioning, encode_prompts, sample_latents
    from .stable_loss import StableValidation, ValidationResult

_LAZY = {
    "Conditioning": "samplers",
    "Holdout": "holdout",
    "choose_holdout": "holdout",
    "hold_out": "holdout",
    "PreviewResult": "previews",
    "SAMPLERS": "samplers",
    "StableValidation": "stable_loss",
    "ValidationResult": "stable_loss",
    "encode_prompts": "samplers",
    "make_previews": "previews",
    "sample_latents": "samplers",
    "undisturbed": "isolation",
}

__all__ = [
    "SAMPLERS",
    "Conditioning",
    "Holdout",
    "PreviewPrompt",
    "PreviewResult",
    "SizeRule",
    "StableValidation",
    "ValidationResult",
    "choose_holdout",
    "encode_prompts",
    "hold_out",
    "make_previews",
    "parse_prompt_line",
    "prompt_problems",
    "read_prompts",
    "sample_latents",
    "undisturbed",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
