"""Run by sd-scripts' own Python: do its network modules take our files, and do they compute the same?

    python sd_scripts_judge.py SD_SCRIPTS_PATH JOBS.json RESULT_FOLDER

JOBS.json is a list of jobs; one JSON line is printed for each.
  {"job": "load", "module": "networks.lora", "file": F}      create_network_from_weights + load_weights on the real SDXL
                                                              (meta device): {"modules", "missing", "unexpected"}
  {"job": "layer", "file": F, "result": NAME, ...}            one LoRAModule: output and gradients for the weights in F
  {"job": "first", "shape": [...], "result": NAME}            the first weights that LoRAModule draws
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any


def stand_in_for_torchvision() -> None:
    """sd-scripts imports torchvision for its pictures; networks do not use it, and it may be missing."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        module = types.ModuleType("torchvision")
        module.transforms = types.ModuleType("torchvision.transforms")  # type: ignore[attr-defined]
        sys.modules["torchvision"], sys.modules["torchvision.transforms"] = module, module.transforms


def sdxl(configs: Path) -> tuple[Any, list[Any]]:
    """sd-scripts' own UNet and transformers' text encoders, without weights."""
    import torch
    from library.sdxl_original_unet import SdxlUNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    with torch.device("meta"):
        return SdxlUNet2DConditionModel(), [
            CLIPTextModel(CLIPTextConfig.from_pretrained(configs / "text_encoder")),
            CLIPTextModelWithProjection(CLIPTextConfig.from_pretrained(configs / "text_encoder_2")),
        ]


def load(job: dict[str, Any], unet: Any, encoders: list[Any]) -> dict[str, Any]:
    import importlib

    module = importlib.import_module(job["module"])
    try:
        network, _ = module.create_network_from_weights(1.0, job["file"], None, encoders, unet)
        network.apply_to(encoders, unet, True, True)
        info = network.load_weights(job["file"])
    except (RuntimeError, KeyError, AssertionError, AttributeError, TypeError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        for root in (unet, *encoders):
            for child in root.modules():
                child.__dict__.pop("forward", None)
    lists = ("unet_loras", "text_encoder_loras", "unet_ofts")
    return {
        "modules": sum(len(getattr(network, name, ())) for name in lists),
        "missing": sorted(info.missing_keys),
        "unexpected": sorted(info.unexpected_keys),
    }


def layer(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Output and gradients of one adapted layer for the tensors in the file."""
    import torch
    from networks.lora import LoRAModule
    from safetensors.torch import load_file, save_file

    given = load_file(job["file"])
    weight = given["weight"]
    if weight.dim() == 4:
        base: Any = torch.nn.Conv2d(
            weight.shape[1], weight.shape[0], weight.shape[2], job["stride"], job["padding"], bias=True
        )
    else:
        base = torch.nn.Linear(weight.shape[1], weight.shape[0])
    base.weight.data, base.bias.data = weight, given["bias"]
    adapter = LoRAModule("lora_unet_a", base, 1.0, given["down"].shape[0], float(given["alpha"]))
    adapter.lora_down.weight.data, adapter.lora_up.weight.data = given["down"], given["up"]
    adapter.apply_to()
    x = given["x"].requires_grad_(True)
    output = base(x)
    (output * given["pull"]).sum().backward()
    grads = {"down": adapter.lora_down.weight.grad, "up": adapter.lora_up.weight.grad, "x": x.grad}
    save_file({"output": output.detach(), **{key: value for key, value in grads.items()}}, folder / job["result"])
    return {}


def first(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch
    from networks.lora import LoRAModule
    from safetensors.torch import save_file

    torch.manual_seed(0)
    base = torch.nn.Linear(job["shape"][1], job["shape"][0])
    adapter = LoRAModule("lora_unet_a", base, 1.0, job["rank"], job["alpha"])
    tensors = {key: value.detach().clone() for key, value in adapter.state_dict().items() if "org_module" not in key}
    save_file(tensors, folder / job["result"])
    return {"keys": sorted(tensors), "alpha_dtype": str(tensors["alpha"].dtype)}


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    from diffusers import AutoencoderKL  # noqa: F401  (before the stand-in, so that it sees what is really there)
    from transformers import CLIPTextModel  # noqa: F401

    stand_in_for_torchvision()
    jobs, folder = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")), Path(sys.argv[3])
    model = None
    for job in jobs:
        if job["job"] == "load":
            model = model or sdxl(Path(job["configs"]))
            found = load(job, *model)
        else:
            found = {"layer": layer, "first": first}[job["job"]](job, folder)
        print("JUDGE " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
