"""Several tabs on one run, a tab closed while it trains, and ComfyUI restarted in the middle: in a real browser.

Slow: two trainings and a restart on both front ends. tests/comfyui/test_restarted_server.py is the same restart without
a browser; tests/web/client.test.js has the single rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from panel_setup import ROOT, comfyui_with, pictures, toy_graph

if TYPE_CHECKING:
    from browser_page import ComfyPage
    from comfyui_server import ComfyUI
    from playwright.sync_api import Browser, BrowserContext

pytestmark = pytest.mark.slow

STEPS = 120
"""More than a slow tab and a server that ends can miss: the run must still be going on when it is stopped again."""
NODES, LINKS = toy_graph(
    dataset={"folder": "toy"},
    monitor=True,
    output_name="unbroken",
    steps=STEPS,
    preview_prompts="a red heart --s 2",
    preview_every=8,
    save_every=0,
    validate_every=0,
    more_settings="validation.enabled = false",
)

SHOWN = """() => {
  const text = (selector) => document.querySelector(selector)?.innerText ?? null;
  return {
    badge: text(".ss-card .ss-badge"), where: text(".ss-where"), figures: text(".ss-figures"), log: text(".ss-log"),
    pictures: document.querySelectorAll(".ss-thumb img").length,
    train: text("[data-testid=safe-scaler-train]"), monitor: text("[data-testid=safe-scaler-monitor]"),
  };
}"""
"""What a person reads in a tab."""


@pytest.fixture(scope="module", params=["newest", "1.27.10"])
def comfyui(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    settings = {"Comfy.VueNodes.Enabled": False, "SafeScaler.Panel.ConfirmStop": False}
    base = tmp_path_factory.mktemp("tabs") / "base"
    with comfyui_with(request.param, base, settings, packs=(ROOT / "tests" / "comfyui" / "probe_pack",)) as server:
        yield server


@pytest.fixture
def tabs(browser: Browser, comfyui: ComfyUI) -> Iterator[BrowserContext]:
    context = browser.new_context()
    yield context
    context.close()


def open_tab(tabs: BrowserContext, comfyui: ComfyUI) -> ComfyPage:
    """A new tab with the panel and, but for the first one, the graph that the browser kept."""
    from browser_page import ComfyPage

    page = ComfyPage(tabs, comfyui.port, width=1600)
    page.open()
    page.show_graph(0.62, 620, 110)
    page.open_panel()
    return page


def press(page: ComfyPage, button: str) -> None:
    page.page.locator(f"[data-testid=safe-scaler-{button}]").click()


def badge(text: str) -> str:
    return f"document.querySelector('.ss-card .ss-badge')?.textContent === {text!r}"


def past(step: int) -> str:
    return f"window.safeScaler.client.current?.run.step >= {step}"


def assert_same(one: ComfyPage, other: ComfyPage) -> dict[str, Any]:
    """Both tabs come to show the same of a run that stands still; returns what."""
    shown: dict[str, Any] = {}
    for _ in range(20):
        one.page.wait_for_timeout(1000)
        shown = one.run(SHOWN)
        if other.run(SHOWN) == shown:
            break
    assert other.run(SHOWN) == shown
    assert other.state() == one.state()
    return shown


@pytest.mark.timeout(2400)
def test_tabs_share_a_run_and_a_restarted_server_goes_on_with_it(
    tabs: BrowserContext, comfyui: ComfyUI, tmp_path: Path
) -> None:
    first = open_tab(tabs, comfyui)
    first.build(NODES, LINKS)
    first.queue()
    first.page.wait_for_timeout(500)
    first.set_train_widgets(output_name="restarted")
    first.queue()
    first.wait("window.safeScaler.client.current?.run.name === 'restarted'", 600_000)
    first.wait(past(3), 600_000)

    second = two_tabs(first, open_tab(tabs, comfyui))
    third = a_closed_tab(first, second, tabs, comfyui)
    run_id, step = a_restart([second, third], comfyui)
    fourth = open_tab(tabs, comfyui)
    offers = f"'Stopped · step {step} of {STEPS} · Run goes on'"
    fourth.wait(f"document.querySelector('[data-testid=safe-scaler-train]')?.innerText.startsWith({offers})")
    fourth.wait(f"{badge('Stopped')} && document.querySelectorAll('.ss-thumb img').length > 0")
    fourth.page.wait_for_timeout(1000)
    fourth.picture(pictures(tmp_path) / f"restarted_{comfyui.front_end}.png")  # type: ignore[attr-defined]

    fourth.queue()
    everywhere = (second, third, fourth)
    for page in everywhere:
        page.wait(badge("Running"))
        page.wait(past(step + 2), 600_000)
    press(third, "stop")
    for page in everywhere:
        page.wait(badge("Stopped"))
    assert second.state() == third.state() == fourth.state()
    second.queue()
    for page in everywhere:
        page.wait(badge("Finished"), 900_000)
        assert page.state()["id"] == run_id
        assert page.state()["points"] == STEPS

    from test_interruptions import tensors

    loras = comfyui.output / "loras"
    assert tensors(loras / "restarted.safetensors") == tensors(loras / "unbroken.safetensors")
    for page in everywhere:
        down = [problem for problem in page.problems if "ERR_CONNECTION_REFUSED" in problem]
        assert len(down) < 30, "a server that is away is asked too often"
        assert [problem for problem in page.problems if problem not in down] == []
    assert first.problems == []


def two_tabs(first: ComfyPage, second: ComfyPage) -> ComfyPage:
    """What is asked in one tab shows in the other."""
    second.wait("window.safeScaler.client.current?.loaded")
    press(second, "pause")
    for page in (first, second):
        page.wait(badge("Paused"))
    shown = assert_same(first, second)
    assert shown["badge"] == "Paused"
    assert shown["train"].startswith("Paused · step ")
    press(first, "pause")  # its label is "Go on" now
    for page in (first, second):
        page.wait(badge("Running"))
    assert "Pausing" not in second.page.locator(".ss-answer").inner_text()
    return second


def a_closed_tab(first: ComfyPage, second: ComfyPage, tabs: BrowserContext, comfyui: ComfyUI) -> ComfyPage:
    """The tab that queued the run is closed: the run goes on, and a new tab gets all of it from the snapshot."""
    step = second.state()["step"]
    first.page.close()
    second.wait(past(step + 2))
    press(second, "pause")
    second.wait(badge("Paused"))
    third = open_tab(tabs, comfyui)
    third.wait(badge("Paused"))
    shown = assert_same(second, third)
    state = third.state()
    assert (state["first"], state["points"]) == (1, state["step"])
    assert shown["pictures"] > 0
    assert shown["train"].startswith("Paused · step ")
    press(third, "pause")
    second.wait(badge("Running"))
    return third


def a_restart(pages: list[ComfyPage], comfyui: ComfyUI) -> tuple[str, int]:
    """As with ComfyUI-Manager's button; returns the run and the step at which its worker saved."""
    run_id = pages[0].state()["id"]
    comfyui.restart("exec")
    for page in pages:
        page.wait(badge("Stopped"))
        page.wait("document.querySelector('.ss-message')?.innerText.includes('Press Run with the same graph to go on')")
        page.wait("document.querySelector('.ss-notice').hidden")
    step = pages[0].state()["step"]
    assert 0 < step < STEPS
    assert {page.state()["step"] for page in pages} == {step}
    assert comfyui.get(f"/safe_scaler/api/v1/runs/{run_id}")["state"] == "stopped"
    return run_id, step
