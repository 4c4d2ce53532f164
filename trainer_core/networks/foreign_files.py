"""Plain words for safetensors files that are no LoRA for SDXL, from their key names alone."""

from __future__ import annotations

from collections.abc import Iterable

# First match wins; each entry is (all of these key parts occur, what the file is).
_KINDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("lora_unet_double_blocks",), "a LoRA for Flux"),
    (("lora_unet_single_blocks",), "a LoRA for Flux"),
    (("lora_transformer_",), "a LoRA for a transformer model (SD3 or Flux), not for SDXL"),
    (("transformer.single_transformer_blocks",), "a LoRA for Flux"),
    (("transformer.transformer_blocks", "lora_"), "a LoRA for a transformer model (SD3 or Flux), not for SDXL"),
    (("lora_te_text_model",), "a LoRA for SD 1.x or 2.x (one text encoder)"),
    (("lora_unet_down_blocks_0_attentions",), "a LoRA for SD 1.x or 2.x"),
    (("lora_unet_input_blocks_1_1_",), "a LoRA for SD 1.x or 2.x"),
    ((".lora_mid.weight",), "a LoCon file with Tucker decomposition (LyCORIS)"),
    (("hada_w1_a",), "a LoHa (LyCORIS) file"),
    (("lokr_w1",), "a LoKr (LyCORIS) file"),
    (("oft_blocks",), "an OFT or BOFT (LyCORIS) file"),
    (("on_input",), "an (IA)^3 (LyCORIS) file"),
    ((".b1.weight", ".a1.weight"), "a GLoRA (LyCORIS) file"),
    ((".dora_scale",), "a DoRA file"),
    ((".diff\n",), "a LyCORIS file with full weight differences"),
    (("model.diffusion_model.", "conditioner.embedders."), "a full SDXL checkpoint"),
    (("model.diffusion_model.double_blocks",), "a full Flux checkpoint"),
    (("model.diffusion_model.joint_blocks",), "a full SD3 checkpoint"),
    (("model.diffusion_model.",), "a full checkpoint (SD 1.x or 2.x, or a UNet alone)"),
    (("double_blocks.",), "a Flux model"),
    (("control_model.",), "a ControlNet"),
    (("controlnet_cond_embedding.",), "a ControlNet"),
    (("first_stage_model.",), "a VAE"),
    (("decoder.up", "encoder.down"), "a VAE"),
    (("emb_params",), "a textual inversion embedding"),
    (("clip_g", "clip_l"), "a textual inversion embedding"),
    (("down_blocks.", "conv_in."), "a UNet without adapters"),
    (("text_model.encoder.layers.",), "a text encoder"),
)


def seems_to_be(keys: Iterable[str]) -> str | None:
    """What a file with these tensor names seems to be, None when nothing fits."""
    joined = "".join(f"{key}\n" for key in keys)
    return next((kind for parts, kind in _KINDS if all(part in joined for part in parts)), None)


def describe_keys(keys: Iterable[str]) -> str:
    """How many tensors there are and the names of the first three, for messages."""
    names = sorted(keys)
    if not names:
        return "no tensors at all"
    return f"{len(names)} tensors, such as {', '.join(repr(name) for name in names[:3])}"
