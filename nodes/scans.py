"""Data sets that Training Dataset nodes of this ComfyUI have scanned, for the panel's caption table and the node."""

from __future__ import annotations

import threading
import time

from .. import trainer_core as core

_MOST = 64
_lock = threading.Lock()
_scans: dict[str, core.ScannedSet] = {}


def remember(config: core.TrainConfig, title: str, pictures: int, report: str) -> str:
    """Note a scan; returns the data set's id. The oldest one is forgotten when there are many."""
    identity = core.data_set_id(config.dataset)
    scan = core.ScannedSet(title, pictures, report, time.time(), config.dataset, config.bucket)
    with _lock:
        _scans.pop(identity, None)
        _scans[identity] = scan
        while len(_scans) > _MOST:
            del _scans[next(iter(_scans))]
    return identity


def scanned() -> dict[str, core.ScannedSet]:
    """The scans by data-set id (a copy)."""
    with _lock:
        return dict(_scans)
