"""Nodes and a route for tests alone: what ComfyUI's own process holds, and values that other nodes would give."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from aiohttp import web
from server import PromptServer


@PromptServer.instance.routes.get("/probe")
async def probe(_: web.Request) -> web.Response:
    """Models ComfyUI has loaded, heavy modules of ours in its process, and its child processes."""
    import comfy.model_management as management
    import psutil

    ours = sorted(name for name in sys.modules if name.split(".")[0] in ("diffusers", "peft", "transformers.trainer"))
    children = [child.pid for child in psutil.Process().children(recursive=True)]
    return web.json_response(
        {"models": len(management.current_loaded_models), "modules": ours[:5], "children": children}
    )


@PromptServer.instance.routes.post("/probe/restart")
async def restart(_: web.Request) -> web.Response:
    """Put a new ComfyUI into the place of this process a moment after the answer, as ComfyUI-Manager's button does."""
    command = [sys.executable, *sys.argv]
    asyncio.get_running_loop().call_later(0.2, os.execv, sys.executable, command)
    return web.json_response({"restarting": command})


class Describe:
    """Shows what came in: type, shape, and the text itself."""

    CATEGORY, FUNCTION, OUTPUT_NODE, RETURN_TYPES = "probe", "execute", True, ()

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("*", {})}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: Any) -> bool:
        return True

    def execute(self, value: Any) -> dict[str, Any]:
        text = [type(value).__name__]
        if hasattr(value, "shape"):
            text += [str(list(value.shape)), f"{float(value.min()):.4f}", f"{float(value.max()):.4f}"]
        elif isinstance(value, dict):
            first = next(iter(value.values()))
            text += [str(len(value)), str(first.device), f"inference={first.is_inference()}"]
        else:
            text.append(str(value))
        return {"ui": {"text": text}}


class Pictures:
    """A list of pictures of two sizes and of captions, as a tagger gives them."""

    CATEGORY, FUNCTION, RETURN_TYPES = "probe", "execute", ("IMAGE", "STRING")
    OUTPUT_IS_LIST = (True, True)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"count": ("INT", {"default": 4}), "captions": ("INT", {"default": 4})}}

    def execute(self, count: int, captions: int) -> tuple[list[Any], list[str]]:
        import torch

        generator = torch.Generator().manual_seed(1)
        pictures = [torch.rand(1, 64, 64 if i % 2 else 80, 3, generator=generator) for i in range(count)]
        return pictures, [f"picture number {i}" for i in range(captions)]


class TinyVAE:
    """A VAE that ComfyUI manages: TAESD's architecture with random weights."""

    CATEGORY, FUNCTION, RETURN_TYPES = "probe", "execute", ("VAE",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}

    def execute(self) -> tuple[Any]:
        import comfy.sd
        import torch
        from comfy.taesd.taesd import TAESD

        generator = torch.Generator().manual_seed(0)
        names = TAESD(latent_channels=4).state_dict()  # ComfyUI's layers are not initialised by themselves
        state = {name: torch.randn(value.shape, generator=generator) * 0.05 for name, value in names.items()}
        return (comfy.sd.VAE(sd=state),)


class NoModel:
    """A MODEL and a CLIP that are nothing: enough for LoraLoader at strength 0, which passes them on."""

    CATEGORY, FUNCTION, RETURN_TYPES = "probe", "execute", ("MODEL", "CLIP")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}

    def execute(self) -> tuple[str, str]:
        return ("no model", "no clip")


NODE_CLASS_MAPPINGS = {
    "ProbeDescribe": Describe,
    "ProbePictures": Pictures,
    "ProbeTinyVAE": TinyVAE,
    "ProbeNoModel": NoModel,
}
