"""Load an SDXL model from a single `.safetensors` file or a diffusers folder, offline.

Order: headers, refusals and configs first, then modules on the meta device, a check of every name and shape, then
tensors straight from the memory map. Peak memory is the loaded weights plus the largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ModelFileError
from .configs import SHIPPED, ModelConfigs, find_configs
from .cpu_convolution import compute_convolutions_in_fp32, has_native
from .fingerprint import joined_fingerprint, part_fingerprint
from .sdxl import SDXLModel
from .sources import FOLDERS, Source, find_source, find_vae
from .tokenizers import load_tokenizers
from .weights import Reader, build_on_meta, check_shapes, fill

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

SD1_VAE_SCALE = 0.18215
# Tensors of single files that are no weights of the model: schedule tables, EMA copies, buffers, training leftovers.
_USUAL_BEGINNINGS = (
    *("model_ema.", "denoiser.", "alphas_", "betas", "sqrt_", "log_one_minus_", "posterior_", "logvar", "loss."),
    "first_stage_model.",
)
_USUAL_ENDINGS = ("position_ids", "logit_scale", "attn_mask", "text_projection.weight", "num_updates", "decay")
PREDICTION_TYPES = {"epsilon": "epsilon", "v": "v", "v_prediction": "v"}


def resolve_path(path: str | Path) -> Path:
    """A user's model path; the word `toy` means the small trained model in the package."""
    return SHIPPED["toy"] if str(path) == "toy" else Path(path).expanduser()


def load_sdxl(
    path: str | Path,
    *,
    vae: str | Path | None = None,
    config_dir: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    prediction_type: str = "auto",
    zero_terminal_snr: str | bool = "auto",
) -> SDXLModel:
    """Load a frozen SDXL model; the network is never used.

    `dtype` is for UNet and text encoders; the VAE is always fp32. `vae` replaces the model's own VAE (file or folder),
    `config_dir` its configs and tokenizers (a diffusers-like folder; weights in it are not looked at).
    `prediction_type` "auto" asks the model: scheduler config, marker keys `v_pred` / `ztsnr`, metadata, else epsilon.

    Raises ModelFileError naming what is wrong with the file before any weight is read.
    """
    source, vae_source, configs = plan(path, vae=vae, config_dir=config_dir)
    predicts = found_prediction_type(source, configs, prediction_type)
    ends_in_noise = found_zero_terminal_snr(source, configs, zero_terminal_snr)
    folder = Path(config_dir) if config_dir is not None else None
    sizes = (int(configs.parts["te1"]["vocab_size"]), int(configs.parts["te2"]["vocab_size"]))
    slots = {part: (vae_source if part == "vae" else source).parts[part] for part in FOLDERS}
    with Reader(dtype, torch.device(device)) as reader, Reader(torch.float32, torch.device(device)) as exact:
        reader.start_ahead(slot for part in ("unet", "te1", "te2") for slot in slots[part].values())
        modules = {part: build_on_meta(builder(part, configs.parts[part])) for part in FOLDERS}
        paths = {part: vae_source.path if part == "vae" else source.path for part in FOLDERS}
        names = {part: check_shapes(part, module, slots[part], paths[part]) for part, module in modules.items()}
        tokenizers = load_tokenizers(source.folder, folder, sizes)
        for part, module in modules.items():
            fill(module, names[part], slots[part], exact if part == "vae" else reader)
    if torch.device(device).type == "cpu" and not has_native(dtype):
        compute_convolutions_in_fp32(modules["unet"])
    fingerprints = {part: part_fingerprint(slots[part]) for part in FOLDERS}
    return SDXLModel(
        unet=modules["unet"],  # type: ignore[arg-type]
        text_encoders=(modules["te1"], modules["te2"]),  # type: ignore[arg-type]
        vae=modules["vae"],  # type: ignore[arg-type]
        tokenizers=tokenizers,
        prediction_type=predicts,
        zero_terminal_snr=ends_in_noise,
        native_size=native_size(configs),
        fingerprint=joined_fingerprint(fingerprints),
        source=source.path,
        vae_scale=float(configs.parts["vae"].get("scaling_factor", 0.13025)),
        vae_factor=vae_factor(configs),
        dtype=dtype,
        fingerprints=fingerprints,
        configs={**configs.parts, "scheduler": configs.scheduler},
        notes=(*configs.notes, *ignored_note(source)),
    )


def load_vae(path: str | Path, device: str | torch.device = "cpu") -> AutoencoderKL:
    """Load a VAE alone, always fp32 (for decoding or caching without the rest)."""
    source = find_vae(resolve_path(path))
    configs = find_configs(
        Source(source.path, source.kind, {part: {} for part in FOLDERS}), source, None, parts=("vae",)
    )
    module = build_on_meta(builder("vae", configs.parts["vae"]))
    names = check_shapes("vae", module, source.parts["vae"], source.path)
    with Reader(torch.float32, torch.device(device)) as reader:
        fill(module, names, source.parts["vae"], reader)
    return module  # type: ignore[return-value]


