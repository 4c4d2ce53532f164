"""The micro toy and pictures, as for the core's tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "core"))  # run_setup, under --import-mode=importlib

from run_setup import write_pictures  # noqa: E402


@pytest.fixture(scope="session")
def micro_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the micro toy; tests only read it."""
    from trainer_core.toy.micro import make_micro

    return make_micro(tmp_path_factory.mktemp("micro"))


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six drawn pictures with captions; tests only read them."""
    return write_pictures(tmp_path_factory.mktemp("pictures"))
