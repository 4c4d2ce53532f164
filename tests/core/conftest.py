"""Shared small inputs: the micro toy and a folder of drawn pictures, made once a session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # run_setup, under --import-mode=importlib

from run_setup import small_config, write_pictures  # noqa: E402

from trainer_core.config import TrainConfig  # noqa: E402


@pytest.fixture(scope="session")
def micro_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the micro toy; tests only read it."""
    from trainer_core.toy.micro import make_micro

    return make_micro(tmp_path_factory.mktemp("micro"))


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six drawn pictures in two aspect ratios with captions; tests only read them."""
    return write_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture
def config_for(micro_model: Path, pictures: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """`small_config` with results in a folder of the name given first; sections change it."""

    def make(name: str = "out", **sections: dict[str, Any]) -> TrainConfig:
        return small_config(micro_model, pictures, tmp_path / name, **sections)

    return make
