"""The toy as folder, as single file and loaded; loaded once a session because every test here reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer_core.models import SDXLModel, load_sdxl, save_single_file


@pytest.fixture(scope="session")
def toy() -> SDXLModel:
    return load_sdxl("toy")


@pytest.fixture(scope="session")
def toy_file(toy: SDXLModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy as an SGM single file in fp16 (the type it is shipped in, so nothing is rounded)."""
    return save_single_file(toy, tmp_path_factory.mktemp("single") / "toy.safetensors", torch.float16)
