"""Does caching latents keep the VAE busy?

`python benchmarks/cache.py` makes a VAE of SDXL's real size with random weights and 64 noisy pictures of about 512x512,
then measures, alternating:
  bare:  `encode_images` of 64 ready tensors, one at a time as the cache does, nothing else;
  ours:  `LatentCache.ensure` of 64 pictures from their files: hash, decode, scale, crop in one worker process, encode,
         check, write.
On a CPU an encoding takes half a minute: `--pictures 4` is enough to see the ratio, and the result says so. On a busy
machine `cpu_ratio_vs_bare` (this process alone, without the worker that decodes) tells more than wall time.
The last line is JSON: `ratio_vs_bare` = throughput of ours / throughput of bare (the best of the trials each).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measure import store_result  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=64)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true", help="a small VAE and 8 pictures: shows that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.pictures, arguments.size, arguments.trials = 8, 128, 1
    import torch

    vae = make_vae(small=arguments.smoke).to(arguments.device)
    with tempfile.TemporaryDirectory(prefix="safe-scaler-cache-") as place, torch.no_grad():
        items, tensors = make_pictures(Path(place) / "set", arguments.pictures, arguments.size)
        seconds: dict[str, list[float]] = {"bare": [], "ours": []}
        work: dict[str, list[float]] = {"bare": [], "ours": []}
        bare(vae, tensors[:1], arguments.device)  # first use picks kernels
        for trial in range(arguments.trials):
            for what in ("bare", "ours"):
                begun = time.process_time()
                if what == "bare":
                    seconds[what].append(bare(vae, tensors, arguments.device))
                else:
                    seconds[what].append(ours(vae, items, Path(place) / f"cache-{trial}"))
                work[what].append(time.process_time() - begun)
    summary = {"ratio_vs_bare": round(min(seconds["bare"]) / min(seconds["ours"]), 4)}
    details = {
        "pictures": arguments.pictures,
        "size": arguments.size,
        "device": arguments.device,
        "seconds": seconds,
        "cpu_seconds_of_this_process": work,
        "cpu_ratio_vs_bare": round(min(work["bare"]) / min(work["ours"]), 4),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }
    print(json.dumps(details))
    if not arguments.smoke:
        store_result("cache", {**summary, **details})
    print(json.dumps(summary))


def make_vae(*, small: bool) -> Any:
    """SDXL's VAE layout, random weights."""
    import torch
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    widths = (32, 32, 32, 32) if small else (128, 256, 512, 512)
    return AutoencoderKL(
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        layers_per_block=2,
    ).eval()


def make_pictures(folder: Path, count: int, size: int) -> tuple[Any, Any]:
    """(items of a scan, the same number of ready tensors)."""
    import numpy as np
    import torch
    from PIL import Image

    from trainer_core.config import BucketConfig, DatasetConfig
    from trainer_core.data import scan_dataset

    folder.mkdir(parents=True)
    numbers = np.random.default_rng(0)
    for index in range(count):
        rough = numbers.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
        image = Image.fromarray(rough).resize((size * 5 // 4, size * 5 // 4), Image.Resampling.BICUBIC)
        image.save(folder / f"{index:03}.jpg", quality=92)
    report = scan_dataset(DatasetConfig(path=str(folder), resolution=(size, size), workers=0), BucketConfig(), 1024)
    return report.items, torch.rand(count, 3, size, size) * 2 - 1


def bare(vae: Any, tensors: Any, device: str) -> float:
    from trainer_core.models import encode_images

    start = time.perf_counter()
    for at in range(len(tensors)):
        encode_images(vae, tensors[at : at + 1]).mean_BCHW.cpu()
    return time.perf_counter() - start


def ours(vae: Any, items: Any, cache: Path) -> float:
    from trainer_core.config import DatasetConfig
    from trainer_core.data import LatentCache

    start = time.perf_counter()
    made = LatentCache(cache, vae, "benchmark", DatasetConfig(workers=1)).ensure(items)
    seconds = time.perf_counter() - start
    if made != len(items):
        raise SystemExit(f"{made} latents were made of {len(items)}")
    return seconds


if __name__ == "__main__":
    main()
