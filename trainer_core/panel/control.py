"""Commands to runs. A run that this program follows takes all; one of another program takes `stop`, by signal."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from ..runs.folder import RunFolder
from ..runs.protocol import COMMANDS
from .exchange import Refused

_HOLDER = re.compile(r"pid (\d+) on (.+)")


class Followed(Protocol):
    """A run whose worker this program talks to (`nodes.live.LiveRun`)."""

    def send(self, cmd: str, args: Mapping[str, Any] | None = None) -> Any:
        """Returns an answer with `ok`, `message` and `answered`."""
        ...


def command(folder: RunFolder, followed: Followed | None, cmd: str) -> dict[str, Any]:
    """Send `cmd`; returns `{cmd, ok, message, answered}`.

    Refused with 400 for an unknown command, 409 when the run takes none.
    """
    if cmd not in COMMANDS:
        raise Refused(400, "no_such_command", f"There is no command {cmd[:40]!r}. Known are {', '.join(COMMANDS)}.")
    if followed is not None:
        answer = followed.send(cmd)
        return {"cmd": cmd, "ok": answer.ok, "message": answer.message, "answered": answer.answered}
    if not folder.is_locked():
        raise Refused(409, "not_running", f"The run {folder.run_id} is not running.")
    if cmd != "stop":
        raise Refused(
            409,
            "elsewhere",
            f"The run was started by another program, which alone can {cmd} it. It can be stopped here.",
        )
    _signal_stop(folder)
    message = "The process was asked to stop. It writes a checkpoint and the LoRA first."
    return {"cmd": cmd, "ok": True, "message": message, "answered": False}


def _signal_stop(folder: RunFolder) -> None:
    pid = _holder(folder)
    if pid is None or sys.platform == "win32":
        raise Refused(
            409,
            "elsewhere",
            "The run was started by a program that cannot be reached from here. Stop it there (Ctrl-C).",
        )
    os.kill(pid, signal.SIGTERM)


def _holder(folder: RunFolder) -> int | None:
    """Process id of the writer, when it runs on this machine and is one of ours."""
    import psutil

    try:
        found = _HOLDER.fullmatch(folder.lock_path.read_text(encoding="utf-8").strip())
        if found is None or found[2] != socket.gethostname():
            return None
        words = psutil.Process(int(found[1])).cmdline()
    except (OSError, psutil.Error):
        return None
    ours = any("trainer_core" in word or "safe-scaler" in word or "safe_scaler" in word for word in words)
    return int(found[1]) if ours else None
