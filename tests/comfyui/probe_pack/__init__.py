"""Nodes for tests alone: what ComfyUI's own process holds, and values that other nodes would give."""

from __future__ import annotations

import sys
from typing import Any


class Probe:
    """Shows (as text) the number of models ComfyUI has loaded and which of our heavy modules its process holds."""

    CATEGORY, FUNCTION, OUTPUT_NODE, RETURN_TYPES = "probe", "execute", True, ("STRING",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"mark": ("STRING", {"default": ""})}, "optional": {"after": ("*", {})}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: Any) -> bool:
        return True

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        return float("nan")

    def execute(self, mark: str, after: Any = None) -> dict[str, Any]:
        import comfy.model_management as management
        import psutil
        import torch

        ours = [name for name in sys.modules if name.startswith(("diffusers", "peft")) or name.endswith(".trainer")]
        text = [
            f"models={len(management.current_loaded_models)}",
            f"modules={','.join(sorted(ours)[:5])}",
            f"children={len(psutil.Process().children(recursive=True))}",
            f"inference={torch.is_inference_mode_enabled()}",
            f"after={type(after).__name__}",
        ]
        return {"ui": {"text": text}, "result": (";".join(text),)}


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
        shape = list(value.shape) if hasattr(value, "shape") else []
        extra = [f"min={float(value.min()):.4f}", f"max={float(value.max()):.4f}"] if shape else []
        if isinstance(value, dict):
            first = next(iter(value.values()))
            extra = [f"count={len(value)}", f"device={first.device}", f"inference={first.is_inference()}"]
        return {"ui": {"text": [type(value).__name__, str(shape), str(value)[:4000] if not shape else "", *extra]}}


class Pictures:
    """A list of pictures and of captions, as a tagger gives them."""

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


NODE_CLASS_MAPPINGS = {"Probe": Probe, "ProbeDescribe": Describe, "ProbePictures": Pictures}
