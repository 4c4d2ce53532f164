"""The awkward inputs, written once a session, and a very small VAE."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL

from trainer_core.config import BucketConfig, DatasetConfig
from trainer_core.data import ScanReport, scan_dataset

NATIVE = 64


@dataclass(frozen=True)
class Case:
    """One awkward data set: its folder and what must happen."""

    name: str
    data: Path
    expected: dict[str, Any]

    def options(self) -> dict[str, Any]:
        """DatasetConfig fields that the case is run with."""
        settings = self.expected["settings"]
        return {"recursive": bool(settings.get("recursive")), "batch_size": settings.get("batch_size", 1)}


def load_generator() -> Any:
    path = Path(__file__).parents[2] / "fixtures" / "awkward_inputs.py"
    spec = importlib.util.spec_from_file_location("awkward_inputs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def generator() -> Any:
    """The module that draws the awkward inputs."""
    return load_generator()


@pytest.fixture(scope="session")
def cases(generator: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    root = tmp_path_factory.mktemp("awkward")
    names = generator.write_cases(root)
    return {
        name: Case(name, root / name / "data", json.loads((root / name / "expected.json").read_text()))
        for name in names
    }


@pytest.fixture
def scan() -> Callable[..., ScanReport]:
    """`scan(folder, **DatasetConfig fields)` at the toy's size."""

    def run(
        folder: Path | str, *, bucket: BucketConfig | None = None, native: int = NATIVE, **options: Any
    ) -> ScanReport:
        return scan_dataset(DatasetConfig(path=str(folder), **options), bucket or BucketConfig(), native)

    return run


@pytest.fixture(scope="session")
def vae() -> AutoencoderKL:
    """An untrained VAE with SDXL's factor of 8 and 4 channels, small enough for hundreds of pictures."""
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
    ).eval()
