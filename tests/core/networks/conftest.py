"""A micro toy SDXL (random weights, machinery only) and what the network tests do with it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_core.models import SDXLModel, load_sdxl
from trainer_core.toy.micro import make_micro

# Helpers that are no fixtures: under pytest's importlib mode a test cannot import its neighbour by itself.
for _name in ("network_cases", "judge_cases"):
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])


@pytest.fixture(scope="session")
def micro_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_micro(tmp_path_factory.mktemp("micro"))


@pytest.fixture(scope="session")
def shared_model(micro_folder: Path) -> SDXLModel:
    return load_sdxl(micro_folder)


@pytest.fixture
def model(shared_model: SDXLModel) -> Iterator[SDXLModel]:
    """The micro toy; what a failed test leaves on it is taken off, so that others do not fail with it."""
    weights = {module: dict(module._parameters) for root in shared_model.parts.values() for module in root.modules()}
    yield shared_model
    for module, parameters in weights.items():
        for key in [key for key in module.__dict__ if key == "forward" or key.startswith("_lycoris_")]:
            del module.__dict__[key]
        module._parameters.update(parameters)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):  # ours only: transformers has its own
            for key in [key for key, hook in hooks.items() if hook.__module__.startswith("trainer_core")]:
                del hooks[key]


@pytest.fixture(scope="session")
def kind_files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A file of every kind (`judge_cases.KINDS`), made once; `sdxl` is the model without them."""
    import judge_cases

    folder = tmp_path_factory.mktemp("kinds")
    sdxl = judge_cases.make_real_sdxl()
    probe = judge_cases.write_probe(sdxl, folder / "probe.safetensors")
    files = {}
    for kind, settings in judge_cases.KINDS.items():
        module = str(settings.get("network", "native"))
        if module != "native":
            pytest.importorskip(module.partition(":")[0], reason=f"'{module}' is not installed")
        files[kind] = judge_cases.write_kind(sdxl, kind, folder)
    return SimpleNamespace(sdxl=sdxl, probe=probe, files=files)
