"""The command line in one of several processes that are killed or stall on the way; started by test_together.py.

FAULTS is JSON: [[kind, rank, step, seconds], ...]; the n-th one happens after the n-th restart by the launcher.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from trainer_core.cli import main
from trainer_core.trainer import Trainer


def break_down() -> None:
    faults = json.loads(os.environ["FAULTS"])
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if restarts >= len(faults):
        return
    kind, rank, step, seconds = faults[restarts]
    if os.environ["RANK"] != str(rank):
        return
    original = Trainer.train_step

    def train_step(self: Trainer) -> bool:
        if self.state.step == step:
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(seconds)
        return original(self)

    Trainer.train_step = train_step


if __name__ == "__main__":
    break_down()
    sys.exit(main())
