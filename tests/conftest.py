"""One thread a process, nothing from the network, and core tests first."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

# Before torch is imported anywhere: two threads on a busy two-core machine make tiny models 10 to 60 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# As trainer_core.libraries does in processes that train, for the same reason.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

_ORDER = ("architecture", "core", "nodes", "comfyui", "web")


@pytest.fixture
def fixtures() -> Path:
    """Folder of golden numbers and name lists."""
    return Path(__file__).parent / "fixtures"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Architecture and core before everything that needs another program."""
    root = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        try:
            folder = item.path.relative_to(root).parts[0]
        except ValueError:
            return len(_ORDER)
        return _ORDER.index(folder) if folder in _ORDER else len(_ORDER)

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """The modules imported by now stay for good: the garbage collector need not look at them at every test."""
    gc.collect()
    gc.freeze()
