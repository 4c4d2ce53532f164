"""Is what goes wrong noticed, called by its right name, and in time; and is what is healthy left alone?

Every run is a training of the micro toy (`--toy`: of the trained toy SDXL) with one fault put in at a random step, or a
healthy run that looks ill. Rules of docs/gradient_health.md (section "Benchmark"): the first alarm counts. Thresholds
come from the reference document and were looked at on seeds from 1000 on only; the scored seeds are 0 and up.
Beside it naive rules on the recorded signals of the same runs, and whether runs with transient faults end where
undisturbed ones do, with and without protection.

Goes on after a stop: every run is a line of benchmarks/results/detectors.jsonl. `--shard i/n`, `--minutes M`.
Last line: {"recall_min", "label", "culprit", "false_alarm", "delay_p95_steps", "recovered", "baselines": {...}}.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.detectors_score import summary, tables  # noqa: E402
from benchmarks.measure import store_result  # noqa: E402
from trainer_core.draws import Draws  # noqa: E402
from trainer_core.drill import inject  # noqa: E402
from trainer_core.drill.faults import FAULTS, LOOKALIKES, Fault, Lookalike  # noqa: E402
from trainer_core.drill.run import (  # noqa: E402
    DrillRun,
    drill_config,
    drill_pictures,
    horizon_ok,
    run_with,
    with_sections,
)
from trainer_core.health.ring import read_ring  # noqa: E402

LINES = ROOT / "benchmarks" / "results" / "detectors.jsonl"
_TAIL = 6
_HEALTHY_STEPS = 110
_RECOVERY_STEPS = 60

Job = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="seeds of each fault; look-alikes get twice as many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--toy", action="store_true", help="the trained toy SDXL, two seeds a kind")
    parser.add_argument("--shard", default="0/1", help="this process's share of the runs, as i/n")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after this long")
    parser.add_argument("--smoke", action="store_true", help="three short runs, results not kept")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="detectors-") as folder:
        lines = Path(folder) / "lines.jsonl" if asked.smoke else LINES
        lines.parent.mkdir(parents=True, exist_ok=True)
        place = prepare(Path(folder), toy=asked.toy)
        jobs = list(smoke_jobs() if asked.smoke else all_jobs(asked.seeds, asked.first_seed, toy=asked.toy))
        work(jobs, lines, place, asked.shard, asked.minutes)
        found = read_lines(lines)
    print(tables(found))
    result = summary(found)
    if not asked.smoke:
        store_result("detectors", {**result, "runs": len(found)})
    print(json.dumps(result))


def prepare(folder: Path, *, toy: bool) -> Path:
    """The model, pictures and a folder for runs."""
    from trainer_core.toy.micro import make_micro

    if not toy:
        make_micro(folder / "micro")
    drill_pictures(folder / "pictures", 12)
    return folder


def all_jobs(seeds: int, first: int, *, toy: bool) -> Iterator[Job]:
    """Seed by seed, so that a stop leaves every kind with about as many runs."""
    count = 2 if toy else seeds
    model = "toy" if toy else "micro"
    for seed in range(first, first + count):
        for fault in FAULTS:
            yield {"what": "fault", "kind": fault.name, "seed": seed, "model": model}
        for lookalike in LOOKALIKES:
            for twin in (seed,) if toy else (2 * seed, 2 * seed + 1):
                yield {"what": "healthy", "kind": lookalike.name, "seed": twin, "model": model}
        if not toy and seed % 4 == 0:
            for fault in FAULTS:
                if fault.transient:
                    yield {"what": "recovery", "kind": fault.name, "seed": seed, "model": model}


def smoke_jobs() -> Iterator[Job]:
    yield {"what": "fault", "kind": "cut-adapter", "seed": 2000, "model": "micro"}
    yield {"what": "fault", "kind": "nan-latent", "seed": 2000, "model": "micro", "onset": 6}
    yield {"what": "healthy", "kind": "fresh-adapter", "seed": 2000, "model": "micro", "steps": 8}


def work(jobs: list[Job], lines: Path, place: Path, shard: str, minutes: float) -> None:
    """Do the jobs of this shard that have no line yet."""
    number, of = (int(word) for word in shard.split("/"))
    begun = time.monotonic()
    done = {key(line) for line in read_lines(lines)}
    for position, job in enumerate(jobs):
        if position % of != number or key(job) in done:
            continue
        if time.monotonic() - begun > 60 * minutes:
            print(f"stopped after {minutes:g} minutes; run again to go on")
            return
        started = time.process_time()
        line = {**job, **perform(job, place), "cpu_seconds": round(time.process_time() - started, 1)}
        with lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{job['what']:<8} {job['kind']:<22} {job['seed']:>5}  {line.get('verdict') or line.get('end')}", flush=True
        )
        shutil.rmtree(place / "runs", ignore_errors=True)


def key(job: Job) -> tuple[Any, ...]:
    return job["what"], job["kind"], job["seed"], job["model"]


def read_lines(path: Path) -> list[Job]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def perform(job: Job, place: Path) -> Job:
    if job["what"] == "recovery":
        return recovery(fault_of(job), job["seed"], place)
    if job["what"] == "healthy":
        lookalike = next(one for one in LOOKALIKES if one.name == job["kind"])
        return healthy(lookalike, job, place)
    return faulty(fault_of(job), job, place)


def fault_of(job: Job) -> Fault:
    return next(fault for fault in FAULTS if fault.name == job["kind"])


def base(place: Path, job: Job, steps: int) -> Any:
    config = drill_config(place / "micro", place / "pictures", place / "runs", steps=steps, seed=job["seed"])
    if job["model"] == "toy":
        config = with_sections(config, {"model": {"path": "toy"}})
    return config


def faulty(fault: Fault, job: Job, place: Path) -> Job:
    """One run with the fault from a random step on (from the first where it is there from the beginning)."""
    drawn = Draws(job["seed"]).integer(22, 40, 0, fault.name, "onset")
    onset = job.get("onset") or (1 if fault.early else drawn)
    config = with_sections(base(place, job, onset + fault.horizon + _TAIL), fault.sections)
    run = run_with(config, fault.inject, seed=job["seed"], onset=onset)
    alarm = run.first()
    in_time = alarm is not None and 0 <= alarm.step - onset <= fault.horizon
    return {
        "onset": onset,
        "recipe": fault.recipe,
        "verdict": alarm.kind if alarm else None,
        "step": alarm.step if alarm else None,
        "alarm_in_time": in_time,
        "right": horizon_ok(run, fault.verdicts, fault.horizon),
        "culprit": run.named_right(),
        "naive": naive(run, place, onset, fault.horizon),
        "end": run.status,
        "message": run.message[:200],
    }


def healthy(lookalike: Lookalike, job: Job, place: Path) -> Job:
    """One healthy run: any alarm is a false one."""
    steps = job.get("steps", _HEALTHY_STEPS)
    config = with_sections(base(place, job, steps), lookalike.sections)
    run = run_with(config, lookalike.inject, seed=job["seed"], onset=1)
    alarm = run.first()
    return {
        "recipe": lookalike.recipe,
        "verdict": alarm.kind if alarm else None,
        "step": alarm.step if alarm else None,
        "sentence": alarm.sentence if alarm else "",
        "naive": naive(run, place, 1, steps),
        "end": run.status,
    }


def naive(run: DrillRun, place: Path, onset: int, horizon: int) -> dict[str, bool]:
    """What simple rules say of the same run, from its flight recorder: an alarm within the horizon, and none before."""
    records = read_ring(next(place.glob("runs/safe_scaler/*/health.ring")))
    names = {name for record in records for name in record.norms}
    slopes = [math.log10(record.grad_norm) if 0 < record.grad_norm < math.inf else 0.0 for record in records]
    rules: dict[str, list[int]] = {
        "loss is NaN": [r.step for r in records if not math.isfinite(r.loss)],
        "norm above 100": [r.step for r in records if r.grad_norm > 100],
        "a gradient is zero": [r.step for r in records if any(not r.norms.get(name, 0.0) for name in names)],
        "slope below -0.03": [
            r.step for i, r in enumerate(records) if i >= 9 and (slopes[i] - slopes[i - 9]) / 9 < -0.03
        ],
        "GradScaler alone": [r.step for r in records if not all(math.isfinite(norm) for norm in r.norms.values())],
    }
    return {name: bool(steps) and onset <= min(steps) <= onset + horizon for name, steps in rules.items()}


def recovery(fault: Fault, seed: int, place: Path) -> Job:
    """Final stable validation loss of a run with a transient fault, against the same run without it; then without
    protection: every step is applied, whatever its numbers are."""
    job = {"seed": seed, "model": "micro"}
    measured = {"validation": {"enabled": True, "split": 0.2, "bands": 2}}
    config = with_sections(with_sections(base(place, job, _RECOVERY_STEPS), fault.sections), measured)
    onset = Draws(seed).integer(22, 40, 0, fault.name, "onset")
    plain = run_with(config, inject.nothing, seed=seed, onset=onset)
    guarded = run_with(config, fault.inject, seed=seed, onset=onset)
    bare_config = replace(config, safety=replace(config.safety, drop_samples=False, ladder=False, diagnose=False))
    bare = run_with(bare_config, unprotected(fault), seed=seed, onset=onset)
    return {
        "plain": last(plain),
        "guarded": last(guarded),
        "bare": last(bare),
        "recovered": near(last(guarded), last(plain)),
        "recovered_bare": near(last(bare), last(plain)),
        "end": guarded.status,
    }


def unprotected(fault: Fault) -> Any:
    """The fault, in a trainer that applies every step."""

    def plant(site: Any) -> Any:
        from trainer_core.optim.precision import StepVerdict

        precision: Any = site.trainer.parts.precision
        precision.judge = lambda *_: StepVerdict("apply")
        return fault.inject(site)

    return plant


def last(run: DrillRun) -> float | None:
    ok = run.status == "finished" and len(run.validation) > 1
    value = run.validation[-1] if ok else None
    return value if value is not None and math.isfinite(value) else None


def near(loss: float | None, plain: float | None) -> bool:
    return loss is not None and plain is not None and loss <= 1.05 * plain


if __name__ == "__main__":
    main()
