"""The panel in a real browser, in a real ComfyUI, on a real run of the toy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from browser_page import ComfyPage
    from playwright.sync_api import Browser
    from server import ComfyUI

ROOT = Path(__file__).resolve().parents[2]
TOY = "toy (built in, for a first try)"
STOP = "[data-testid=safe-scaler-stop]"

NODES: list[dict[str, Any]] = [
    {"key": "load", "type": "SafeScalerLoadSDXL", "pos": [20, 60], "widgets": {"checkpoint": TOY, "precision": "fp32"}},
    {"key": "data", "type": "SafeScalerDataset", "pos": [20, 260], "size": [300, 720], "widgets": {"folder": "toy"}},
    {"key": "targets", "type": "SafeScalerTargets", "pos": [360, 60], "size": [330, 450], "widgets": {"rank": 4}},
    {"key": "monitor", "type": "SafeScalerGradientMonitor", "pos": [360, 580], "size": [330, 400]},
    {"key": "train", "type": "SafeScalerTrain", "pos": [740, 60], "size": [330, 900], "widgets": {
        "purpose": "own settings", "vram": "own settings", "output_name": "panel", "steps": 400, "learning_rate": 1e-3,
        "train_seed": 7, "preview_prompts": "a red heart --s 2", "preview_every": 3, "device": "cpu", "batch_size": 1,
        "validate_every": 5, "more_settings": "preview.at_start = true"}},
]  # fmt: skip
LINKS = [
    ("load", "model", "data", "model"),
    ("load", "model", "train", "model"),
    ("data", "dataset", "train", "dataset"),
    ("targets", "targets", "train", "targets"),
    ("monitor", "monitor", "train", "monitor"),
]


@pytest.fixture(scope="module", params=["1.27.10", pytest.param("newest", marks=pytest.mark.slow)])
def comfyui(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    from front_ends import static_root
    from server import ComfyUI

    root = static_root(request.param)
    if root is None:
        pytest.skip(f"the front end {request.param} can be neither found nor downloaded")
    server = ComfyUI(tmp_path_factory.mktemp("browser") / "base", "--front-end-root", str(root))
    server.front_end = request.param  # type: ignore[attr-defined]
    try:
        server.wait_until_up()
        # Else a window of templates covers the page.
        server.post("/api/settings/Comfy.TutorialCompleted", True)
        server.post("/api/settings/SafeScaler.Panel.ConfirmStop", False)
        yield server
    finally:
        server.stop()


def pictures(tmp_path: Path) -> Path:
    """Where screenshots go: docs/pictures when SAFE_SCALER_PICTURES is set, else a temporary folder."""
    return ROOT / "docs" / "pictures" if os.environ.get("SAFE_SCALER_PICTURES") else tmp_path


def open_page(browser: Browser, comfyui: ComfyUI, **size: int) -> ComfyPage:
    from browser_page import ComfyPage

    page = ComfyPage(browser, comfyui.port, **size)
    page.open()
    return page


def test_a_run_is_watched_reloaded_and_stopped(browser: Browser, comfyui: ComfyUI, tmp_path: Path) -> None:
    """Panel opens, charts move, pictures appear, a reload restores all of it, stop saves."""
    page = open_page(browser, comfyui, width=1600)
    assert page.run("() => document.querySelector('link#safe-scaler-styles') === null")  # nothing before it is needed
    page.build(NODES, LINKS)
    page.open_panel()
    page.queue()
    page.wait("window.safeScaler.client.current?.run.step >= 2 && document.querySelector('.ss-charts canvas')", 120_000)
    before, step = page.chart_pixels(), page.state()["step"]
    page.wait(f"window.safeScaler.client.current.run.step >= {step + 3}")
    page.wait(f"document.querySelector('.ss-progress').getAttribute('aria-valuenow') >= {step + 3}")
    assert page.chart_pixels() != before
    page.wait("document.querySelectorAll('.ss-thumb img').length >= 2")
    page.wait("[...document.querySelectorAll('.ss-compare img')].every((one) => one.complete && one.naturalWidth > 0)")
    monitor = page.page.locator("[data-testid=safe-scaler-monitor]").first
    assert "step" in monitor.inner_text()
    assert monitor.locator("canvas").count() >= 1
    assert "pictures" in page.page.locator("[data-testid=safe-scaler-scan]").first.inner_text()
    page.show_graph(0.85, 420, 30)
    page.page.wait_for_timeout(600)
    page.picture(pictures(tmp_path) / f"panel_running_{comfyui.front_end}.png")

    seen = page.state()
    page.reload()
    page.open_panel()
    page.wait("window.safeScaler.client.current?.loaded")
    restored = page.state()
    assert restored["id"] == seen["id"]
    assert restored["step"] >= seen["step"]
    assert (restored["first"], restored["points"]) == (1, restored["step"])
    assert restored["previews"] >= seen["previews"]
    assert restored["log"] >= seen["log"]
    page.wait(f"window.safeScaler.client.current.run.step > {restored['step']}")  # and it goes on moving
    page.wait("document.querySelector('[data-testid=safe-scaler-monitor]')?.innerText.includes('step')")

    page.page.locator(STOP).click()
    page.wait("window.safeScaler.client.current.run.state === 'stopped'")
    page.wait("document.querySelector('.ss-badge').textContent === 'Stopped'")
    run = comfyui.output / "safe_scaler" / seen["id"]
    assert list((run / "lora").glob("*.safetensors"))
    assert list((run / "checkpoints").glob("step-*"))
    assert page.problems == []
    assert "pack_under_test" not in "".join(comfyui.log.split("Traceback")[1:]).replace("custom_nodes/pack_under_test\n", "")
    page.page.close()
