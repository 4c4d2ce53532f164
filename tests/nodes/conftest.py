"""The pack as ComfyUI loads it (under another name), with a stand-in for ComfyUI."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "safe_scaler_pack_of_node_tests"


class Interrupted(Exception):
    """Stands for ComfyUI's InterruptProcessingException."""


@dataclass
class FakeComfyUI:
    """What the pack asked of ComfyUI, and what ComfyUI says."""

    root: Path
    interrupted: bool = False
    sent: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    bars: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    calls: list[str] = field(default_factory=list[str])

    def modules(self) -> dict[str, types.ModuleType]:
        folders = types.ModuleType("folder_paths")
        kinds = {"loras": [self.root / "models" / "loras", self.root / "output" / "loras"]}
        for kind in ("checkpoints", "vae"):
            kinds[kind] = [self.root / "models" / kind]

        def names(kind: str) -> list[str]:
            return sorted(file.name for folder in kinds[kind] for file in folder.glob("*.safetensors"))

        def full(kind: str, name: str) -> str | None:
            found = [folder / name for folder in kinds[kind] if (folder / name).is_file()]
            return str(found[0]) if found else None

        folders.get_filename_list, folders.get_full_path = names, full  # type: ignore[attr-defined]
        folders.get_folder_paths = lambda kind: [str(folder) for folder in kinds[kind]]  # type: ignore[attr-defined]
        for part in ("output", "input", "temp"):
            (self.root / part).mkdir(parents=True, exist_ok=True)
            setattr(folders, f"get_{part}_directory", lambda part=part: str(self.root / part))
        management = types.ModuleType("comfy.model_management")
        management.InterruptProcessingException = Interrupted  # type: ignore[attr-defined]
        management.processing_interrupted = lambda: self.interrupted  # type: ignore[attr-defined]
        management.interrupt_current_processing = lambda value: setattr(self, "interrupted", value)  # type: ignore[attr-defined]
        management.unload_all_models = lambda: self.calls.append("unload")  # type: ignore[attr-defined]
        management.soft_empty_cache = lambda: self.calls.append("empty")  # type: ignore[attr-defined]

        def throw() -> None:
            if self.interrupted:
                self.interrupted = False
                raise Interrupted

        management.throw_exception_if_processing_interrupted = throw  # type: ignore[attr-defined]
        comfy, helpers = types.ModuleType("comfy"), types.ModuleType("comfy.utils")
        helpers.ProgressBar = self._bar_class(throw)  # type: ignore[attr-defined]
        comfy.model_management, comfy.utils = management, helpers  # type: ignore[attr-defined]
        server = types.ModuleType("server")
        server.PromptServer = type("PromptServer", (), {})  # type: ignore[attr-defined]
        return {
            "folder_paths": folders,
            "comfy": comfy,
            "comfy.model_management": management,
            "comfy.utils": helpers,
            "server": server,
        }

    def _bar_class(self, throw: Any) -> type:
        bars = self.bars

        class Bar:
            def __init__(self, total: int) -> None:
                self.total = total

            def update_absolute(self, value: int, total: int) -> None:
                throw()  # as ComfyUI's own hook does
                bars.append((value, total))

        return Bar


@pytest.fixture(scope="session")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeComfyUI]:
    fake = FakeComfyUI(tmp_path_factory.mktemp("fake"))
    before = {name: sys.modules.get(name) for name in fake.modules()}
    sys.modules.update(fake.modules())
    yield fake
    for name, module in before.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module


@pytest.fixture(scope="session")
def pack(comfyui: FakeComfyUI) -> Any:
    """The pack's module; its parts are `pack.nodes.live` and so on."""
    spec = importlib.util.spec_from_file_location(NAME, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def part(pack: Any) -> Any:
    """`part("live")` is the module nodes/live.py of the pack."""
    return lambda name: importlib.import_module(f"{NAME}.nodes.{name}")


@pytest.fixture
def core(pack: Any) -> Any:
    """The pack's own copy of the core."""
    return importlib.import_module(f"{NAME}.trainer_core")
