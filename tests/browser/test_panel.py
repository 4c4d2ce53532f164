"""The panel in a real browser, in a real ComfyUI, on a real run of the toy."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from panel_setup import comfyui_with, pictures, toy_graph

if TYPE_CHECKING:
    from browser_page import ComfyPage
    from comfyui_server import ComfyUI
    from playwright.sync_api import Browser

STOP = "[data-testid=safe-scaler-stop]"
MONITOR_DRAWS = "document.querySelectorAll('[data-testid=safe-scaler-monitor] canvas').length >= 1"
MONITOR_SHOWS_A_STEP = "document.querySelector('[data-testid=safe-scaler-monitor]')?.innerText.includes('step')"

NODES, LINKS = toy_graph(
    dataset={"folder": "toy"},
    monitor=True,
    output_name="panel",
    steps=400,
    preview_prompts="a red heart --s 2",
    preview_every=3,
    validate_every=5,
    more_settings="preview.at_start = true\nvalidation.max_pictures = 2\nvalidation.bands = 2",
)


@pytest.fixture(scope="module", params=["newest", pytest.param("1.27.10", marks=pytest.mark.slow)])
def comfyui(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    base = tmp_path_factory.mktemp("browser") / "base"
    with comfyui_with(request.param, base, {"SafeScaler.Panel.ConfirmStop": False}) as server:
        yield server


def open_page(browser: Browser, comfyui: ComfyUI, **size: int) -> ComfyPage:
    from browser_page import ComfyPage

    page = ComfyPage(browser, comfyui.port, **size)
    page.open()
    return page


def renderer(comfyui: ComfyUI, *, vue: bool) -> None:
    """Nodes drawn by Vue (new front ends only) or on the canvas, from the next load of a page."""
    comfyui.post("/api/settings/Comfy.VueNodes.Enabled", vue)


@pytest.mark.timeout(1500)
def test_a_run_is_watched_reloaded_and_stopped(browser: Browser, comfyui: ComfyUI, tmp_path: Path) -> None:
    """Panel opens, charts move, pictures appear, a reload (into the other renderer) restores all of it, stop saves."""
    front_end = comfyui.front_end  # type: ignore[attr-defined]
    renderer(comfyui, vue=False)
    page = open_page(browser, comfyui, width=1600)
    page.build(NODES, LINKS)
    page.show_graph(0.62, 620, 110)
    page.open_panel()
    page.queue()
    # On a machine with much else to do it takes minutes until the first step.
    page.wait("window.safeScaler.client.current?.run.step >= 2 && document.querySelector('.ss-charts canvas')", 600_000)
    before, step = page.chart_pixels(), page.state()["step"]
    page.wait(f"window.safeScaler.client.current.run.step >= {step + 3}")
    page.wait(f"document.querySelector('.ss-progress').getAttribute('aria-valuenow') >= {step + 3}")
    assert page.chart_pixels() != before
    page.wait("document.querySelectorAll('.ss-thumb img').length >= 2")
    page.wait("[...document.querySelectorAll('.ss-compare img')].every((one) => one.complete && one.naturalWidth > 0)")
    page.wait(MONITOR_SHOWS_A_STEP)
    page.wait(MONITOR_DRAWS)
    assert "pictures" in page.page.locator("[data-testid=safe-scaler-scan]").first.inner_text()
    page.picture(pictures(tmp_path) / f"graph_running_{front_end}.png")

    seen = page.state()
    renderer(comfyui, vue=front_end != "1.27.10")  # there it was an experiment, without widgets of packs
    page.reload()
    page.open_panel()
    page.wait("window.safeScaler.client.current?.loaded")
    restored = page.state()
    assert restored["id"] == seen["id"]
    assert restored["step"] >= seen["step"]
    assert (restored["first"], restored["points"]) == (1, restored["step"])
    assert restored["previews"] >= seen["previews"]
    assert restored["log"] >= seen["log"]
    page.show_graph(0.62, 620, 110)
    page.wait(MONITOR_SHOWS_A_STEP)
    page.wait(MONITOR_DRAWS)
    page.wait(f"window.safeScaler.client.current.run.step > {restored['step']}")  # and it goes on moving
    after = page.state()  # read once: the run goes on between two looks
    assert after["points"] == after["step"]
    page.page.wait_for_timeout(500)
    page.picture(pictures(tmp_path) / f"monitor_{front_end}.png", "[data-testid=safe-scaler-monitor]")
    page.picture(pictures(tmp_path) / f"graph_reloaded_{front_end}.png")

    page.page.locator(STOP).click()
    page.wait("window.safeScaler.client.current.run.state === 'stopped'")
    page.wait("document.querySelector('.ss-badge').textContent === 'Stopped'")
    run = comfyui.output / "safe_scaler" / seen["id"]
    assert list((run / "lora").glob("*.safetensors"))
    assert list((run / "checkpoints").glob("step-*"))
    page.page.set_viewport_size({"width": 1600, "height": 2900})
    page.page.wait_for_timeout(800)
    page.picture(pictures(tmp_path) / f"panel_{front_end}.png", "[data-testid=safe-scaler-panel]")
    print("last frame of the panel:", page.run("() => document.querySelector('.ss-panel').dataset.frameMs"), "ms")
    assert page.problems == []
    assert pack_errors(comfyui.log) == []
    page.page.close()


def pack_errors(log: str) -> list[str]:
    """Tracebacks in ComfyUI's log that go through the pack. (ComfyUI logs some of its own without torchaudio.)"""
    return [
        part for part in log.split("Traceback (most recent call last)")[1:] if "pack_under_test/nodes" in part[:3000]
    ]


