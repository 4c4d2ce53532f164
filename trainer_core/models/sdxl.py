"""The loaded model: diffusers' UNet and VAE, two CLIP text encoders, two tokenizers, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTextModelWithProjection, PreTrainedTokenizerBase


@dataclass(eq=False, kw_only=True)
class SDXLModel:
    """A frozen SDXL base model in eval mode. `dtype` is the type of UNet and text encoders; the VAE is always fp32."""

    unet: UNet2DConditionModel
    text_encoders: tuple[CLIPTextModel, CLIPTextModelWithProjection]
    vae: AutoencoderKL
    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]
    prediction_type: str  # "epsilon" | "v"
    zero_terminal_snr: bool
    native_size: int  # pixels
    fingerprint: str
    source: Path
    vae_scale: float
    vae_factor: int
    dtype: torch.dtype
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # part -> identity (unet te1 te2 vae)
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # part and "scheduler" -> config
    notes: tuple[str, ...] = ()  # what a person should know about how the model was read

    @property
    def device(self) -> torch.device:
        return self.unet.conv_in.weight.device

    @property
    def parts(self) -> dict[str, nn.Module]:
        """The modules that an adapter may train, by part name."""
        return {"unet": self.unet, "te1": self.text_encoders[0], "te2": self.text_encoders[1]}

    def denoise(
        self,
        noisy_BCHW: torch.Tensor,
        timesteps_B: torch.Tensor,
        context_BTD: torch.Tensor,
        pooled_BD: torch.Tensor,
        time_ids_B6: torch.Tensor,
    ) -> torch.Tensor:
        """Run the UNet (SDXL, Podell et al. 2023, section 2.2 for the size conditioning).

        Inputs are cast to the UNet's type, except timesteps and time ids: these stay fp32 until they are embedded,
        because half precision cannot hold pixel sizes. Returns the prediction (`prediction_type`) in the UNet's type.
        """
        conditions = {"text_embeds": pooled_BD.to(self.dtype), "time_ids": time_ids_B6.float()}
        return self.unet(
            noisy_BCHW.to(self.dtype),
            timesteps_B,
            encoder_hidden_states=context_BTD.to(self.dtype),
            added_cond_kwargs=conditions,
            return_dict=False,
        )[0]

    def set_gradient_checkpointing(self, enabled: bool, parts: tuple[str, ...] = ("unet", "te1", "te2")) -> None:
        """Recompute activations in the backward pass instead of keeping them; never the re-entrant kind, which loses
        the graph when a block's inputs need no gradient (frozen base, adapters inside).

        The text encoders' blocks look at `training` as well, so their train mode follows this switch (CLIP has no
        dropout: its results do not change).
        """
        for part in parts:
            module = self.parts[part]
            _set_checkpointing(module, enabled)
            module.train(enabled)

    def to(self, device: torch.device | str) -> SDXLModel:
        """Move every part; types stay."""
        modules: list[nn.Module] = [*self.parts.values(), self.vae]
        for module in modules:
            module.to(device)
        return self


def _set_checkpointing(module: nn.Module, enabled: bool) -> None:
    found = False
    for child in module.modules():
        if hasattr(child, "gradient_checkpointing"):
            child.gradient_checkpointing = enabled  # type: ignore[assignment]
            child._gradient_checkpointing_func = _recompute  # type: ignore[assignment]
            found = True
    if not found:
        raise RuntimeError(f"{type(module).__name__} offers no gradient checkpointing in this library version")


def _recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, **kwargs)
