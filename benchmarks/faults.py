"""Kill a run at random moments of every phase, start it again, and compare the result with the unbroken run's.

Each campaign is one run of the micro toy on the CPU with scan, cache, checkpoints every step or two, exports,
validation and previews. It is killed (SIGKILL) up to `--per-run` times: at a random moment after a randomly chosen kind
of event, or at a random time. After every kill everything that stands under a final name must be whole; at the end
adapter, losses and the record must equal the unbroken run's, every step once.

Processes are forked from one that has done its imports, so that a kill costs a second and not ten; `--spawn` starts the
real worker instead. Finished kills are kept in benchmarks/results/faults.jsonl, and a later call goes on from there.
Last line: {"kills", "survived", "damage_accepted", "recovery_p50_s", "recovery_p95_s", "steps_repeated_max"}.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.measure import RESULTS, store_result  # noqa: E402
from trainer_core.build import create_run, run  # noqa: E402
from trainer_core.checkpoints.store import CheckpointStore  # noqa: E402
from trainer_core.config import TrainConfig  # noqa: E402
from trainer_core.networks import load_lora  # noqa: E402
from trainer_core.networks.file_check import body_hash  # noqa: E402
from trainer_core.runs.folder import RunFolder  # noqa: E402
from trainer_core.runs.protocol import EventPipe  # noqa: E402
from trainer_core.runs.record import open_readonly  # noqa: E402

STEPS = 8
MOMENTS = (
    "time", "RunStarted", "scanning", "caching", "training", "StepFinished", "saving", "CheckpointSaved", "LoraSaved",
    "validating", "ValidationFinished", "previewing", "PreviewReady", "finishing",
)  # fmt: skip
"""What a kill waits for before its random delay: an event type, a phase, or nothing but time."""

Wire = dict[str, Any]


@dataclass
class Kill:
    """One kill and what came after. `damage` names what was wrong; empty = survived."""

    number: int
    moment: str
    step: int
    restored: int = -1
    recovery_s: float = 0.0
    damage: str = ""

    @property
    def repeated(self) -> int:
        return max(0, self.step - self.restored) if self.restored >= 0 else 0


class Attempt:
    """A process that runs a run folder; its events come over a pipe."""

    def __init__(self, run_dir: Path, spawn: bool) -> None:
        self.started = time.perf_counter()
        self.step = 0
        self.restored = -1
        self.recovery_s = 0.0
        if spawn:
            command = [sys.executable, str(ROOT / "trainer_core" / "worker_main.py"), str(run_dir)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._process.stdout
            self.pid, self._pipe = self._process.pid, self._process.stdout.fileno()
        else:
            self._process = None
            self._pipe, write = os.pipe()
            self.pid = os.fork()
            if self.pid == 0:
                run_in_child(run_dir, write)
            os.close(write)
        self._pending = b""

    def events(self, until: float | None = None) -> Iterator[Wire | None]:
        """Events as they come; None once when the moment `until` (perf_counter) is reached; ends with the process."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while True:
                left = None if until is None else until - time.perf_counter()
                if left is not None and (left <= 0 or not selector.select(left)):
                    until = None
                    yield None
                    continue
                chunk = os.read(self._pipe, 1 << 16)
                if not chunk:
                    return
                *lines, self._pending = (self._pending + chunk).split(b"\n")
                for line in lines:
                    wire = json.loads(line)
                    self._note(wire)
                    yield wire

    def _note(self, wire: Wire) -> None:
        """Step, from where it went on, and how long it took to be where it left off."""
        if wire["type"] in ("RunStarted", "Resumed"):
            self.restored = self.step = int(wire["step"])
        elif wire["type"] == "StepFinished":
            self.step = int(wire["step"])
        if wire["type"] in ("StepFinished", "RunFinished") and not self.recovery_s:
            self.recovery_s = time.perf_counter() - self.started

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        for _ in self.events():  # what was sent before the kill counts
            pass
        self.end()

    def end(self) -> int:
        if self._process is not None:
            code = self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream:
                    stream.close()
            return code
        os.close(self._pipe)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def run_in_child(run_dir: Path, write: int) -> None:
    """The forked process: never returns."""
    code = 1
    try:
        log = os.open(run_dir / "run.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
        code = run(run_dir, sink=EventPipe(os.fdopen(write, "wb"))).exit_code
    finally:
        os._exit(code)


def config_for(model: Path, pictures: Path, output: Path) -> TrainConfig:
    """A run that goes through every phase in a few seconds."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "dataset": {"path": str(pictures), "batch_size": 2, "workers": 0},
        "lora": {"rank": 4, "dropout": 0.1},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"every_steps": 2, "keep_last": 2, "lora_every_steps": 4},
        "validation": {"every_steps": 3, "split": 0.3, "bands": 2},
        "preview": {"prompts": ("a red circle --w 64 --h 64 --s 2",), "every_steps": 4, "at_start": False},
        "run": {"output_dir": str(output), "output_name": "x", "max_train_steps": STEPS, "seed": 3, "device": "cpu"},
    }
    config = TrainConfig()
    for name, fields in sections.items():
        config = replace(config, **{name: replace(getattr(config, name), **fields)})
    return config


def prepare(folder: Path) -> tuple[Path, Path]:
    """The micro toy and six pictures."""
    from PIL import Image

    from trainer_core.toy.micro import make_micro
    from trainer_core.toy.shapes import training_picture

    pictures = folder / "pictures"
    pictures.mkdir()
    for index in range(6):
        picture = training_picture(7, index, ((64, 64), (48, 80))[index % 2])
        Image.fromarray(picture.pixels_HWC).save(pictures / f"{index:03d}.png")
        (pictures / f"{index:03d}.txt").write_text(picture.caption, encoding="utf-8")
    return make_micro(folder / "micro"), pictures


def final_lora(run_dir: Path) -> Path:
    return Path(RunFolder(run_dir).read_config()["final_lora"])


def record_of(run_dir: Path) -> list[tuple[int, float]]:
    """Steps and losses as the record has them."""
    with open_readonly(RunFolder(run_dir).database_path) as record:
        return [(row["step"], row["loss"]) for row in record.steps()]


def damage_on_disk(run_dir: Path) -> str:
    """What stands under a final name and is not whole; empty when all is."""
    store = CheckpointStore(RunFolder(run_dir).checkpoints)
    for saved in store.list():
        if problem := saved.problem or store.verify(saved.name):
            return f"{saved.name}: {problem}"
    loras = [*RunFolder(run_dir).loras.glob("*.safetensors"), *run_dir.parent.parent.glob("*.safetensors")]
    for path in loras:
        load_lora(path)  # raises for a damaged file
    return ""


def kill_once(run_dir: Path, number: int, typical: float, spawn: bool) -> tuple[Attempt, str]:
    """Start the run and kill it at the moment of `number`: (the attempt, the moment; empty when it finished first)."""
    draw = random.Random(number)
    moment = draw.choice(MOMENTS)
    attempt = Attempt(run_dir, spawn)
    after, skip = draw.uniform(0.0, 0.15), draw.randrange(3)
    until = attempt.started + draw.uniform(0.0, typical) if moment == "time" else None
    for wire in attempt.events(until):
        if wire is not None:
            skip -= moment in (wire["type"], wire["data"].get("phase"))
            if skip >= 0:
                continue
            time.sleep(after)
        attempt.kill()
        return attempt, moment
    attempt.end()
    return attempt, ""


def finish_run(run_dir: Path, spawn: bool) -> tuple[Attempt, str]:
    """Run to the end; (the attempt, its status)."""
    attempt = Attempt(run_dir, spawn)
    status = "died"
    for wire in attempt.events():
        if wire and wire["type"] == "RunFinished":
            status = f"{wire['data']['status']}: {wire['data']['message']}"
    attempt.end()
    return attempt, status


def campaign(folder: Path, numbers: list[int], whole: Path, typical: float, spawn: bool) -> list[Kill]:
    """One run with these kills (fewer when it finishes first), judged against the unbroken run `whole`."""
    model, pictures = folder / "micro", folder / "pictures"
    work = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    shutil.copytree(pictures, work / "pictures", ignore=shutil.ignore_patterns(".*"))
    run_dir = create_run(config_for(model, work / "pictures", work / "out")).path
    kills: list[Kill] = []
    for number in numbers:
        attempt, moment = kill_once(run_dir, number, typical, spawn)
        settle(kills, attempt)
        if not moment:
            break
        kills.append(Kill(number, moment, attempt.step, damage=damage_on_disk(run_dir)))
    else:
        attempt, status = finish_run(run_dir, spawn)
        settle(kills, attempt)
        if not status.startswith("finished"):
            kills[-1].damage = kills[-1].damage or status
    if kills and not any(kill.damage for kill in kills):
        kills[-1].damage = difference(run_dir, whole)
    if not any(kill.damage for kill in kills):
        shutil.rmtree(work)
    return kills


def settle(kills: list[Kill], attempt: Attempt) -> None:
    """Where `attempt` went on belongs to the kill before it, and to earlier ones whose successors came to nothing."""
    if attempt.restored < 0:
        return
    for kill in kills:
        if kill.restored < 0:
            kill.restored, kill.recovery_s = attempt.restored, attempt.recovery_s


def difference(run_dir: Path, whole: Path) -> str:
    if body_hash(final_lora(run_dir)) != body_hash(final_lora(whole)):
        return "the final adapter differs from the unbroken run's"
    if record_of(run_dir) != record_of(whole):
        return f"the record differs: {record_of(run_dir)}"
    leftovers = [path.name for path in RunFolder(run_dir).checkpoints.iterdir() if path.name.startswith(".")]
    return f"leftovers: {leftovers}" if leftovers else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--per-run", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this long; the next call goes on")
    parser.add_argument(
        "--folder", type=Path, default=None, help="keep model, pictures and the unbroken run here for the next call"
    )
    parser.add_argument("--spawn", action="store_true", help="start the real worker for every attempt")
    parser.add_argument("--fresh", action="store_true", help="forget kept results")
    parser.add_argument("--smoke", action="store_true", help="4 kills, nothing kept")
    arguments = parser.parse_args()
    wanted = 4 if arguments.smoke else arguments.kills
    kept = RESULTS / "faults.jsonl"
    kills = [] if arguments.smoke or arguments.fresh or not kept.exists() else read_kept(kept)
    if arguments.fresh:
        kept.unlink(missing_ok=True)
    begun = time.perf_counter()
    folder, whole, typical = unbroken_run(arguments.folder, arguments.spawn)
    while done(kills) < wanted and not (arguments.minutes and time.perf_counter() - begun > arguments.minutes * 60):
        first = max((kill.number for kill in kills), default=-1) + 1
        numbers = list(range(first, first + min(arguments.per_run, wanted - done(kills))))
        new = campaign(folder, numbers, whole, typical, arguments.spawn)
        kills += new or [Kill(numbers[0], "finished first", 0)]
        for kill in new:
            fate = kill.damage or "survived"
            print(f"kill {kill.number:4d} at {kill.moment:20s} step {kill.step}, resumed from {kill.restored}: {fate}")
        if not arguments.smoke:
            with kept.open("a", encoding="utf-8") as stream:
                stream.writelines(json.dumps(asdict(kill)) + "\n" for kill in kills[-max(1, len(new)) :])
    if arguments.folder is None and not any(kill.damage for kill in kills):
        shutil.rmtree(folder)
    report([kill for kill in kills if kill.moment != "finished first"], store=not arguments.smoke)


def done(kills: list[Kill]) -> int:
    """Real kills: a run that finished before its first kill is none."""
    return sum(kill.moment != "finished first" for kill in kills)


def unbroken_run(kept: Path | None, spawn: bool) -> tuple[Path, Path, float]:
    """(work folder, the unbroken run, its seconds), from an earlier call where `kept` holds them."""
    folder = kept or Path(tempfile.mkdtemp(prefix="safe-scaler-faults-"))
    note = folder / "unbroken.json"
    if note.exists():
        known = json.loads(note.read_text(encoding="utf-8"))
        print(f"unbroken run of an earlier call: {known['seconds']:.1f} s")
        return folder, Path(known["run"]), float(known["seconds"])
    folder.mkdir(parents=True, exist_ok=True)
    model, pictures = prepare(folder)
    whole = create_run(config_for(model, pictures, folder / "whole")).path
    started = time.perf_counter()
    _, status = finish_run(whole, spawn)
    typical = time.perf_counter() - started
    if not status.startswith("finished"):
        raise RuntimeError(f"the unbroken run ended as {status}; see {whole}")
    print(f"unbroken run: {typical:.1f} s, {len(record_of(whole))} steps")
    note.write_text(json.dumps({"run": str(whole), "seconds": typical}), encoding="utf-8")
    return folder, whole, typical


def read_kept(path: Path) -> list[Kill]:
    return [Kill(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def report(kills: list[Kill], *, store: bool) -> None:
    recoveries = sorted(kill.recovery_s for kill in kills if kill.recovery_s) or [0.0]
    print(f"{'moment':22s} {'tries':>5s} {'survived':>8s} {'lost steps':>10s}")
    for moment in MOMENTS:
        those = [kill for kill in kills if kill.moment == moment]
        if those:
            lost = max(kill.repeated for kill in those)
            print(f"{moment:22s} {len(those):5d} {sum(not kill.damage for kill in those):8d} {lost:10d}")
    summary = {
        "kills": len(kills),
        "survived": sum(not kill.damage for kill in kills),
        "damage_accepted": sum(bool(kill.damage) for kill in kills),
        "recovery_p50_s": round(recoveries[len(recoveries) // 2], 3),
        "recovery_p95_s": round(recoveries[min(len(recoveries) - 1, int(0.95 * len(recoveries)))], 3),
        "steps_repeated_max": max((kill.repeated for kill in kills), default=0),
    }
    if store:
        store_result("faults", summary)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
