"""One real ComfyUI for all tests of this folder; they are skipped, with the reason, where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # server, graphs, under --import-mode=importlib

from server import ComfyUI, missing  # noqa: E402

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := missing():
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """The shared server; every test uses output names of its own."""
    server = ComfyUI(tmp_path_factory.mktemp("comfyui") / "base", packs=(HERE / "probe_pack",))
    try:
        server.wait_until_up()
        yield server
    finally:
        server.stop()
