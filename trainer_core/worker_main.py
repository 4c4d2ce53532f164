"""The worker process of a run: `python trainer_core/worker_main.py RUN_DIR [--supervised]`.

A plain script, because the module names of a ComfyUI pack are file-system paths. Standard output becomes the event
pipe; everything that any library prints goes to run.log. The last event is always RunFinished; exit code 0 for
finished and stopped, 1 for failed.
"""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    # Our folder must not be importable: `data`, `events`, `networks` would shadow foreign modules of those names.
    sys.path[:] = [str(_HERE.parent)] + [entry for entry in sys.path if not entry or Path(entry).resolve() != _HERE]

import argparse  # noqa: E402
import faulthandler  # noqa: E402
import io  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any, BinaryIO  # noqa: E402

from trainer_core.errors import TrainerError  # noqa: E402
from trainer_core.events import RunFinished, to_wire  # noqa: E402
from trainer_core.runs.database import RunDatabase  # noqa: E402
from trainer_core.runs.folder import RunFolder  # noqa: E402
from trainer_core.runs.protocol import Commands, EventPipe, start_reader, stop_on_signals  # noqa: E402

ORPHAN_GRACE_S = 600.0
"""A supervised worker whose parent is gone and that has not stopped after this long ends itself."""

log = logging.getLogger("trainer_core.worker")

Run = Callable[..., Any]


class LastWord:
    """Sink between the run and the event pipe that knows the last number used and whether RunFinished was said."""

    def __init__(self, pipe: EventPipe) -> None:
        self._pipe = pipe
        self.seq = 0
        self.step = 0
        self.status: str | None = None

    def __call__(self, wire: dict[str, Any]) -> None:
        if self.status is not None:
            log.warning("event %s after RunFinished is not sent", wire["type"])
            return
        self.seq, self.step = int(wire["seq"]), int(wire["step"])
        if wire["type"] == "RunFinished":
            self.status = str(wire["data"]["status"])
        self._pipe(wire)


def main(arguments: list[str] | None = None, run: Run | None = None) -> int:
    """Run a run folder to its end. `run` defaults to what the folder asks for, imported after output is redirected."""
    parser = argparse.ArgumentParser(description="Train the run in RUN_DIR; events on standard output.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--supervised", action="store_true", help="the end of standard input means stop")
    options = parser.parse_args(arguments)
    folder = RunFolder(options.run_dir)
    if not folder.config_path.is_file():
        parser.error(f"{folder.path} is not a run folder: it has no config.json")
    pipe = EventPipe(_take_over_output(folder.log_path))
    commands = Commands()
    start_reader(0, commands, supervised=options.supervised, on_end=_watch_orphan)
    with stop_on_signals(commands):
        return _run(folder, commands, LastWord(pipe), run)


def _run(folder: RunFolder, commands: Commands, sink: LastWord, run: Run | None) -> int:
    try:
        run = run or _work_of(folder)
        run(folder.path, commands=commands, sink=sink)
        if sink.status is None:
            _finish(folder, sink, "The run ended without saying how.")
    except TrainerError as error:
        log.error("%s", error)
        if sink.status is None:
            _finish(folder, sink, str(error))
    except Exception as error:  # the worker boundary: the log has the traceback, the event the sentence
        log.exception("the run failed")
        if sink.status is None:
            _finish(folder, sink, f"{type(error).__name__}: {error} (traceback in {folder.log_path.name})")
    return 0 if sink.status in ("finished", "stopped") else 1


def _work_of(folder: RunFolder) -> Run:
    """Training, or the other job that the folder's config asks for."""
    from trainer_core.libraries import import_libraries

    import_libraries()
    job = folder.read_config().get("job")
    if job == "preview":
        from trainer_core.preview_job import run as preview

        return preview
    if job == "coverage":
        from trainer_core.coverage_job import run as coverage

        return coverage
    from trainer_core.build import run as train

    return train


def _finish(folder: RunFolder, sink: LastWord, message: str) -> None:
    """Say `failed` for a run that could not say it itself, in the record too where it can be written."""
    event = RunFinished(step=sink.step, status="failed", message=message, applied=0, rejected=0)
    wire = to_wire(event, seq=sink.seq + 1, run_id=folder.run_id)
    try:
        with folder.lock(patience=0.0), RunDatabase(folder.database_path) as record:
            wire["seq"] = max(wire["seq"], record.last_seq() + 1)
            record(wire)
    except (TrainerError, OSError) as error:
        log.warning("the failure could not be recorded: %s", error)
    sink(wire)


def _take_over_output(log_path: Path) -> BinaryIO:
    """Keep standard output for events alone, and send descriptors 1 and 2 to run.log."""
    events = os.dup(1)
    target = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    return os.fdopen(events, "wb")


def _watch_orphan() -> None:
    def end() -> None:
        time.sleep(ORPHAN_GRACE_S)
        log.error("the parent is gone and the run has not stopped for %d s: ending", ORPHAN_GRACE_S)
        os._exit(1)

    threading.Thread(target=end, name="orphan watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
