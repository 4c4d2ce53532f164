"""What do checkpoints cost the training? Stall of a step that saves, in steps, and share of the run's time.

Real AdamW steps over a rank-16 adapter on kohya's UNet set of SDXL (511 MB of state), each with as much computation
(matrix products) as fills `--step-seconds`; one run without saves, one with a background save every 50 steps. The
runs take turns in stretches of 50 steps, so that other work on the machine meets both alike. As in a real run, the
memory of the first snapshot is taken beside the training after the run's first step, and a saving step includes the
look for NaN and the copy of everything.
stall_steps = (slowest saving step - median step without saves) / that median;
overhead = time of all steps with saves / time of all steps without - 1.
Last line: {"stall_steps", "overhead"}.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.adapter_state import adapter_shapes  # noqa: E402
from benchmarks.measure import store_result  # noqa: E402
from trainer_core.checkpoints.state import RunState  # noqa: E402
from trainer_core.checkpoints.store import CheckpointStore  # noqa: E402
from trainer_core.checkpoints.writer import BackgroundWriter, WriteOutcome  # noqa: E402

EVERY = 50
SAVE_AT = 10
"""Which of 50 steps saves: the writing is to end in the stretch that pays for it."""


class Training:
    """Steps of a fixed amount of work over real parameters."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: str) -> None:
        self.device = device
        self.parameters = {
            name: torch.nn.Parameter(torch.randn(shape, device=device)) for name, shape in shapes.items()
        }
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-4, foreach=True)
        for parameter in self.parameters.values():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.matrix = torch.randn(1024, 1024, device=device)
        self.products = 0
        self.step = 0

    def calibrate(self, seconds: float) -> None:
        """Choose the work so that a whole step takes about `seconds`."""
        self.take()
        own = min(self.take() for _ in range(3))
        self.products = 20
        with_products = min(self.take() for _ in range(3))
        each = max((with_products - own) / self.products, 1e-6)
        self.products = max(1, round((seconds - own) / each))

    def take(self) -> float:
        """One step; returns its seconds."""
        started = time.perf_counter()
        value = self.matrix
        for _ in range(self.products):
            value = torch.tanh(self.matrix @ value)
        self.optimizer.step()
        self.step += 1
        self._wait()
        return time.perf_counter() - started

    def state(self) -> RunState:
        names = {parameter: name for name, parameter in self.parameters.items()}
        optimizer = {
            f"{entry}/{names[parameter]}": value
            for parameter, values in self.optimizer.state.items()
            for entry, value in values.items()
        }
        return RunState(dict(self.parameters), optimizer, {"counters": {"step": self.step}})

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each of the two runs, a multiple of 50")
    parser.add_argument("--step-seconds", type=float, default=0.5)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints are written (default: temporary)")
    parser.add_argument("--smoke", action="store_true", help="a narrow UNet, 50 short steps each")
    arguments = parser.parse_args()
    steps, seconds = (EVERY, 0.02) if arguments.smoke else (arguments.steps, arguments.step_seconds)
    training = Training(adapter_shapes(arguments.rank, arguments.smoke), arguments.device)
    training.calibrate(seconds)
    folder = Path(tempfile.mkdtemp(prefix="safe-scaler-checkpoint-", dir=arguments.folder))
    plain: list[float] = []
    saving: list[float] = []
    stalls: list[float] = []
    try:
        writer = BackgroundWriter(CheckpointStore(folder))
        for stretch_number in range(steps // EVERY):
            plain += [training.take() for _ in range(EVERY)]
            stretch, stall = with_a_save(training, writer, first=stretch_number == 0)
            saving += stretch
            stalls.append(stall)
        tail = finish(writer)
        saved = CheckpointStore(folder).list()
    finally:
        shutil.rmtree(folder)
    median = statistics.median(plain)
    summary = {
        "stall_steps": round(max(0.0, max(stalls) - median) / median, 4),
        "overhead": round((sum(saving) + tail) / sum(plain) - 1.0, 4),
    }
    size = saved[0].bytes / 1e6
    print(f"step {median:.3f} s; {len(stalls)} saves of {size:.0f} MB; slowest saving step {max(stalls):.3f} s")
    if not arguments.smoke:
        details = {
            "step_s": median,
            "stalls_s": stalls,
            "tail_s": tail,
            "bytes": saved[0].bytes,
            "device": arguments.device,
        }
        store_result("checkpoint", {**summary, **details})
    print(json.dumps(summary))


def with_a_save(training: Training, writer: BackgroundWriter, *, first: bool) -> tuple[list[float], float]:
    """50 steps, one of which saves: (seconds of all, seconds of that one)."""
    seconds: list[float] = []
    for step in range(1, EVERY + 1):
        started = time.perf_counter()
        training.take()
        refuse_failures(writer.poll())
        if step == SAVE_AT:
            writer.submit(training.state(), training.step)
        elif step == 1 and first:
            writer.prepare(training.state())
        seconds.append(time.perf_counter() - started)
    started = time.perf_counter()
    refuse_failures(writer.wait())  # nothing is left for the stretch without saves to pay
    seconds[-1] += time.perf_counter() - started
    return seconds, seconds[SAVE_AT - 1]


def finish(writer: BackgroundWriter) -> float:
    """Seconds the end of the run waits for the last write."""
    started = time.perf_counter()
    refuse_failures(writer.close())
    return time.perf_counter() - started


def refuse_failures(outcomes: list[WriteOutcome]) -> None:
    """A save that was not made would make the numbers look good."""
    for outcome in outcomes:
        if outcome.saved is None:
            raise RuntimeError(f"step {outcome.step} was not saved: {outcome.problem}")


if __name__ == "__main__":
    main()
