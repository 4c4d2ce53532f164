"""Worker processes that decode pictures, and the jobs they do.

Each worker is `decode_worker.py` started as a plain script: no fork, and no re-import of the caller's main module,
which may be ComfyUI. It answers JSON lines on its standard output; pixels follow a line as raw bytes. One thread of the
caller waits on each worker. A worker that dies takes only its own picture with it, and the picture is named.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from .decode import PictureError, PictureFacts, decode_picture, examine_picture, fit_picture
from .locations import hash_bytes, read_location

Job = dict[str, Any]


def examine_job(path: Path | str, background: tuple[int, int, int]) -> Job:
    """Hash and fully decode one file."""
    return {"op": "examine", "path": str(path), "background": list(background)}


def fit_job(
    path: Path | str,
    background: tuple[int, int, int],
    *,
    resized: tuple[int, int],
    bucket: tuple[int, int],
    resample: str,
    content_hash: str,
) -> Job:
    """Decode one file, scale and cut it; refused when its content is no longer `content_hash`."""
    return {
        "op": "fit",
        "path": str(path),
        "background": list(background),
        "resized": list(resized),
        "bucket": list(bucket),
        "resample": resample,
        "content_hash": content_hash,
    }


def do_job(job: Job) -> PictureFacts | np.ndarray:
    """Do a job in this process. Raises PictureError for a picture that cannot be decoded or has changed."""
    location, background = job["path"], tuple(job["background"])
    if job["op"] == "examine":
        return examine_picture(location, background)  # type: ignore[arg-type]
    try:
        data = read_location(location)
    except OSError as error:
        raise PictureError(f"cannot be read any more: {error.strerror or error}") from error
    if hash_bytes(data) != job["content_hash"]:
        raise PictureError("the file was changed while this run was being prepared; start the run again")
    pixels = decode_picture(location, background, data=data)  # type: ignore[arg-type]
    return fit_picture(pixels, tuple(job["resized"]), tuple(job["bucket"]), job["resample"])  # type: ignore[arg-type]


class _Worker:
    """One worker process and the pipes to it."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("decode_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self.process.stdin is not None, "a pipe was asked for"
        assert self.process.stdout is not None, "a pipe was asked for"
        self.stdin: IO[bytes] = self.process.stdin
        self.stdout: IO[bytes] = self.process.stdout

    def do(self, job: Job) -> PictureFacts | np.ndarray:
        try:
            self.stdin.write(json.dumps(job).encode() + b"\n")
            self.stdin.flush()
            line = self.stdout.readline()
            if not line.endswith(b"\n"):
                raise EOFError
            answer = json.loads(line)
            raw = self.stdout.read(answer.get("bytes", 0))
            if len(raw) != answer.get("bytes", 0):
                raise EOFError
        except (OSError, EOFError) as error:
            self.close()
            code = self.process.returncode
            raise PictureError(
                f"the process that decoded it died (exit code {code}): the file may be hostile"
            ) from error
        if "error" in answer:
            raise PictureError(answer["error"])
        if "facts" in answer:
            facts = answer["facts"]
            return PictureFacts(
                facts["content_hash"], tuple(facts["size"]), facts["format"], tuple(facts["notes"]), facts["reason"]
            )
        return np.frombuffer(raw, np.uint8).reshape(answer["shape"])

    def close(self) -> None:
        for pipe in (self.stdin, self.stdout):
            with suppress(OSError):  # the worker may be gone already
                pipe.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class DecodePool:
    """Runs jobs in `workers` processes; with 0 in this process, one after another, when the result is asked for.

    Use as a context manager: workers end with it.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._local = threading.local()
        self._open: list[_Worker] = []
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="decode") if workers else None

    def submit(self, job: Job) -> Callable[[], PictureFacts | np.ndarray]:
        """Start a job; the returned function waits for its result or raises PictureError."""
        if self._threads is None:
            return lambda: do_job(job)
        future: Future[PictureFacts | np.ndarray] = self._threads.submit(self._run, job)
        return future.result

    def _run(self, job: Job) -> PictureFacts | np.ndarray:
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is None or worker.process.poll() is not None:
            worker = _Worker()
            self._local.worker = worker
            with self._lock:
                self._open.append(worker)
        return worker.do(job)

    def __enter__(self) -> DecodePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._open:
            worker.close()
        self._open.clear()
