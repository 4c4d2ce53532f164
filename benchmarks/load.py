"""How long and how much memory does loading a full-size SDXL file take, next to the safetensors library alone?

`python benchmarks/load.py` makes a 6.9 GB file of random weights, then measures in fresh processes, alternating:
  library: open with safetensors, get every tensor in the type that ours ends up with (VAE fp32, the rest as wanted);
  ours:    `load_sdxl`: the same tensors, and modules, tokenizers, checks and fingerprints around them.
Both then read every number once (`sum`). Two cases: the file's own type (fp16, straight from the memory map) and
another one (bf16, converted); each with the file on the disk only (cold) and in the page cache (warm, as far as memory
allows). Imports are not timed. `seconds_one_byte_a_page` leaves the reading of the numbers out: the hardest comparison
for ours, whose building of modules then weighs most. `extra_gb` is the peak of resident memory (anonymous plus touched
file pages) above what was there before, less the loaded weights.
The last line is JSON: the worse cold ratio (the first load of a model is cold); the warm one stands in the line before
and in the result. Where the system has no call to empty the page cache, cold is measured warm and that is said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measure import peak_memory, store_result  # noqa: E402

CASES = ("float16", "bfloat16")
PAGE = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workdir", type=Path, default=None, help="folder for the 6.9 GB file; default: a temporary one"
    )
    parser.add_argument("--file", type=Path, default=None, help="an SDXL fp16 single file to use instead of a made one")
    parser.add_argument("--trials", type=int, default=3, help="fresh processes per measurement; the fastest counts")
    parser.add_argument("--smoke", action="store_true", help="use the toy: shows that it runs, its ratio means nothing")
    parser.add_argument("--one", nargs=3, metavar=("WHO", "DTYPE", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure_one(*arguments.one)))
        return
    with tempfile.TemporaryDirectory(prefix="safe-scaler-load-", dir=arguments.workdir) as folder:
        file = arguments.file or make_file(Path(folder) / "random_sdxl.safetensors", smoke=arguments.smoke)
        trials = 1 if arguments.smoke else arguments.trials
        cold = {dtype: compare(file, dtype, trials, evict) for dtype in CASES}
        warm_up(file)
        warm = {dtype: compare(file, dtype, trials, None) for dtype in CASES}
    summary = {
        "ratio": round(max(case["ratio"] for case in cold.values()), 3),
        "extra_gb": round(max(case["extra_gb"] for case in (*cold.values(), *warm.values())), 3),
    }
    warm_ratio = round(max(case["ratio"] for case in warm.values()), 3)
    if not arguments.smoke:
        store_result("load", {**summary, "warm_ratio": warm_ratio, "cold": cold, "warm": warm})
    print(f"warm ratio {warm_ratio}")
    print(json.dumps(summary))


def make_file(path: Path, *, smoke: bool) -> Path:
    import torch

    started = time.perf_counter()
    if smoke:
        from trainer_core.models import load_sdxl, save_single_file

        save_single_file(load_sdxl("toy"), path, torch.float16)
    else:
        from benchmarks.random_sdxl import write_random_sdxl

        write_random_sdxl(path)
    print(f"made {path.stat().st_size / 1e9:.2f} GB in {time.perf_counter() - started:.0f} s", flush=True)
    return path


def warm_up(path: Path) -> None:
    """Into the page cache, so that both sides read from the same place."""
    with open(path, "rb") as file:
        while file.read(1 << 24):
            pass


def evict(path: Path) -> None:
    """Out of the page cache (clean pages need no rights for that), so that both sides read from the disk."""
    advise = getattr(os, "posix_fadvise", None)  # Linux only
    if advise is None:
        print("this system cannot empty the page cache: cold numbers are warm ones", flush=True)
        return
    with open(path, "rb") as file:
        advise(file.fileno(), 0, 0, getattr(os, "POSIX_FADV_DONTNEED"))  # noqa: B009


def compare(file: Path, dtype: str, trials: int, prepare: Callable[[Path], None] | None) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"library": [], "ours": []}
    for _ in range(trials):
        for who, results in found.items():
            if prepare is not None:
                prepare(file)
            command = [sys.executable, str(Path(__file__).resolve()), "--one", who, dtype, str(file)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            results.append(json.loads(output.splitlines()[-1]))
            print(f"{dtype} {who}: {results[-1]}", flush=True)
    fastest = {who: min(result["seconds"] for result in results) for who, results in found.items()}
    paged = {who: min(result["seconds_one_byte_a_page"] for result in results) for who, results in found.items()}
    return {
        "ratio_one_byte_a_page": paged["ours"] / paged["library"],
        "cpu_ratio": min(r["cpu_s"] for r in found["ours"]) / min(r["cpu_s"] for r in found["library"]),
        "library_s": fastest["library"],
        "ours_s": fastest["ours"],
        "ratio": fastest["ours"] / fastest["library"],
        "extra_gb": max(result["extra_gb"] for result in found["ours"]),
        "weights_gb": found["ours"][0]["weights_gb"],
        "trials": found,
    }


def measure_one(who: str, dtype_name: str, file: str) -> dict[str, float]:
    """One measurement in this process. `seconds` is wall time, `cpu_s` this process's own."""
    import diffusers
    import torch
    import transformers
    from safetensors import safe_open

    from trainer_core.models import load_sdxl
    from trainer_core.models.tokenizers import load_tokenizers

    dtype = getattr(torch, dtype_name)
    # Libraries import much at first use; what is timed is loading.
    _ = (diffusers.UNet2DConditionModel, diffusers.AutoencoderKL, transformers.CLIPTextModelWithProjection)
    load_tokenizers(None, None, (49_408, 49_408))
    with torch.device("meta"):
        torch.nn.init.uniform_(torch.empty(1))
    weights: list[torch.Tensor] = []
    with peak_memory() as peak:
        started, cpu = time.perf_counter(), time.process_time()
        if who == "library":
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118
                    vae = name.startswith("first_stage_model.")
                    weights.append(handle.get_tensor(name).to(torch.float32 if vae else dtype))
        else:
            model = load_sdxl(file, dtype=dtype)
            modules = [*model.parts.values(), model.vae]
            weights = [tensor for module in modules for tensor in module.state_dict().values()]
        touched = sum(touch(tensor) for tensor in weights)
        paged = time.perf_counter() - started
        for tensor in weights:
            tensor.sum()
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights)
    return {
        "seconds": round(seconds, 3),
        "seconds_one_byte_a_page": round(paged, 3),
        "cpu_s": round(cpu_s, 3),
        "extra_gb": round((peak.added - size) / 1e9, 3),
        "weights_gb": round(size / 1e9, 3),
        "pages": touched,
    }


def touch(tensor: Any) -> int:
    """Read one byte of every page of the tensor."""
    import torch

    pages = tensor.reshape(-1).view(torch.uint8)[::PAGE]
    pages.sum()
    return pages.numel()


if __name__ == "__main__":
    main()
