"""Which model family a file of tensors belongs to, from names and shapes alone.

Only SDXL base checkpoints can be trained; every other family is refused by name, so that nobody waits for a load that
cannot work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .sgm_keys import TE1_PREFIX, TE2_PREFIX, UNET_PREFIX
from .tensor_file import Entry

LORA_MARKS = ("lora_down", "lora_up", "lora_A", "lora_B", "hada_w1", "lokr_w", "oft_blocks", "dora_scale")
NEED = "Training needs an SDXL base checkpoint (.safetensors) or its diffusers folder."


@dataclass(frozen=True)
class Family:
    """`name` is a short id (`sdxl` is the only one that can be trained); `what` ends the sentence 'This is ...'."""

    name: str
    what: str
    advice: str = NEED


SDXL = Family("sdxl", "an SDXL checkpoint", "")


def recognise(entries: Mapping[str, Entry]) -> Family:
    """The family of a single file; `Family('unknown', ...)` when nothing fits."""
    if not entries:
        return Family("empty", "a safetensors file without any tensor")
    for test in (_adapter, _transformer, _unet_checkpoint, _part_only):
        family = test(entries)
        if family is not None:
            return family
    names = ", ".join(sorted(entries)[:4])
    return Family("unknown", f"no model known here (its first tensors: {names})")


def _any(entries: Iterable[str], *beginnings: str) -> bool:
    return any(name.startswith(beginnings) for name in entries)


def _adapter(entries: Mapping[str, Entry]) -> Family | None:
    if any(mark in name for name in entries for mark in LORA_MARKS):
        return Family(
            "lora", "a LoRA (an adapter), not a base model", f"{NEED} A LoRA to start from goes into lora.weights."
        )
    if (
        _any(entries, "control_model.", "controlnet_", "input_hint_block.")
        or "controlnet_cond_embedding.conv_in.weight" in entries
    ):
        return Family("controlnet", "a ControlNet, not a base model")
    if _any(entries, "image_proj.", "ip_adapter."):
        return Family("ip_adapter", "an IP-Adapter, not a base model")
    if "emb_params" in entries or set(entries) <= {"clip_l", "clip_g"}:
        return Family("embedding", "a textual inversion embedding, not a base model")
    return None


def _transformer(entries: Mapping[str, Entry]) -> Family | None:
    """Families whose denoiser is a transformer; their names may or may not carry the single-file prefix."""
    for prefix in ("", UNET_PREFIX):
        if _any(entries, f"{prefix}double_blocks.", f"{prefix}single_blocks.") or _any(
            entries, f"{prefix}single_transformer_blocks."
        ):
            return Family("flux", "a Flux model (or one of its kin), not SDXL")
        if _any(entries, f"{prefix}joint_blocks.") or f"{prefix}pos_embed.proj.weight" in entries:
            return Family("sd3", "a Stable Diffusion 3 model, not SDXL")
        if _any(
            entries,
            f"{prefix}down_blocks.0.channelwise",
            f"{prefix}down_blocks.0.0.channelwise",
            f"{prefix}clip_txt_mapper.",
        ):
            return Family("cascade", "a Stable Cascade model, not SDXL")
        if _any(
            entries,
            f"{prefix}blocks.0.",
            f"{prefix}layers.0.",
            f"{prefix}transformer_blocks.0.",
            f"{prefix}joint_transformer_blocks.",
        ):
            return Family("transformer", "a diffusion transformer of another family, not SDXL")
    return None


def _unet_checkpoint(entries: Mapping[str, Entry]) -> Family | None:
    first = entries.get(f"{UNET_PREFIX}input_blocks.0.0.weight")
    if first is None or len(first.shape) != 4:
        return None
    family = _by_text_encoders(entries)
    if family.name not in ("sdxl", "sdxl_unet_only"):
        return family
    channels = first.shape[1]
    if channels == 9:
        return Family(
            "sdxl_inpainting",
            "an SDXL inpainting checkpoint (9 input channels)",
            f"{NEED} Inpainting checkpoints take other inputs.",
        )
    if channels != 4:
        return Family("sdxl_edit", f"an SDXL variant with {channels} input channels (an editing or inpainting model)")
    if "edm_mean" in entries or "edm_vpred.sigma_max" in entries:
        kind = "Playground v2.5" if "edm_mean" in entries else "CosXL"
        return Family(
            "sdxl_edm",
            f"an SDXL variant with an EDM noise schedule ({kind})",
            f"{NEED} EDM schedules are not supported.",
        )
    return family


def _by_text_encoders(entries: Mapping[str, Entry]) -> Family:
    inputs = entries[f"{UNET_PREFIX}input_blocks.0.0.weight"].shape[1]
    width = _context_width(entries)
    inpainting = " inpainting" if inputs == 9 else ""
    if _any(entries, TE1_PREFIX, "conditioner.embedders.0.transformer.") and _any(entries, TE2_PREFIX):
        return SDXL
    if _any(entries, "conditioner.embedders.0.model."):
        return Family("sdxl_refiner", "the SDXL refiner, not the SDXL base model")
    if _any(entries, "cond_stage_model.transformer.", "cond_stage_model.embeddings."):
        return Family("sd1", f"a Stable Diffusion 1.x{inpainting} checkpoint, not SDXL")
    if _any(entries, "cond_stage_model.model."):
        return Family("sd2", f"a Stable Diffusion 2.x{inpainting} checkpoint, not SDXL")
    by_width = {768: "Stable Diffusion 1.x", 1024: "Stable Diffusion 2.x", 1280: "SDXL refiner"}
    if width in by_width:
        return Family("unet_only", f"only the UNet of a {by_width[width]} model, not SDXL")
    return Family(
        "sdxl_unet_only",
        "only the UNet of an SDXL model: one or both text encoders are missing",
        "Give the full checkpoint (about 6.9 GB in fp16) or a diffusers folder.",
    )


def _context_width(entries: Mapping[str, Entry]) -> int | None:
    for name, entry in entries.items():
        if name.startswith(UNET_PREFIX) and name.endswith("attn2.to_k.weight"):
            return entry.shape[1]
    return None


def _part_only(entries: Mapping[str, Entry]) -> Family | None:
    whole = "Give the whole checkpoint, or the folder that holds unet/, vae/, text_encoder/ and text_encoder_2/."
    if is_vae(entries) or all(name.startswith("first_stage_model.") for name in entries):
        return Family("vae", "a VAE only, not a whole checkpoint", f"{NEED} A VAE goes into model.vae.")
    if "conv_in.weight" in entries and _any(entries, "down_blocks."):
        return Family("diffusers_unet", "one part (the UNet) of a diffusers folder", whole)
    if _any(entries, "text_model.", "encoder.layers.", "transformer.resblocks."):
        return Family("text_encoder", "one part (a text encoder) of a model", whole)
    if _any(entries, "encoder.block.", "shared."):
        return Family("t5", "a T5 text encoder, no part of SDXL")
    if _any(entries, "model_ema."):
        return Family("ema_only", "a file of EMA weights only", whole)
    return None


def is_vae(entries: Mapping[str, Entry]) -> bool:
    """Whether the file holds a KL autoencoder (ldm or diffusers names) and no denoiser."""
    if _any(entries, UNET_PREFIX, "conv_in."):
        return False
    bare = {name.removeprefix("first_stage_model.") for name in entries}
    return "decoder.conv_in.weight" in bare and _any(bare, "decoder.up.", "decoder.up_blocks.")
