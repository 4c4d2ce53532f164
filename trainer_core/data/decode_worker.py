"""Script of a decoding process: JSON lines in, answers out (see `pool.py`). Ends when its standard input does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# This file runs as a script: its own folder must not shadow foreign modules, and the pack's root must be importable.
sys.path[0] = str(Path(__file__).resolve().parents[2])

import json  # noqa: E402
import logging  # noqa: E402
from dataclasses import asdict  # noqa: E402
from typing import Any, BinaryIO  # noqa: E402

import numpy as np  # noqa: E402

from trainer_core.data.decode import DECODE_ERRORS, PictureError  # noqa: E402
from trainer_core.data.pool import do_job  # noqa: E402
from trainer_core.errors import DatasetError  # noqa: E402

log = logging.getLogger(__name__)


def answer(line: bytes) -> tuple[dict[str, Any], bytes]:
    """Reply to one request: a JSON-safe head and the raw bytes that follow it."""
    try:
        result = do_job(json.loads(line))
    except (PictureError, DatasetError, *DECODE_ERRORS) as error:
        return {"error": str(error) or type(error).__name__}, b""
    if isinstance(result, np.ndarray):
        raw = result.tobytes()
        return {"shape": list(result.shape), "bytes": len(raw)}, raw
    return {"facts": asdict(result)}, b""


def main() -> None:
    """Serve until end of input. Anything a decoder prints goes to standard error, never into the answers."""
    pipe: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        head, raw = answer(line)
        try:
            pipe.write(json.dumps(head).encode() + b"\n" + raw)
            pipe.flush()
        except OSError:  # the caller is gone
            return


if __name__ == "__main__":
    main()
