"""Is what goes wrong noticed, called by its right name, and in time; and is what is healthy left alone?

Every run is a training of the small micro toy (`--toy`: of the trained toy SDXL) with one fault put in at a random
step, or a healthy run that looks ill. Rules of docs/gradient_health.md (section "Benchmark"): the first alarm counts.
Thresholds come from the reference document and were looked at on seed 0 and on seeds from 1000 on; seeds 1 to 20 are
scored (look-alikes: 2 to 41). Beside it naive rules on the readings of the same runs, and whether runs with transient
faults end where undisturbed ones do, with and without protection.

Goes on after a stop: every run is a line of benchmarks/results/detectors.jsonl (`--lines FILE`), with the version of
the code that it ran with; lines of another version are not counted. `--shard i/n`, `--minutes M`, `--only KIND ...`.
Last line: {"recall_min", "label", "culprit", "false_alarm", "delay_p95_steps", "recovered", "baselines": {...}}.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.detectors_score import kinds, summary, tables  # noqa: E402
from benchmarks.measure import store_result  # noqa: E402
from trainer_core.draws import Draws  # noqa: E402
from trainer_core.drill import inject  # noqa: E402
from trainer_core.drill.faults import FAULTS, FROZEN_ENCODERS, LOOKALIKES, Fault, Lookalike  # noqa: E402
from trainer_core.drill.run import (  # noqa: E402
    DrillRun,
    drill_config,
    drill_pictures,
    horizon_ok,
    run_with,
    with_sections,
)

LINES = ROOT / "benchmarks" / "results" / "detectors.jsonl"
FIRST_SEED = 1
UNDISTURBED = "undisturbed"
_TAIL = 2
_ONSETS = (22, 33)
_HEALTHY_STEPS, _LONG_HEALTHY_STEPS, _TOY_HEALTHY_STEPS = 72, 120, 40
"""All rules but those of steps 100 and 110 have spoken by step 70; one healthy run in eight is long enough for them."""
_RECOVERY_STEPS = 60
_RECOVERY_EVERY = 4

Job = dict[str, Any]


def code_version() -> str:
    """A hash of the sources that plant faults and judge them."""
    folders = ("trainer_core/health", "trainer_core/drill")
    files = [path for folder in folders for path in sorted((ROOT / folder).glob("*.py"))]
    files += [ROOT / "trainer_core" / name for name in ("config_health.py", "optim/clip_watch.py")]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\n" + path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:12]


CODE = code_version()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="seeds of each fault; look-alikes get twice as many")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--only", nargs="*", default=[], metavar="KIND", help="faults and look-alikes, by name")
    parser.add_argument("--lines", type=Path, default=LINES, metavar="FILE", help="where runs are kept, one a line")
    parser.add_argument("--toy", action="store_true", help="the trained toy SDXL, two seeds a kind")
    parser.add_argument("--shard", default="0/1", help="this process's share of the runs, as i/n")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after this long")
    parser.add_argument("--code", default=CODE, help="score the runs of an earlier code version; nothing is run")
    parser.add_argument("--smoke", action="store_true", help="three short runs, results not kept")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="detectors-") as folder:
        lines = Path(folder) / "lines.jsonl" if asked.smoke else asked.lines
        lines.parent.mkdir(parents=True, exist_ok=True)
        place = prepare(Path(folder), toy=asked.toy)
        jobs = list(smoke_jobs() if asked.smoke else all_jobs(asked.seeds, asked.first_seed, toy=asked.toy))
        jobs = [job for job in jobs if not asked.only or job["kind"] in asked.only]
        if asked.code == CODE:
            work(jobs, lines, place, asked.shard, asked.minutes)
        found = read_lines(lines, asked.code)
    wanted = {key(job) for job in jobs}
    scored = [line for line in found if key(line) in wanted]
    print(tables(scored))
    print(f"{len(scored)} of {len(jobs)} runs done; code version {asked.code}")
    result = summary(scored)
    if not asked.smoke and lines == LINES:
        name = "detectors_toy" if asked.toy else "detectors"
        details = {"kinds": kinds(scored), "runs": len(scored), "planned": len(jobs), "code": asked.code}
        store_result(name, {**result, **details})
    print(json.dumps(result))


def prepare(folder: Path, *, toy: bool) -> Path:
    """The model, pictures and a folder for runs."""
    from trainer_core.toy.micro import make_micro

    if not toy:
        make_micro(folder / "micro", small=True)
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
        if not toy and seed % _RECOVERY_EVERY == 0:
            yield {"what": "recovery", "kind": UNDISTURBED, "seed": seed, "model": model}
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
        line = {**job, **perform(job, place), "cpu_seconds": round(time.process_time() - started, 1), "code": CODE}
        with lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{job['what']:<8} {job['kind']:<22} {job['seed']:>5}  {line.get('verdict') or line['end']}  "
            f"{line['cpu_seconds']} s",
            flush=True,
        )
        shutil.rmtree(place / "runs", ignore_errors=True)


def key(job: Job) -> tuple[Any, ...]:
    return job["what"], job["kind"], job["seed"], job["model"]


def read_lines(path: Path, code: str = CODE) -> list[Job]:
    """Runs of one code version; those of another are no part of a score."""
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [line for line in found if line["code"] == code]


def perform(job: Job, place: Path) -> Job:
    if job["what"] == "recovery":
        return recovery(job, place)
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
    onset = job.get("onset") or (1 if fault.early else onset_of(fault, job["seed"]))
    steps = onset + fault.horizon + _TAIL
    config = with_sections(base(place, job, steps), fault.sections)
    run = run_with(config, fault.inject, seed=job["seed"], onset=onset, most_steps=steps)
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
        "naive": naive(run, onset, fault.horizon),
        "end": run.status,
        "message": run.message[:200],
    }


def onset_of(fault: Fault, seed: int) -> int:
    """A random step after the twenty of history that rules on the run's own norms need."""
    return Draws(seed).integer(*_ONSETS, 0, fault.name, "onset")


