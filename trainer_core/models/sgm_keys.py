"""Names of SDXL's parts in the two worlds: diffusers / transformers (in memory) and SGM (single files, LoRA names).

Every function maps a *module path* or a *parameter name* (a module path plus `.weight` / `.bias`) and returns `None`
for a name that has no counterpart. Layout facts: Stability-AI/generative-models (SDXL base config, openai UNet,
ldm autoencoder, open_clip text tower), diffusers `UNet2DConditionModel`, transformers `CLIPTextModel`.

Text encoders are written here without transformers' `text_model.` prefix ("bare" names: `encoder.layers.0...`,
`text_projection.weight`), because transformers >= 5.6 dropped it from `CLIPTextModel` and older versions have it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

UNET_PREFIX = "model.diffusion_model."
VAE_PREFIX = "first_stage_model."
TE1_PREFIX = "conditioner.embedders.0.transformer.text_model."
TE2_PREFIX = "conditioner.embedders.1.model."

_UNET_FIXED = {
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_VAE_FIXED = {
    "quant_conv": "quant_conv",
    "post_quant_conv": "post_quant_conv",
    **{f"{side}.{name}": f"{side}.{name}" for side in ("encoder", "decoder") for name in ("conv_in", "conv_out")},
    **{f"{side}.conv_norm_out": f"{side}.norm_out" for side in ("encoder", "decoder")},
    **{f"{side}.mid_block.resnets.{i}": f"{side}.mid.block_{i + 1}" for side in ("encoder", "decoder") for i in (0, 1)},
    **{f"{side}.mid_block.attentions.0": f"{side}.mid.attn_1" for side in ("encoder", "decoder")},
}
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_OPEN_CLIP_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
_OPEN_CLIP_FIXED = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
    "text_projection.weight": "text_projection",
}
QKV = ("q_proj", "k_proj", "v_proj")


def _inverted(table: Mapping[str, str]) -> dict[str, str]:
    return {value: key for key, value in table.items()}


_UNET_FIXED_BACK = _inverted(_UNET_FIXED)
_RESNET_BACK = _inverted(_RESNET)
_VAE_FIXED_BACK = _inverted(_VAE_FIXED)
_VAE_ATTENTION_BACK = _inverted(_VAE_ATTENTION)
_OPEN_CLIP_LAYER_BACK = _inverted(_OPEN_CLIP_LAYER)
_OPEN_CLIP_FIXED_BACK = _inverted(_OPEN_CLIP_FIXED)


def _split_at(name: str, table: Mapping[str, str]) -> tuple[str, str] | None:
    """The entry of `table` that `name` equals or lies under, and the rest of `name` (with its dot, or empty)."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        head = ".".join(parts[:length])
        if head in table:
            return table[head], name[len(head) :]
    return None


def _renamed_head(rest: str, table: Mapping[str, str]) -> str | None:
    """`rest` with its beginning renamed by `table`; a bare block path (empty `rest`) stays."""
    if not rest:
        return ""
    found = _split_at(rest[1:], table)
    return None if found is None else f".{found[0]}{found[1]}"


def unet_diffusers_to_sgm(name: str, layers_per_block: int = 2, levels: int = 3) -> str | None:
    """diffusers UNet name -> SGM name without `model.diffusion_model.` (SDXL layout: level 0 has no attention)."""
    fixed = _split_at(name, _UNET_FIXED)
    if fixed is not None:
        block, rest = fixed
        inner = _renamed_head(rest, _RESNET) if block in ("middle_block.0", "middle_block.2") else rest
        return None if inner is None else block + inner
    found = re.match(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)(\..+)?$", name)
    if found is None:
        return None
    side, kind, rest = found[1], found[3], found[5] or ""
    i, j = int(found[2]), int(found[4])
    if i >= levels:
        return None
    per_level = layers_per_block + 1
    if kind == "downsamplers" and side == "down" and rest.startswith(".conv"):
        return f"input_blocks.{per_level * (i + 1)}.0.op{rest[len('.conv') :]}"
    if kind == "upsamplers" and side == "up":
        return f"output_blocks.{per_level * i + layers_per_block}.2{rest}"
    block = f"input_blocks.{per_level * i + j + 1}" if side == "down" else f"output_blocks.{per_level * i + j}"
    if kind == "attentions":
        return f"{block}.1{rest}"
    inner = _renamed_head(rest, _RESNET) if kind == "resnets" else None
    return None if inner is None else f"{block}.0{inner}"


def unet_sgm_to_diffusers(name: str, layers_per_block: int = 2, levels: int = 3) -> str | None:
    """The inverse of `unet_diffusers_to_sgm`."""
    fixed = _split_at(name, _UNET_FIXED_BACK)
    if fixed is not None:
        block, rest = fixed
        inner = _renamed_head(rest, _RESNET_BACK) if block.startswith("mid_block.resnets") else rest
        return None if inner is None else block + inner
    found = re.match(r"(input|output)_blocks\.(\d+)\.(\d)(\..+)?$", name)
    if found is None:
        return None
    rest = found[4] or ""
    per_level = layers_per_block + 1
    position = int(found[2]) - 1 if found[1] == "input" else int(found[2])
    i, j = divmod(position, per_level)
    if position < 0 or i >= levels:
        return None
    side = "down" if found[1] == "input" else "up"
    if found[3] == "0" and side == "down" and j == layers_per_block:
        return f"down_blocks.{i}.downsamplers.0.conv{rest[len('.op') :]}" if rest.startswith(".op") else None
    if found[3] == "2":
        return f"up_blocks.{i}.upsamplers.0{rest}" if side == "up" and j == layers_per_block else None
    if found[3] == "1":
        return f"{side}_blocks.{i}.attentions.{j}{rest}"
    inner = _renamed_head(rest, _RESNET_BACK)
    return None if inner is None or found[3] != "0" else f"{side}_blocks.{i}.resnets.{j}{inner}"


