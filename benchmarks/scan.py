"""How fast does the scan of a known set run, next to the file system alone, and what does an index cost in memory?

`python benchmarks/scan.py` makes 100,000 small pictures with captions, then measures in fresh processes:
  bare:    `os.scandir` of the folder, then open each picture and read its first 64 bytes;
  first:   the first scan, which hashes and decodes every picture (reported apart, in pictures/s);
  warm:    a scan with the memo of known files;
  startup: warm scan, batch plan and opening a latent cache that holds all of them: from nothing to the first batch.
Imports come before the clock starts. `cpu_seconds` stand beside: on a busy machine wall time tells of its neighbours.
Captions are read by none of the bare passes. `bytes_per_picture`: growth of the resident memory for an index of
1,000,000 pictures with names and captions of usual length. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measure import store_result  # noqa: E402

CAPTION = "a photo of a small coloured tile number {}, seen from above, flat light, plain background"
NATIVE = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=100_000)
    parser.add_argument("--indexed", type=int, default=1_000_000, help="pictures of the index whose memory is measured")
    parser.add_argument("--trials", type=int, default=3, help="fresh processes per measurement; the fastest counts")
    parser.add_argument("--workdir", type=Path, default=None, help="a folder to keep the set in, and to go on from")
    parser.add_argument("--smoke", action="store_true", help="1,000 pictures: shows that it runs")
    parser.add_argument("--one", nargs=3, metavar=("WHAT", "FOLDER", "CACHE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(MEASURES[arguments.one[0]](Path(arguments.one[1]), Path(arguments.one[2]))))
        return
    count, indexed, trials = arguments.pictures, arguments.indexed, arguments.trials
    if arguments.smoke:
        count, indexed, trials = 1000, 100_000, 1
    with ExitStack() as stack:
        if arguments.workdir is None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="safe-scaler-scan-")))
        else:
            place = arguments.workdir
        folder, cache = place / "set", place / "cache"
        first = prepare(place, count)
        found: dict[str, list[dict[str, Any]]] = {what: [] for what in ("bare", "warm", "startup")}
        for _ in range(trials):
            for what, results in found.items():
                results.append(fresh(what, folder, cache))
        best = {what: min(result["seconds"] for result in results) for what, results in found.items()}
        memory = fresh("memory", folder, Path(str(indexed)))
    summary = {
        "ratio_vs_scandir": round(best["warm"] / best["bare"], 3),
        "bytes_per_picture": round(memory["bytes_per_picture"], 1),
        "startup_cached_100k_s": round(best["startup"], 2),
    }
    speed = round(count / first["seconds"])
    work = {what: min(result["cpu_seconds"] for result in results) for what, results in found.items()}
    details = {
        "pictures": count,
        "first_pictures_per_s": speed,
        "seconds": best,
        "cpu_seconds": work,
        "cpu_ratio_vs_scandir": round(work["warm"] / work["bare"], 3),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "runs": found,
    }
    print(json.dumps(details))
    if not arguments.smoke:
        store_result("scan", {**summary, **details})
    print(json.dumps(summary))


def prepare(place: Path, count: int) -> dict[str, Any]:
    """The set, known and with a latent of each picture; the result of its first scan. What is there is kept."""
    folder, cache, told = place / "set", place / "cache", place / "first.json"
    if told.exists():
        return json.loads(told.read_text(encoding="utf-8"))
    make_set(folder, count)
    shutil.rmtree(cache, ignore_errors=True)
    time.sleep(2.5)  # files that just changed are not trusted by the memo
    first = fresh("first", folder, cache)
    fresh("fill", folder, cache)
    told.write_text(json.dumps(first), encoding="utf-8")
    return first


def fresh(what: str, folder: Path, cache: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", what, str(folder), str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def make_set(folder: Path, count: int) -> None:
    """Small PNG files, each with other pixels, and a caption for each."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    there = set(os.listdir(folder))
    for index in range(count):
        if {f"tile_{index:07}.png", f"tile_{index:07}.txt"} <= there:
            continue
        buffer = BytesIO()
        Image.new("RGB", (64, 64), (index % 256, index // 256 % 256, index // 65536)).save(buffer, "PNG")
        (folder / f"tile_{index:07}.png").write_bytes(buffer.getvalue())
        (folder / f"tile_{index:07}.txt").write_text(CAPTION.format(index), encoding="utf-8")


class Clock:
    """Wall and processor time since it was made."""

    def __init__(self) -> None:
        self.wall, self.work = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self.wall, "cpu_seconds": time.process_time() - self.work}


def bare(folder: Path, cache: Path) -> dict[str, Any]:
    clock = Clock()
    with os.scandir(folder) as entries:
        names = [entry.path for entry in entries if entry.name.endswith(".png")]
    for name in names:
        with open(name, "rb") as stream:
            stream.read(64)
    return clock.read()


def scan(folder: Path, cache: Path) -> dict[str, Any]:
    from trainer_core.config import BucketConfig, DatasetConfig
    from trainer_core.data import scan_dataset

    clock = Clock()
    report = scan_dataset(DatasetConfig(path=str(folder)), BucketConfig(), NATIVE, cache_dir=cache)
    return {**clock.read(), "decoded": report.decoded, "pictures": len(report.items)}


def small_cache(cache: Path) -> Any:
    """A latent cache without a VAE: everything that is asked for must be in it."""
    from trainer_core.config import DatasetConfig
    from trainer_core.data import LatentCache

    return LatentCache(cache, None, "benchmark", DatasetConfig(workers=0))  # type: ignore[arg-type]


def fill(folder: Path, cache: Path) -> dict[str, Any]:
    """Entries for all pictures, as a run would have left them (numbers in them do not matter here)."""
    import torch

    from trainer_core.config import BucketConfig, DatasetConfig
    from trainer_core.data import scan_dataset

    report = scan_dataset(DatasetConfig(path=str(folder)), BucketConfig(), NATIVE, cache_dir=cache)
    latents = small_cache(cache)
    pending = {}
    for item in report.items:
        pending[latents.key(item, False)] = {"mean": torch.zeros(4, 8, 8), "std": torch.ones(4, 8, 8)}
        if len(pending) == 4096:
            latents.store.put(pending)
            pending = {}
    latents.store.put(pending)
    return {"entries": len(latents.store)}


def startup(folder: Path, cache: Path) -> dict[str, Any]:
    from trainer_core.config import BucketConfig, DatasetConfig
    from trainer_core.data import BatchLoader, BatchPlan, LatentCache, scan_dataset  # noqa: F401 - imports torch
    from trainer_core.draws import Draws

    clock = Clock()
    dataset = DatasetConfig(path=str(folder), batch_size=4)
    report = scan_dataset(dataset, BucketConfig(), NATIVE, cache_dir=cache)
    latents = small_cache(cache)
    made = latents.ensure(report.items)
    if made or report.decoded:
        raise SystemExit(f"{made} latents and {report.decoded} pictures were not known")
    plan = BatchPlan(report.items, 4, Draws(1))
    batch = BatchLoader(plan, latents, None, dataset).load(0, plan.batches(0)[0])
    return {**clock.read(), "batch": list(batch.mean_BCHW.shape)}


def memory(folder: Path, count: Path) -> dict[str, Any]:
    """Resident memory of an index of as many pictures as `count` says."""
    import psutil

    from trainer_core.data.buckets import Placement
    from trainer_core.data.sets import SetSpec
    from trainer_core.data.table import ItemTable

    process, pictures = psutil.Process(), int(str(count))
    place = Placement((64, 64), (64, 64))
    spec = SetSpec(folder=folder)
    gc.collect()
    before = process.memory_info().rss
    table = ItemTable()
    number = table.folder(str(folder), "")
    for index in range(pictures):
        table.add(
            spec,
            number,
            f"tile_{index:07}.png",
            content_hash=f"{index:032x}",
            size=(64, 64),
            place=place,
            caption=CAPTION.format(index),
        )
    gc.collect()
    grown = process.memory_info().rss - before
    if table[pictures - 1].caption != CAPTION.format(pictures - 1):
        raise SystemExit("the index does not give back what was put in")
    return {"bytes_per_picture": grown / pictures}


MEASURES = {"bare": bare, "first": scan, "warm": scan, "fill": fill, "startup": startup, "memory": memory}

if __name__ == "__main__":
    main()