def test_the_routes_refuse_what_they_should(comfyui: ComfyUI) -> None:
    """Through ComfyUI's own server: what is no id, no JSON, too long, or comes from a foreign page."""
    base = "/safe_scaler/api/v1"
    runs = comfyui.get(f"{base}/runs")["runs"]
    assert comfyui.get(f"/api{base}/runs")["runs"] == runs
    run_id = runs[0]["run_id"]
    for path in (
        "..",
        "%2e%2e",
        "..%2f..%2fetc",
        "%00",
        f"{run_id}%2f..%2f..",
        f"{run_id}/previews/..%2f..%2fconfig.json",
    ):
        assert ask(comfyui, "GET", f"{base}/runs/{path}") in (400, 404), path
    assert ask(comfyui, "GET", f"{base}/runs/{run_id}/../../../../config.json") in (400, 404)
    assert ask(comfyui, "PATCH", f"{base}/config/refresh_rate", b'{"interval_ms": 250}') == 415
    json_type = {"Content-Type": "application/json"}
    assert ask(comfyui, "PATCH", f"{base}/config/refresh_rate", b'{"interval_ms": 250}', **json_type) == 200
    assert ask(comfyui, "PATCH", f"{base}/config/refresh_rate", b'{"interval_ms": 50}', **json_type) == 400
    assert ask(comfyui, "POST", f"{base}/runs/{run_id}/commands", b" " * 70_000, **json_type) == 413
    foreign = {**json_type, "Origin": "http://evil.example"}
    assert ask(comfyui, "DELETE", f"{base}/runs/{run_id}", b"{}", **foreign) == 403
    assert ask(comfyui, "GET", f"{base}/runs", Origin="http://evil.example", Host=f"192.168.0.9:{comfyui.port}") == 403
    assert ask(comfyui, "POST", f"{base}/runs/{run_id}/commands", b'{"cmd": "explode"}', **json_type) == 400
    data_set = comfyui.get(f"{base}/data_sets")["data_sets"][0]["id"]
    captions = f"{base}/data_sets/{data_set}/captions"
    row = comfyui.get(captions)["rows"][0]
    change = json.dumps({"caption": "x", "version": row["version"]}).encode()
    for path in ("..%2f..%2fevil", "%2e%2e", "0" * 16, "%00", "a.png"):
        assert ask(comfyui, "PATCH", f"{captions}/{path}", change, **json_type) in (400, 404, 409), path
        assert ask(comfyui, "GET", f"{base}/data_sets/{path}/captions") in (400, 404), path
        assert ask(comfyui, "GET", f"{base}/data_sets/{data_set}/pictures/{path}") in (400, 404), path
    assert ask(comfyui, "PATCH", f"{captions}/{row['key']}", change, **foreign) == 403
    assert ask(comfyui, "PATCH", f"{captions}/{row['key']}", change) == 415
    assert ask(comfyui, "PATCH", f"{captions}/{row['key']}", b" " * 70_000, **json_type) == 413
    assert ask(comfyui, "PATCH", f"{captions}/{row['key']}", change, **json_type) == 409  # the toy's own pictures


def test_the_heartbeat_comes(comfyui: ComfyUI) -> None:
    socket = comfyui.connect("heartbeat")
    socket.settimeout(30)
    try:
        while True:
            frame = socket.recv()
            message = json.loads(frame) if isinstance(frame, str) else {}
            if message.get("type") == "safe_scaler.ping":
                break
    finally:
        socket.close()
    assert message["data"]["type"] == "ping"
    assert abs(message["data"]["ts"] - time.time()) < 30


def ask(comfyui: ComfyUI, method: str, path: str, body: bytes | None = None, **headers: str) -> int:
    """Status of a request whose path is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", comfyui.port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()
