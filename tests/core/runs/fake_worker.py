"""A worker script whose run is a few lines, for tests of protocol and supervisor: `fake_worker.py RUN_DIR ...`.

What it does is written in the run's config.json under `fake`. Everything around it (output, stdin, signals, last event)
is the real `worker_main`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[3])

from trainer_core import worker_main  # noqa: E402
from trainer_core.errors import DatasetError  # noqa: E402
from trainer_core.events import CheckpointSaved, EventBus, Heartbeat, RunFinished, RunStarted  # noqa: E402
from trainer_core.runs.database import RunDatabase  # noqa: E402
from trainer_core.runs.folder import RunFolder  # noqa: E402
from trainer_core.runs.protocol import Commands  # noqa: E402


def run(run_dir: Path, *, commands: Commands, sink: Any) -> None:
    folder = RunFolder(run_dir)
    fake = folder.read_config()["fake"]
    with folder.lock(), RunDatabase(folder.database_path) as record:
        bus = EventBus(folder.run_id, seq=record.last_seq())
        bus.subscribe(record)
        bus.subscribe(sink)
        commands.on_ack = bus.emit
        starts = folder.path / "starts"
        count = len(starts.read_text()) + 1 if starts.exists() else 1
        starts.write_text("x" * count)
        bus.emit(RunStarted(total_steps=3, parts=("unet",), device="cpu", precision="fp32", pictures=1))
        print("a library prints")
        os.write(1, b"and so does C code\n")
        behave(fake, count, folder, bus, commands)


def behave(fake: dict[str, Any], count: int, folder: RunFolder, bus: EventBus, commands: Commands) -> None:
    kind = fake["kind"]
    if kind == "wait":
        wait_for_stop(folder, bus, commands)
        return
    if kind == "silent":
        return
    fail(fake, count, folder, bus)
    status = fake.get("status", "finished")
    bus.emit(RunFinished(step=3, status=status, message="done", applied=3, rejected=0, lora="x"))
    if kind == "linger":
        bus.emit(Heartbeat(step=4))


def fail(fake: dict[str, Any], count: int, folder: RunFolder, bus: EventBus) -> None:
    kind = fake["kind"]
    if kind == "die" and count <= fake["times"]:
        if fake.get("saves"):
            save(folder, bus, step=count * 10)
        if count > 1 and fake.get("damages"):
            (folder.checkpoints / f"step-{count * 10:08d}" / "adapter.safetensors").write_bytes(b"y")
        if fake.get("torn"):
            os.write(bus_fd(bus), b'{"v": 1, "seq": 99, "type": "Step')
        os.kill(os.getpid(), signal.SIGKILL if fake.get("signal", True) else signal.SIGABRT)
    if kind == "raise":
        raise DatasetError("The folder x has no pictures. Give another one.")
    if kind == "bug":
        raise ValueError("a bug")
    if kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        bus.emit(Heartbeat(step=1))
        time.sleep(600)


def wait_for_stop(folder: RunFolder, bus: EventBus, commands: Commands) -> None:
    bus.emit(Heartbeat(step=1))
    while not commands.stop_requested:
        commands.poll()
        time.sleep(0.02)
    commands.poll()
    (folder.path / "stopped").write_text(commands.stop_reason)
    bus.emit(RunFinished(step=1, status="stopped", message="stopped", applied=1, rejected=0))


def bus_fd(bus: EventBus) -> int:
    """The descriptor of the event pipe, to tear a line with."""
    sink: Any = bus._subscribers[1]  # noqa: SLF001 - the fake looks behind the curtain on purpose
    return int(sink._pipe._stream.fileno())


def save(folder: RunFolder, bus: EventBus, step: int) -> None:
    """A checkpoint that looks good to the supervisor, made without torch (import time would rule the test)."""
    from trainer_core.checkpoints import manifest as names

    path = folder.checkpoints / names.folder_name(step)
    path.mkdir(parents=True)
    files, digest = {}, hashlib.sha256(b"x").hexdigest()
    for name in (names.ADAPTER, names.OPTIMIZER, names.STATE):
        (path / name).write_bytes(b"x")
        files[name] = names.FileEntry(1, digest)
    manifest = names.Manifest(
        format_version=1, pack_version="0", run_id="", step=step, generation=step, parent=None, created=0.0,
        files=files,
        adapter_digest=names.bound_digest("adapter", step, step, digest),
        optimizer_digest=names.bound_digest("optimizer", step, step, digest),
    )  # fmt: skip
    (path / names.MANIFEST).write_bytes(manifest.encode())
    bus.emit(CheckpointSaved(step=step, name=path.name, bytes=3, seconds=0.0))


if __name__ == "__main__":
    sys.exit(worker_main.main(sys.argv[1:], run=run))