def plan(
    path: str | Path, *, vae: str | Path | None = None, config_dir: str | Path | None = None
) -> tuple[Source, Source, ModelConfigs]:
    """Headers only: where the model's and the VAE's weights are, and all configs. Raises ModelFileError."""
    source = find_source(resolve_path(path))
    vae_source = source if vae is None else find_vae(resolve_path(vae))
    if not vae_source.parts["vae"]:
        raise ModelFileError(
            f"'{source.path}' holds no VAE (pictures could not be encoded). Give one with model.vae: an SDXL VAE "
            "file or folder, for example the vae folder of the model that this checkpoint was made from.",
            source.path,
        )
    configs = find_configs(source, vae_source, Path(config_dir) if config_dir is not None else None)
    _check_vae(configs.parts["vae"], vae_source.path)
    return source, vae_source, configs


def _check_vae(config: Mapping[str, Any], path: Path) -> None:
    channels = config.get("latent_channels", 4)
    if channels != 4:
        raise ModelFileError(
            f"The VAE in '{path}' has {channels} latent channels (a Flux or SD3 VAE?); SDXL needs 4. Give an SDXL VAE.",
            path,
        )
    if config.get("scaling_factor") == SD1_VAE_SCALE:
        raise ModelFileError(
            f"The VAE in '{path}' is one of Stable Diffusion 1.x / 2.x (scaling factor {SD1_VAE_SCALE}; SDXL's is "
            "0.13025): SDXL cannot read its latents. Give an SDXL VAE.",
            path,
        )


def builder(part: str, config: Mapping[str, Any]) -> Callable[[], nn.Module]:
    """What makes one part of the model from its config (use `build_on_meta` to make it without memory)."""
    import diffusers
    import transformers

    if part in ("te1", "te2"):
        fields = {
            key: value
            for key, value in config.items()
            if key not in ("architectures", "model_type", "torch_dtype", "dtype")
        }
        kind = transformers.CLIPTextModel if part == "te1" else transformers.CLIPTextModelWithProjection
        return lambda: kind(transformers.CLIPTextConfig(**fields))
    model: Any = diffusers.UNet2DConditionModel if part == "unet" else diffusers.AutoencoderKL
    return lambda: model.from_config({key: value for key, value in config.items() if value is not None})


def native_size(configs: ModelConfigs) -> int:
    """Side of the pictures that the model was made for, in pixels."""
    return int(configs.parts["unet"]["sample_size"]) * vae_factor(configs)


def vae_factor(configs: ModelConfigs) -> int:
    """Pixels per latent side: every VAE level but one halves (SDXL: 8, also where the VAE is given separately)."""
    config = configs.parts.get("vae")
    return 8 if config is None else 2 ** (len(config["block_out_channels"]) - 1)


def found_prediction_type(source: Source, configs: ModelConfigs, wanted: str = "auto") -> str:
    """What the UNet predicts: `wanted` if it says, else the model's config, marker keys or metadata, else epsilon."""
    if wanted != "auto":
        if wanted not in PREDICTION_TYPES:
            raise ValueError(f"prediction_type must be 'auto', 'epsilon' or 'v', got {wanted!r}")
        return PREDICTION_TYPES[wanted]
    if "v_pred" in source.markers:
        return "v"
    said = source.metadata.get("modelspec.prediction_type") or configs.scheduler.get("prediction_type", "epsilon")
    if said not in PREDICTION_TYPES:
        raise ModelFileError(
            f"'{source.path}' predicts '{said}'; supported are epsilon and v. "
            "Set model.prediction_type if that is wrong.",
            source.path,
        )
    return PREDICTION_TYPES[said]


def found_zero_terminal_snr(source: Source, configs: ModelConfigs, wanted: str | bool = "auto") -> bool:
    """Whether the noise schedule ends in pure noise: `wanted` if it says, else marker key or scheduler config."""
    if wanted in ("auto", "true", "false"):
        return (
            "ztsnr" in source.markers or bool(configs.scheduler.get("rescale_betas_zero_snr", False))
            if wanted == "auto"
            else wanted == "true"
        )
    if not isinstance(wanted, bool):
        raise ValueError(f"zero_terminal_snr must be 'auto', True or False, got {wanted!r}")
    return wanted


def ignored_note(source: Source) -> tuple[str, ...]:
    """What of the file takes no part: EMA copies and schedule tables are usual, anything else is worth a word."""
    ema = sum(name.startswith("model_ema.") for name in source.ignored)
    odd = [
        name for name in source.ignored if not name.startswith(_USUAL_BEGINNINGS) and not name.endswith(_USUAL_ENDINGS)
    ]
    notes = [f"{ema} EMA tensors were left out; the plain weights are used."] if ema else []
    if odd:
        notes.append(f"{len(odd)} tensors have no place in SDXL and were left out ({', '.join(odd[:3])}).")
    return tuple(notes)
