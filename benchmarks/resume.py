"""How long does it take from "resume" to trained tensors and optimizer state in place?

A rank-16 adapter on kohya's UNet set of SDXL with AdamW state (511 MB) is saved once and resumed 100 times: the newest
checkpoint found, every SHA-256 checked in the pass that reads the file, adapter checked for NaN, tensors copied into
the live parameters and moments. Warm page cache; imports and loading the base model are not part of it.
Last line: {"p50_s", "p95_s"}.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.adapter_state import adapter_shapes, make_state  # noqa: E402
from benchmarks.measure import store_result  # noqa: E402
from trainer_core.checkpoints.state import RunState  # noqa: E402
from trainer_core.checkpoints.store import CheckpointStore  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the checkpoint is written (default: temporary)"
    )
    parser.add_argument("--device", default="cpu", help="where the live tensors are")
    parser.add_argument("--smoke", action="store_true", help="a narrow UNet, 5 resumes")
    arguments = parser.parse_args()
    times = 5 if arguments.smoke else arguments.times
    folder = Path(tempfile.mkdtemp(prefix="safe-scaler-resume-", dir=arguments.folder))
    try:
        shapes = adapter_shapes(arguments.rank, arguments.smoke)
        saved = CheckpointStore(folder).save(make_state(shapes, 500), 500)
        live = make_state(shapes, 0, arguments.device)
        both = [resume(folder, live) for _ in range(times)]
        seconds, busy = sorted(wall for wall, _ in both), sorted(cpu for _, cpu in both)
        check(live, make_state(shapes, 500))
    finally:
        shutil.rmtree(folder)
    summary = {"p50_s": round(percentile(seconds, 0.5), 4), "p95_s": round(percentile(seconds, 0.95), 4)}
    print(f"{times} resumes of {saved.bytes / 1e6:.0f} MB: {seconds[0]:.3f} to {seconds[-1]:.3f} s")
    print(f"processor time (tells a busy machine from slow code): {busy[0]:.3f} to {busy[-1]:.3f} s")
    if not arguments.smoke:
        details = {"bytes": saved.bytes, "times": times, "device": arguments.device, "load": os.getloadavg()[0]}
        store_result("resume", {**summary, "cpu_p95_s": round(percentile(busy, 0.95), 4), **details})
    print(json.dumps(summary))


def resume(folder: Path, live: RunState) -> tuple[float, float]:
    """One resume; returns its seconds and its processor seconds."""
    started, busy = time.perf_counter(), time.process_time()
    loaded = CheckpointStore(folder).load("latest")
    with torch.no_grad():
        for target, source in ((live.adapter, loaded.adapter), (live.optimizer, loaded.optimizer)):
            for name, tensor in target.items():
                tensor.copy_(source[name])
    if live.adapter and next(iter(live.adapter.values())).is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started, time.process_time() - busy


def check(live: RunState, wanted: RunState) -> None:
    """What was resumed is what was saved: a fast resume of something else would be worth nothing."""
    for left, right in ((live.adapter, wanted.adapter), (live.optimizer, wanted.optimizer)):
        for name, tensor in right.items():
            if not torch.equal(left[name].cpu(), tensor):
                raise AssertionError(f"{name} was not restored")


def percentile(ordered: list[float], share: float) -> float:
    """Nearest rank."""
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


if __name__ == "__main__":
    main()