def vae_diffusers_to_ldm(name: str, levels: int = 4) -> str | None:
    """diffusers `AutoencoderKL` name -> ldm name without `first_stage_model.` (attention weights are 1x1 there)."""
    fixed = _split_at(name, _VAE_FIXED)
    if fixed is not None:
        block, rest = fixed
        if block.endswith("attn_1"):
            inner = _renamed_head(rest, _VAE_ATTENTION)
        else:
            inner = rest.replace("conv_shortcut", "nin_shortcut")
        return None if inner is None else block + inner
    found = re.match(
        r"(encoder\.down|decoder\.up)_blocks\.(\d+)\.(?:resnets\.(\d+)|(?:down|up)samplers\.0)(\..+)?$", name
    )
    if found is None or int(found[2]) >= levels:
        return None
    down = found[1] == "encoder.down"
    level = int(found[2]) if down else levels - 1 - int(found[2])
    rest = (found[4] or "").replace("conv_shortcut", "nin_shortcut")
    if found[3] is not None:
        return f"{found[1]}.{level}.block.{found[3]}{rest}"
    return f"{found[1]}.{level}.{'downsample' if down else 'upsample'}{rest}"


def vae_ldm_to_diffusers(name: str, levels: int = 4) -> str | None:
    """The inverse of `vae_diffusers_to_ldm`."""
    fixed = _split_at(name, _VAE_FIXED_BACK)
    if fixed is not None:
        block, rest = fixed
        if block.endswith("attentions.0"):
            inner = _renamed_head(rest, _VAE_ATTENTION_BACK)
        else:
            inner = rest.replace("nin_shortcut", "conv_shortcut")
        return None if inner is None else block + inner
    found = re.match(r"(encoder\.down|decoder\.up)\.(\d+)\.(?:block\.(\d+)|(?:down|up)sample)(\..+)?$", name)
    if found is None or int(found[2]) >= levels:
        return None
    down = found[1] == "encoder.down"
    level = int(found[2]) if down else levels - 1 - int(found[2])
    rest = (found[4] or "").replace("nin_shortcut", "conv_shortcut")
    if found[3] is not None:
        return f"{found[1]}_blocks.{level}.resnets.{found[3]}{rest}"
    return f"{found[1]}_blocks.{level}.{'down' if down else 'up'}samplers.0{rest}"


def bare_text_name(name: str) -> str:
    """A transformers text-encoder name without the `text_model.` prefix that only some versions have."""
    return name.removeprefix("text_model.")


def te1_bare_to_sgm(name: str) -> str:
    """Text encoder 1 keeps its transformers names in a single file; only the prefix differs (see `TE1_PREFIX`)."""
    return bare_text_name(name)


def te2_bare_to_open_clip(name: str) -> tuple[str, int | None] | None:
    """Bare text-encoder-2 parameter -> (open_clip name, row block).

    The row block is 0, 1 or 2 for q, k and v, which open_clip stacks into one `attn.in_proj_weight` / `_bias`, else
    None. `text_projection` is stored transposed (features in x out).
    """
    if name in _OPEN_CLIP_FIXED:
        return _OPEN_CLIP_FIXED[name], None
    found = re.match(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)$", name)
    if found is None:
        return None
    block, inner, kind = f"transformer.resblocks.{found[1]}", found[2], found[3]
    if inner.startswith("self_attn.") and inner[len("self_attn.") :] in QKV:
        return f"{block}.attn.in_proj_{kind}", QKV.index(inner[len("self_attn.") :])
    mapped = _OPEN_CLIP_LAYER.get(inner)
    return None if mapped is None else (f"{block}.{mapped}.{kind}", None)


def te2_open_clip_to_bare(name: str) -> tuple[str, ...]:
    """open_clip name -> the bare parameter names it holds (three for a stacked `in_proj`, none if unknown)."""
    if name in _OPEN_CLIP_FIXED_BACK:
        return (_OPEN_CLIP_FIXED_BACK[name],)
    found = re.match(r"transformer\.resblocks\.(\d+)\.(.+?)[._](weight|bias)$", name)
    if found is None:
        return ()
    layer, inner, kind = f"encoder.layers.{found[1]}", found[2], found[3]
    if inner == "attn.in_proj":
        return tuple(f"{layer}.self_attn.{part}.{kind}" for part in QKV)
    mapped = _OPEN_CLIP_LAYER_BACK.get(inner)
    return () if mapped is None else (f"{layer}.{mapped}.{kind}",)
