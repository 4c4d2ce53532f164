"""Run by ComfyUI's own Python: does its LoRA loader read a file, and what does it make of the weights?

    python comfyui_judge.py COMFYUI_PATH JOBS.json

JOBS.json is {"probe": FILE, "files": [{"file": FILE, "outputs": FILE or null}, ...]}. One JSON line is printed a file:
{"file", "patches" (of weights), "warnings" (also errors while it computes), "wrong_shapes"}. Models are on the meta
device, without weights. With "outputs", ComfyUI computes the patched weights of the probe's layers (weights, biases and
inputs by the layers' names in files), and the layers' outputs are written there.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
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
    jobs = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    probe = safetensors.torch.load_file(jobs["probe"])
    for job in jobs["files"]:
        collector = Collector()
        logging.getLogger().addHandler(collector)
        state = comfy.lora_convert.convert_lora(safetensors.torch.load_file(job["file"]))
        patches = comfy.lora.load_lora(state, dict(keys))
        if job["outputs"]:
            safetensors.torch.save_file(outputs(probe, keys, patches), job["outputs"])
        logging.getLogger().removeHandler(collector)
        weights = [key for key in patches if not str(key).endswith(".bias")]
        wrong = [str(key) for key in weights if not fits(shapes, key, patches[key])]
        found = {"file": job["file"], "patches": len(weights), "warnings": collector.lines, "wrong_shapes": wrong}
        print(json.dumps(found), flush=True)


def outputs(probe: dict[str, Any], keys: dict[str, Any], patches: dict[Any, Any]) -> dict[str, Any]:
    """The probe's layers with the weights that ComfyUI computes, run on the probe's inputs."""
    import comfy.lora
    import torch

    found: dict[str, Any] = {}
    for name in sorted({key.partition(".")[0] for key in probe}):
        key, x = keys[name], probe[f"{name}.x"]
        values = {"weight": probe[f"{name}.weight"].clone(), "bias": probe.get(f"{name}.bias")}
        for kind, place in (("weight", key), ("bias", f"{str(key)[: -len('.weight')]}.bias")):
            if place in patches and values[kind] is not None:
                entry = [(1.0, patches[place], 1.0, None, None)]
                values[kind] = comfy.lora.calculate_weight(entry, values[kind].clone(), str(place))
        weight, bias = values["weight"], values["bias"]
        if weight.dim() == 4:
            found[name] = torch.nn.functional.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)
        else:
            found[name] = torch.nn.functional.linear(x, weight, bias)
    return found


def fits(shapes: dict[str, Any], key: Any, patch: Any) -> bool:
    """Whether a patch is for a weight of the model, and up (out, rank) and down (rank, in, ...) of a LoRA make it."""
    name = key[0] if isinstance(key, tuple) else key
    if name not in shapes:
        return False
    if isinstance(patch, tuple):
        return patch[1][0].shape == shapes[name]
    if patch.name != "lora":
        return True  # seen when it computes
    up, down = patch.weights[0], patch.weights[1]
    return up.shape[0] == shapes[name][0] and up.shape[0] * down.flatten(1).shape[1] == shapes[name].numel()


if __name__ == "__main__":
    main()