def healthy(lookalike: Lookalike, job: Job, place: Path) -> Job:
    """One healthy run: any alarm is a false one."""
    steps = job.get("steps") or (_LONG_HEALTHY_STEPS if job["seed"] % 8 == 0 else _HEALTHY_STEPS)
    if job["model"] == "toy":
        steps = _TOY_HEALTHY_STEPS
    config = with_sections(base(place, job, steps), lookalike.sections)
    run = run_with(config, lookalike.inject, seed=job["seed"], onset=1)
    alarm = run.first()
    return {
        "recipe": lookalike.recipe,
        "verdict": alarm.kind if alarm else None,
        "step": alarm.step if alarm else None,
        "sentence": alarm.sentence if alarm else "",
        "naive": naive(run, 1, steps),
        "steps": run.steps,
        "end": run.status,
        "message": run.message[:200],
    }


def naive(run: DrillRun, onset: int, horizon: int) -> dict[str, bool]:
    """What simple rules say of the first readings of the same run: an alarm within the horizon, and none before."""
    readings = run.readings
    names = {name for reading in readings for name in reading.norms}
    levels = [math.log10(one.grad_norm) if 0 < one.grad_norm < math.inf else 0.0 for one in readings]
    rules: dict[str, list[int]] = {
        "loss is NaN": [one.step for one in readings if not math.isfinite(one.loss)],
        "norm above 100": [one.step for one in readings if one.grad_norm > 100],
        "a gradient is zero": [one.step for one in readings if any(not one.norms.get(name, 0.0) for name in names)],
        "slope below -0.03": [
            one.step for i, one in enumerate(readings) if i >= 9 and (levels[i] - levels[i - 9]) / 9 < -0.03
        ],
        "GradScaler alone": [
            one.step for one in readings if not all(math.isfinite(norm) for norm in one.norms.values())
        ],
    }
    return {name: bool(steps) and onset <= steps[0] <= onset + horizon for name, steps in rules.items()}


def recovery(job: Job, place: Path) -> Job:
    """Final stable validation loss of the undisturbed run, or of a run with a transient fault and of the same without
    protection: every step is applied, whatever its numbers are."""
    measured = {"validation": {"enabled": True, "split": 0.2, "bands": 2}}
    config = with_sections(with_sections(base(place, job, _RECOVERY_STEPS), FROZEN_ENCODERS), measured)
    seed = job["seed"]
    if job["kind"] == UNDISTURBED:
        plain = run_with(config, inject.nothing, seed=seed, onset=1)
        return {"loss": last(plain), "end": plain.status}
    fault = fault_of(job)
    onset = onset_of(fault, seed)
    guarded = run_with(config, fault.inject, seed=seed, onset=onset)
    off = {
        "safety": {"drop_samples": False, "ladder": False, "diagnose": False},
        "hardware": {"recheck_spikes": False},
        "checkpoint": {"keep_best": False},  # an applied infinite norm stands in the state, which no file may hold
    }
    bare_config = with_sections(config, off)
    bare = run_with(bare_config, unprotected(fault), seed=seed, onset=onset)
    return {
        "loss": last(guarded),
        "loss_bare": last(bare),
        "end": guarded.status,
        "done": guarded.interventions[:6],
        "message": guarded.message[:200],
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


if __name__ == "__main__":
    main()
