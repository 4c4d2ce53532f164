"""Loading SDXL and running its parts. The facade of this folder: other folders import from here.

diffusers and transformers are imported when a model is built, not when this module is imported.
"""

from __future__ import annotations

from .conditioning import time_ids
from .inspection import ModelInfo, check_vae, inspect_model
from .latents import LatentStats, decode_latents, encode_images
from .loading import load_sdxl, load_vae, resolve_path
from .sdxl import SDXLModel
from .sgm_keys import unet_diffusers_to_sgm, unet_sgm_to_diffusers
from .single_file import save_single_file
from .text import TOKEN_LENGTHS, TextEmbeds, encode_captions, token_chunks
from .tokenizers import count_tokens

__all__ = [
    "TOKEN_LENGTHS",
    "LatentStats",
    "ModelInfo",
    "SDXLModel",
    "TextEmbeds",
    "check_vae",
    "count_tokens",
    "decode_latents",
    "encode_captions",
    "encode_images",
    "inspect_model",
    "load_sdxl",
    "load_vae",
    "resolve_path",
    "save_single_file",
    "time_ids",
    "token_chunks",
    "unet_diffusers_to_sgm",
    "unet_sgm_to_diffusers",
]
