"""One real training step on a full-size SDXL on a machine without a GPU.

`python benchmarks/full_size_step.py` makes a 6.9 GB single file of random weights, loads it in bf16, puts a rank-16
LoRA on the UNet (722 layers), and does one step at 256x256 with gradient checkpointing: caption and picture are
encoded, noise comes from keyed draws, loss, backward, clipping, AdamW. The last line is JSON: `peak_gb` (peak of
resident memory of the process, anonymous plus touched file pages), `step_s`, `load_s`. It fails unless every up matrix
moved and the peak is at most 20 GB.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measure import peak_memory, store_result  # noqa: E402

LIMIT_GB = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workdir", type=Path, default=None, help="folder for the 6.9 GB file; default: a temporary one"
    )
    parser.add_argument("--file", type=Path, default=None, help="an SDXL single file to use instead of a made one")
    parser.add_argument("--smoke", action="store_true", help="use the toy at 64x64: shows that it runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="safe-scaler-step-", dir=arguments.workdir) as folder:
        path = arguments.file or make_file(Path(folder) / "random_sdxl.safetensors", smoke=arguments.smoke)
        result = train_one_step(path, size=64 if arguments.smoke else 256)
    print(
        f"{result['layers']} LoRA layers, loss {result['loss']:.4f}, gradient norm {result['grad_norm']:.4g}",
        flush=True,
    )
    if result["peak_gb"] > LIMIT_GB:
        sys.exit(f"the peak of {result['peak_gb']} GB is above {LIMIT_GB} GB")
    if not arguments.smoke:
        store_result("full_size_step", result)
    print(json.dumps({key: result[key] for key in ("peak_gb", "step_s", "load_s")}))


def make_file(path: Path, *, smoke: bool) -> Path:
    import torch

    if smoke:
        from trainer_core.models import load_sdxl, save_single_file

        return save_single_file(load_sdxl("toy"), path, torch.float16)
    from benchmarks.random_sdxl import write_random_sdxl

    started = time.perf_counter()
    write_random_sdxl(path)
    print(f"made {path.stat().st_size / 1e9:.2f} GB in {time.perf_counter() - started:.0f} s", flush=True)
    return path


def train_one_step(path: Path, size: int) -> dict[str, Any]:
    import torch

    from trainer_core.config import LoraConfig
    from trainer_core.models import load_sdxl
    from trainer_core.networks import create_network

    with peak_memory() as peak:
        started = time.perf_counter()
        model = load_sdxl(path, dtype=torch.bfloat16)
        load_s = time.perf_counter() - started
        print(f"loaded in {load_s:.1f} s", flush=True)
        network = create_network(model, LoraConfig(rank=16), trained_parts=["unet"], seed=0)
        model.set_gradient_checkpointing(True, ("unet",))
        parameters = [parameter for _, parameter in network.named_parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-4)
        started = time.perf_counter()
        loss = forward_backward(model, size)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        optimizer.step()
        step_s = time.perf_counter() - started
    still = [name for name, value in network.named_parameters() if "lora_up" in name and not bool(value.any())]
    if still or not norm > 0:
        raise SystemExit(f"{len(still)} up matrices did not move ({still[:3]}), gradient norm {norm}")
    return {
        "peak_gb": round((peak.before + peak.added) / 1e9, 2),
        "step_s": round(step_s, 1),
        "load_s": round(load_s, 1),
        "layers": len(network.modules),
        "loss": loss,
        "grad_norm": norm,
        "size": size,
    }


def forward_backward(model: Any, size: int) -> float:
    """One epsilon-prediction micro-batch of one picture: returns the loss."""
    import torch

    from trainer_core.draws import Draws, sample_key
    from trainer_core.models import encode_captions, encode_images, time_ids

    draws, key = Draws(seed=0), sample_key("picture.png", "0" * 32)
    picture = draws.uniform(0, key, "picture", (1, 3, size, size)) * 2 - 1
    with torch.no_grad():
        stats = encode_images(model.vae, picture)
        embeds = encode_captions(model, ["a photo of a cat"])
    latents = stats.mean_BCHW * model.vae_scale
    noise = draws.normal(0, key, "noise", tuple(latents.shape))
    timestep = torch.tensor([draws.integer(0, 1000, 0, key, "timestep")])
    alphas = torch.cumprod(1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2, dim=0)[timestep].view(-1, 1, 1, 1)
    noisy = alphas.sqrt() * latents + (1 - alphas).sqrt() * noise
    sizes = time_ids((size, size), (0, 0), (size, size)).unsqueeze(0)
    predicted = model.denoise(noisy, timestep, embeds.context_BTD, embeds.pooled_BD, sizes)
    loss = (predicted.float() - noise).square().mean()
    loss.backward()
    return float(loss.detach())


if __name__ == "__main__":
    main()
