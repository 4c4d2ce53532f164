"""A real browser on a real ComfyUI; skipped, with the reason, where something is missing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "comfyui")]  # browser_page, front_ends, comfyui_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def missing() -> str:
    """Why no browser test can run here; empty when they can."""
    if importlib.util.find_spec("playwright") is None:
        return "no Playwright: pip install playwright"
    if importlib.util.find_spec("websocket") is None:
        return "no websocket-client: pip install websocket-client"
    from browser_page import chromium
    from comfyui_server import missing as no_comfyui

    return no_comfyui() or ("" if chromium() else "no Chromium: apt-get install chromium")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := missing():
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from browser_page import chromium
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # No sandbox: tests run as root in containers. The pages are our own server's.
        instance = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield instance
        instance.close()
