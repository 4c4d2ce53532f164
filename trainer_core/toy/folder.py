"""Builds the toy's models from their widths and writes them as a diffusers SDXL folder.

Block types, names and the conditioning path are SDXL's; widths, depths and the vocabulary are the toy's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from ..draws import Draws
from . import words


@dataclass(frozen=True, kw_only=True)
class ToyShape:
    """Widths and depths of a toy SDXL. `unet_heads` counts heads per level, as diffusers' `attention_head_dim` does;
    `unet_layers`: layers of a down block (2 in SDXL).
    """

    unet_widths: tuple[int, int, int] = (48, 64, 96)
    unet_depths: tuple[int, int, int] = (1, 1, 2)
    unet_heads: tuple[int, int, int] = (2, 2, 3)
    unet_groups: int = 16
    unet_layers: int = 2
    size_embed_width: int = 256
    vae_widths: tuple[int, int, int, int] = (16, 32, 64, 64)
    vae_groups: int = 8
    text_widths: tuple[int, int] = (32, 64)
    text_layers: int = 3
    latent_side: int = 8


TOY = ToyShape()
MICRO = ToyShape(
    unet_widths=(32, 32, 64), unet_depths=(1, 1, 2), unet_heads=(1, 1, 2), unet_groups=8, vae_widths=(8, 16, 16, 16)
)
SMALL_MICRO = replace(MICRO, unet_depths=(1, 1, 1), unet_layers=1)
"""For drills: every block of SDXL, each with as few layers as there can be (7 transformers, 56 attention layers)."""


@dataclass(frozen=True, kw_only=True)
class ToyModels:
    """The four networks of a toy SDXL."""

    unet: UNet2DConditionModel
    text_encoder: CLIPTextModel
    text_encoder_2: CLIPTextModelWithProjection
    vae: AutoencoderKL


def build_models(shape: ToyShape, *, seed: int) -> ToyModels:
    """The four networks in fp32 on the CPU, every weight a keyed draw of `seed`."""
    models = ToyModels(
        unet=_unet(shape),
        text_encoder=CLIPTextModel(_text_config(shape, 0)),
        text_encoder_2=CLIPTextModelWithProjection(_text_config(shape, 1)),
        vae=_vae(shape),
    )
    for name in ("unet", "text_encoder", "text_encoder_2", "vae"):
        initialise(getattr(models, name), seed=seed, name=name)
        getattr(models, name).eval()
    return models


def initialise(module: torch.nn.Module, *, seed: int, name: str) -> None:
    """Fill all weights in place from draws keyed by (seed, name, parameter name), not from global random state.

    Matrices and kernels get U(-1/sqrt(fan_in), 1/sqrt(fan_in)) (PyTorch's default), embeddings N(0, 0.2^2),
    norm weights 1, biases 0.
    """
    draws = Draws(seed)
    embeddings = {f"{path}.weight" for path, sub in module.named_modules() if isinstance(sub, torch.nn.Embedding)}
    with torch.no_grad():
        for path, parameter in module.named_parameters():
            if path.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim < 2:
                parameter.fill_(1.0)
            elif path in embeddings:
                parameter.copy_(0.2 * draws.normal(0, f"{name}.{path}", "toy weights", parameter.shape))
            else:
                bound = 1 / math.sqrt(parameter[0].numel())
                uniform = draws.uniform(0, f"{name}.{path}", "toy weights", parameter.shape)
                parameter.copy_((2 * uniform - 1) * bound)


def _unet(shape: ToyShape) -> UNet2DConditionModel:
    # A dict, because diffusers annotates these tuples as one-element tuples.
    settings: dict[str, Any] = {
        "sample_size": shape.latent_side,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": shape.unet_widths,
        "layers_per_block": shape.unet_layers,
        "transformer_layers_per_block": shape.unet_depths,
        "attention_head_dim": shape.unet_heads,
        "norm_num_groups": shape.unet_groups,
        "cross_attention_dim": sum(shape.text_widths),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": shape.size_embed_width,
        "projection_class_embeddings_input_dim": shape.text_widths[1] + 6 * shape.size_embed_width,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
    }
    return UNet2DConditionModel(**settings)


def _vae(shape: ToyShape) -> AutoencoderKL:
    # A dict, because diffusers annotates these tuples as one-element tuples.
    settings: dict[str, Any] = {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": shape.vae_widths,
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": shape.vae_groups,
        "sample_size": shape.latent_side * 8,
        "force_upcast": True,
    }
    return AutoencoderKL(**settings)


def _text_config(shape: ToyShape, index: int) -> CLIPTextConfig:
    """Config of text encoder 1 (`index` 0) or 2 (1).

    `eos_token_id` is 2 as in SDXL's own configs: transformers then pools at the highest id of the row, which is
    end-of-text here too.
    """
    width = shape.text_widths[index]
    vocabulary = words.build_vocabulary()
    return CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=shape.text_layers,
        num_attention_heads=width // 16,
        max_position_embeddings=77,
        hidden_act=("quick_gelu", "gelu")[index],
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )


def write_folder(folder: Path, models: ToyModels, *, dtype: torch.dtype, scaling_factor: float) -> None:
    """Write a diffusers SDXL folder with tokenizers; weights in `dtype` (safetensors).

    `scaling_factor` goes into the VAE's config. Raises ValueError where a weight is not finite in `dtype`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    models.vae.register_to_config(scaling_factor=scaling_factor)
    for name, module in (("unet", models.unet), ("vae", models.vae)):
        weights = folder / name / "diffusion_pytorch_model.safetensors"
        save_weights(weights, module.state_dict(), dtype=dtype)
        config = json.loads(module.to_json_string())
        _write_json(folder / name / "config.json", {k: v for k, v in config.items() if k != "_name_or_path"})
    for name, module in (("text_encoder", models.text_encoder), ("text_encoder_2", models.text_encoder_2)):
        # transformers >= 5.6 dropped "text_model." from CLIPTextModel's own names; 4.x needs it and 5.x reads both.
        state = {_with_text_model(key): value for key, value in module.state_dict().items()}
        save_weights(folder / name / "model.safetensors", state, dtype=dtype)
        config = module.config.to_dict()
        config.update(architectures=[type(module).__name__], torch_dtype=str(dtype).removeprefix("torch."))
        for key in ("_name_or_path", "transformers_version", "dtype"):
            config.pop(key, None)
        _write_json(folder / name / "config.json", config)
    words.write_tokenizer(folder / "tokenizer", pad_token=words.END)
    words.write_tokenizer(folder / "tokenizer_2", pad_token="!")
    _write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    _write_json(folder / "model_index.json", MODEL_INDEX)


def _with_text_model(key: str) -> str:
    return key if key.startswith(("text_model.", "text_projection.")) else f"text_model.{key}"


def save_weights(path: Path, state: Mapping[str, torch.Tensor], *, dtype: torch.dtype) -> None:
    """Write `state` in `dtype`; integer tensors (position ids) are left out. Raises ValueError on inf or NaN."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.detach().to(dtype).contiguous() for key, value in state.items() if value.is_floating_point()}
    bad = [key for key, value in tensors.items() if not torch.isfinite(value).all()]
    if bad:
        raise ValueError(f"{path}: not finite in {dtype}: {', '.join(bad[:5])} ({len(bad)} tensors)")
    save_file(tensors, path, metadata={"format": "pt"})


def load_models(folder: Path, *, dtype: torch.dtype = torch.float32) -> ToyModels:
    """Read a folder of `write_folder` back, offline, with diffusers' and transformers' own loaders."""
    text_encoder = CLIPTextModel.from_pretrained(folder / "text_encoder", local_files_only=True, dtype=dtype)
    text_encoder_2 = CLIPTextModelWithProjection.from_pretrained(
        folder / "text_encoder_2", local_files_only=True, dtype=dtype
    )
    unet = UNet2DConditionModel.from_pretrained(folder / "unet", local_files_only=True, torch_dtype=dtype)
    vae = AutoencoderKL.from_pretrained(folder / "vae", local_files_only=True, torch_dtype=dtype)
    models = ToyModels(unet=unet, text_encoder=text_encoder, text_encoder_2=text_encoder_2, vae=vae)
    for module in (models.unet, models.text_encoder, models.text_encoder_2, models.vae):
        module.eval()
    return models


SCHEDULER: dict[str, object] = {
    "_class_name": "EulerDiscreteScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "timestep_spacing": "leading",
    "steps_offset": 1,
    "interpolation_type": "linear",
    "use_karras_sigmas": False,
}
MODEL_INDEX: dict[str, object] = {
    "_class_name": "StableDiffusionXLPipeline",
    "_diffusers_version": "0.32.1",
    "force_zeros_for_empty_prompt": False,
    "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def _write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    path.write_bytes(text.encode("utf-8"))  # bytes: the same file on every system
