"""The gradio twin on the oldest, a middle and the newest gradio, each in an environment of its own.

The environments are made on first use (minutes) below SAFE_SCALER_GRADIO (default ~/.cache/safe-scaler), so all of this
is outside the default run: pytest -m slow tests/panel_twin
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
RUN = "20261129T171500Z-1a2b"
PACKAGES = {
    # What AUTOMATIC1111 1.10 and Forge ship with these versions.
    "3.41.2": ["fastapi==0.94.0", "pydantic<2", "httpx==0.24.1", "numpy<2", "huggingface-hub<0.27"],
    "4.40.0": ["fastapi==0.104.1", "pydantic==2.8.2", "httpx==0.24.1", "numpy<2", "huggingface-hub<0.27"],
    "newest": [],
}


@pytest.fixture(scope="module", params=list(PACKAGES))
def python(request: pytest.FixtureRequest) -> Path:
    """The Python of an environment with that gradio."""
    version: str = request.param
    store = Path(os.environ.get("SAFE_SCALER_GRADIO") or "~/.cache/safe-scaler").expanduser()
    folder = store / f"gradio-{version}"
    executable = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if (
        subprocess.run([executable, "-c", "import gradio"], capture_output=True).returncode
        if executable.exists()
        else 1
    ):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        gradio = "gradio" if version == "newest" else f"gradio=={version}"
        command = [str(executable), "-m", "pip", "install", "--quiet", gradio, *PACKAGES[version], "psutil"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"gradio {version} cannot be installed here: {done.stderr[-300:]}")
    return executable


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("recorded_run", ROOT / "tests" / "core" / "panel" / "recorded_run.py")
    assert spec is not None
    assert spec.loader is not None
    runs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runs)
    folder = tmp_path_factory.mktemp("output")
    runs.make_run(folder, runs.finished())
    return folder


@contextmanager
def serving(command: list[str], port: int, log: Path) -> Iterator[int]:
    with log.open("wb") as stream:
        process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 240
        while ask(port, "/safe_scaler/panel/")[0] not in (200, 401):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        process.wait(20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, path: str, method: str = "GET", body: Any = None, **headers: str) -> tuple[int, bytes]:
    """(status, body); the path is sent as it is. 0 while nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    raw = None if body is None else json.dumps(body)
    try:
        connection.request(method, path, raw, {name.replace("_", "-"): value for name, value in headers.items()})
        reply = connection.getresponse()
        return reply.status, reply.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


def check_answers(port: int) -> None:
    status, text = ask(port, "/safe_scaler/api/v1/runs")
    assert status == 200
    assert [run["run_id"] for run in json.loads(text)["runs"]] == [RUN]
    status, picture = ask(port, f"/safe_scaler/api/v1/runs/{RUN}/previews/10-0")
    assert (status, picture[:4]) == (200, b"\x89PNG")
    assert ask(port, "/safe_scaler/web/js/panel.js")[0] == 200
    status, text = ask(port, "/safe_scaler/api/v1/data_sets")
    assert (status, json.loads(text)) == (200, {"data_sets": []})
    assert ask(port, "/safe_scaler/api/v1/data_sets/..%2f..%2fetc/captions")[0] in (400, 404)
    for path in ("js/../../pyproject.toml", "..%2f..%2fpyproject.toml", "package.json", "js/", "%00"):
        assert ask(port, f"/safe_scaler/web/{path}")[0] in (400, 404), path
    asked = {"Content_Type": "application/json"}
    status, text = ask(port, "/safe_scaler/api/v1/config/refresh_rate", "PATCH", {"interval_ms": 500}, **asked)
    assert (status, json.loads(text)) == (200, {"interval_ms": 500})
    assert ask(port, "/safe_scaler/api/v1/config/refresh_rate", "PATCH", {"interval_ms": 500})[0] == 415
    foreign = {**asked, "Origin": "http://evil.example"}
    assert ask(port, f"/safe_scaler/api/v1/runs/{RUN}", "DELETE", {"confirm": RUN}, **foreign)[0] == 403
    assert ask(port, "/safe_scaler/api/v1/config/refresh_rate", "PATCH", {"x": "y" * 70_000}, **asked)[0] == 413


def check_page(port: int, tab: str | None = None) -> None:
    """The panel appears inside gradio's page, with chart and picture, and without errors at our addresses."""
    if importlib.util.find_spec("playwright") is None or shutil.which("chromium") is None:
        return
    from playwright.sync_api import sync_playwright

    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.on(
            "response",
            lambda reply: problems.append(reply.url) if reply.status >= 400 and "scaler" in reply.url else None,
        )
        page.on("pageerror", lambda error: problems.append(str(error)) if "safe_scaler" in str(error.stack) else None)
        page.goto(f"http://127.0.0.1:{port}/", timeout=120_000)
        if tab:
            page.locator("button", has_text=tab).first.click(timeout=120_000)  # no role in gradio 3
        frame = page.frame_locator("iframe[title^=Safe-Scaler]").first
        frame.locator(".ss-charts canvas").first.wait_for(timeout=120_000)
        frame.locator(".ss-thumb img").first.wait_for(timeout=120_000)
        assert frame.locator(".ss-badge").first.inner_text() == "Finished"
        browser.close()
    assert problems == []


def test_the_panel_command(python: Path, output: Path, tmp_path: Path) -> None:
    port = free_port()
    command = [str(python), "-m", "trainer_core", "panel", "--output_dir", str(output), "--port", str(port)]
    with serving(command, port, tmp_path / "panel.log"):
        check_answers(port)
        assert ask(port, "/safe_scaler/api/v1/runs", Host="evil.example")[0] == 403
        check_page(port)
        taken = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert taken.returncode == 2
        assert "Give another --port." in taken.stderr


def test_the_tab_in_a_web_ui(python: Path, output: Path, tmp_path: Path) -> None:
    if "newest" in str(python):
        pytest.skip("no web UI ships this gradio; the command above is tested on it")
    port = free_port()
    command = [str(python), str(HERE / "webui_host.py"), str(ROOT), str(output), str(port)]
    with serving(command, port, tmp_path / "webui.log"):
        check_answers(port)
        check_page(port, tab="Safe-Scaler")


def test_a_web_ui_with_a_password_guards_the_panel_too(python: Path, output: Path, tmp_path: Path) -> None:
    if "newest" in str(python):
        pytest.skip("no web UI ships this gradio")
    port = free_port()
    command = [str(python), str(HERE / "webui_host.py"), str(ROOT), str(output), str(port), "me:secret"]
    with serving(command, port, tmp_path / "webui.log"):
        for path in ("/safe_scaler/panel/", "/safe_scaler/api/v1/runs", "/safe_scaler/web/js/panel.js"):
            assert ask(port, path)[0] == 401, path
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", "/login", "username=me&password=secret", form)
        reply = connection.getresponse()
        reply.read()
        cookies = [value.split(";")[0] for name, value in reply.getheaders() if name.lower() == "set-cookie"]
        assert reply.status == 200
        assert ask(port, "/safe_scaler/api/v1/runs", Cookie="; ".join(cookies))[0] == 200
        assert ask(port, "/safe_scaler/api/v1/runs", Cookie="access-token=wrong")[0] == 401
