"""Run by ComfyUI's own Python: does its LoRA loader match every key of a file on the real SDXL, with the right shapes?

    python comfyui_judge.py COMFYUI_PATH FILE...

Prints one JSON line a file: {"file", "patches", "warnings", "wrong_shapes"}. Models are on the meta device, without
weights.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

SDXL = {
    "image_size": 32,
    "out_channels": 4,
    "use_spatial_transformer": True,
    "legacy": False,
    "num_classes": "sequential",
    "adm_in_channels": 2816,
    "in_channels": 4,
    "model_channels": 320,
    "num_res_blocks": [2, 2, 2],
    "transformer_depth": [0, 0, 2, 2, 10, 10],
    "channel_mult": [1, 2, 4],
    "transformer_depth_middle": 10,
    "use_linear_in_transformer": True,
    "context_dim": 2048,
    "num_head_channels": 64,
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "use_temporal_attention": False,
    "use_temporal_resblock": False,
}


class Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    import comfy.options

    comfy.options.enable_args_parsing(False)
    from comfy.cli_args import args

    args.cpu = True
    import comfy.lora
    import comfy.lora_convert
    import comfy.model_base
    import comfy.sdxl_clip
    import comfy.supported_models
    import safetensors.torch
    import torch

    config = comfy.supported_models.SDXL(dict(SDXL))
    config.set_inference_dtype(torch.float32, None)
    model = comfy.model_base.SDXL(config, device="meta")
    text = comfy.sdxl_clip.SDXLClipModel(device="meta", dtype=torch.float32)
    keys = comfy.lora.model_lora_keys_clip(text, comfy.lora.model_lora_keys_unet(model, {}))
    shapes = {
        **{k: v.shape for k, v in text.state_dict().items()},
        **{k: v.shape for k, v in model.state_dict().items()},
    }
    for path in sys.argv[2:]:
        collector = Collector()
        logging.getLogger().addHandler(collector)
        patches = comfy.lora.load_lora(comfy.lora_convert.convert_lora(safetensors.torch.load_file(path)), dict(keys))
        logging.getLogger().removeHandler(collector)
        wrong = [str(key) for key, patch in patches.items() if not fits(shapes, key, patch)]
        print(json.dumps({"file": path, "patches": len(patches), "warnings": collector.lines, "wrong_shapes": wrong}))


def fits(shapes: dict[str, Any], key: Any, patch: Any) -> bool:
    """Whether up (out, rank) and down (rank, in, ...) of a LoRA patch make the weight they are for."""
    weights = getattr(patch, "weights", None)
    name = key[0] if isinstance(key, tuple) else key
    if weights is None or name not in shapes:
        return False
    up, down = weights[0], weights[1]
    return up.shape[0] == shapes[name][0] and up.shape[0] * down.flatten(1).shape[1] == shapes[name].numel()


if __name__ == "__main__":
    main()
