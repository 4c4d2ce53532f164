"""In a real browser: captions edited, a run that waits, NaN told as rejected steps, sharing, deleting, a notice.

Slow: two trainings on both front ends. Its parts have quick tests in tests/core/panel, tests/web and tests/nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from panel_setup import comfyui_with, pictures, toy_graph

if TYPE_CHECKING:
    from browser_page import ComfyPage
    from comfyui_server import ComfyUI
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow
MARKUP = 'a <img src=x onerror="window.hacked=1"> cat'

SHORT = "preview.at_start = false\nvalidation.enabled = false"
POISON = f"{SHORT}\nlora.alpha = 1e38\nprecision.max_rejected_steps = 2\nsafety.ladder = false"
"""The first step moves lora_up off zero, and from then on the output is not finite."""

NODES, LINKS = toy_graph(
    dataset={"folder": "mine", "validation_split": 0.0},
    monitor=False,
    output_name="sound",
    steps=25,
    preview_prompts="none",
    save_every=0,
    validate_every=0,
    more_settings=SHORT,
)
FAKE_NOTICE = """window.notices = [];
  window.Notification = class { constructor(title, more) { window.notices.push([title, more.body]); }
    static get permission() { return "granted"; } static async requestPermission() { return "granted"; } };"""


@pytest.fixture(scope="module", params=["newest", "1.27.10"])
def comfyui(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    settings = {
        "Comfy.VueNodes.Enabled": False,
        "SafeScaler.Panel.ConfirmStop": False,
        "SafeScaler.Alerts.Notify": True,
    }
    base = tmp_path_factory.mktemp("captions") / "base"
    with comfyui_with(
        request.param, base, settings, before=lambda base: write_pictures(base / "input" / "mine")
    ) as server:
        yield server


def write_pictures(folder: Path) -> None:
    from PIL import Image

    folder.mkdir(parents=True)
    for index, (name, caption) in enumerate((("a", MARKUP), ("b", "a blue dog"), ("c", ""))):
        Image.new("RGB", (64, 64), (220 - 90 * index, 40 + 60 * index, 60)).save(folder / f"{name}.png")
        if caption:
            (folder / f"{name}.txt").write_text(caption, encoding="utf-8")


def captions_are(text: str) -> str:
    return f"document.querySelector('[data-testid=safe-scaler-captions]')?.innerText.includes({text!r})"


@pytest.mark.timeout(1800)
def test_captions_queue_rejected_steps_share_and_delete(browser: Browser, comfyui: ComfyUI, tmp_path: Path) -> None:
    from browser_page import ComfyPage

    front_end = comfyui.front_end  # type: ignore[attr-defined]
    page = ComfyPage(browser, comfyui.port, width=1700, height=1100)
    page.page.add_init_script(FAKE_NOTICE)
    page.open()
    page.build(NODES, LINKS)
    page.show_graph(0.62, 620, 110)
    page.open_panel()
    page.queue()
    page.set_train_widgets(output_name="poisoned", steps=8, more_settings=POISON)
    page.queue()

    # The second run waits, in the list and in its node; captions are locked while the first one trains.
    page.wait("document.querySelector('.ss-waiting')?.innerText.includes('poisoned')", 600_000)
    page.wait("document.querySelector('.ss-waiting')?.innerText.includes('Waiting for run sound')", 600_000)
    page.page.locator("[data-testid=safe-scaler-captions] summary").click()
    page.wait(captions_are("is training on these pictures"))
    assert page.run("() => document.querySelector('.ss-caption-text').readOnly") is True
    page.wait("document.querySelector('.ss-badge').textContent === 'Running'")
    page.wait("/step|left|Loading|Preparing/.test(document.querySelector('[data-testid=safe-scaler-train]').innerText)")
    page.picture(pictures(tmp_path) / f"queue_{front_end}.png")

    # NaN: rejected steps and a verdict, in words, and the run's end.
    page.wait("window.safeScaler.client.current?.run.name === 'poisoned'", 600_000)
    page.wait("window.safeScaler.client.current.run.state === 'failed'", 600_000)
    page.wait("document.querySelector('.ss-log')?.innerText.includes('Step rejected')")
    page.wait("document.querySelector('.ss-verdicts')?.innerText.includes('Non finite')")
    page.wait("document.querySelector('.ss-badge').textContent === 'Failed'")
    told = page.page.locator("[data-testid=safe-scaler-panel]").inner_text()
    assert str(comfyui.base) not in told
    assert "nothing was changed" in told
    assert comfyui.get("/system_stats")["system"]["comfyui_version"]
    page.wait("window.notices.some(([title, body]) => title === 'sound' && body.includes('finished'))")
    assert page.run("() => window.notices.map(([title]) => title)") == ["sound", "poisoned"]
    page.page.set_viewport_size({"width": 1700, "height": 1800})
    page.page.wait_for_timeout(800)
    page.picture(pictures(tmp_path) / f"rejected_{front_end}.png", "[data-testid=safe-scaler-panel]")

    close_dialog(page, front_end)
    edit_captions(page, comfyui, tmp_path)
    share_and_delete(page, comfyui, tmp_path)

    # A reload finds the scan report again, by its id; the light palette is followed.
    comfyui.post("/api/settings/Comfy.ColorPalette", "light")
    page.reload()
    page.wait("document.querySelector('[data-testid=safe-scaler-scan]')?.innerText.includes('3 pictures usable')")
    page.open_panel()
    page.wait("document.querySelector('.ss-charts canvas')")
    page.wait("document.querySelector('[data-testid=safe-scaler-panel]').dataset.theme === 'light'")
    page.page.set_viewport_size({"width": 1700, "height": 1100})
    page.page.wait_for_timeout(800)
    page.picture(pictures(tmp_path) / f"light_{front_end}.png")
    assert page.run("() => window.hacked === undefined")
    assert page.problems == []
    page.page.close()


def close_dialog(page: ComfyPage, front_end: str) -> None:
    """1.27.10 shows a failed prompt in a dialog that covers the page, when the prompt ends: after the run did."""
    dialog = page.page.locator(".p-dialog-mask")
    if front_end == "1.27.10":
        dialog.wait_for(state="visible")
    if dialog.count():
        page.page.keyboard.press("Escape")
        dialog.wait_for(state="hidden")


def edit_captions(page: ComfyPage, comfyui: ComfyUI, tmp_path: Path) -> None:
    """Markup is text; a caption is written into its file; one that changed meanwhile is not overwritten."""
    section = page.page.locator("[data-testid=safe-scaler-captions]")
    if not page.run("() => document.querySelector('[data-testid=safe-scaler-captions]').open"):
        section.locator("summary").click()
    page.wait("[...document.querySelectorAll('.ss-caption-text')].length === 3")
    page.wait("[...document.querySelectorAll('.ss-caption-text')].every((one) => !one.readOnly)")
    page.wait("[...document.querySelectorAll('.ss-caption-row img')].every((one) => one.naturalWidth > 0)")
    texts = section.locator(".ss-caption-text")
    assert texts.nth(0).input_value() == MARKUP
    texts.nth(2).fill("eine grüne Fläche, 绿色")
    texts.nth(2).press("Control+Enter")
    page.wait(captions_are("Saved. The next Run reads it."))
    folder = comfyui.base / "input" / "mine"
    assert (folder / "c.txt").read_text(encoding="utf-8") == "eine grüne Fläche, 绿色\n"
    (folder / "b.txt").write_text("by an editor", encoding="utf-8")
    texts.nth(1).fill("mine")
    section.get_by_role("button", name="Save").click()
    page.wait(captions_are("has been changed by somebody else"))
    assert (folder / "b.txt").read_text(encoding="utf-8") == "by an editor"
    page.picture(pictures(tmp_path) / f"captions_{comfyui.front_end}.png", "[data-testid=safe-scaler-captions]")  # type: ignore[attr-defined]
    page.problems[:] = [one for one in page.problems if not ("409" in one and "/captions/" in one)]


def share_and_delete(page: ComfyPage, comfyui: ComfyUI, tmp_path: Path) -> None:
    panel = page.page.locator("[data-testid=safe-scaler-panel]")
    panel.locator(".ss-picker summary").click()
    panel.locator(".ss-run-choice", has_text="sound").click()
    page.wait("document.querySelector('.ss-badge').textContent === 'Finished'")
    page.page.locator("[data-testid=safe-scaler-share] summary").click()
    page.wait("document.querySelector('.ss-share-fields')?.innerText.includes('sound.safetensors')")
    card = panel.locator("textarea.ss-share-text")
    assert "sound" in card.input_value()
    page.page.locator("[data-testid=safe-scaler-share] select").select_option("minimal")
    page.wait("document.querySelector('textarea.ss-share-text').value.length > 50")
    page.picture(pictures(tmp_path) / f"share_{comfyui.front_end}.png", "[data-testid=safe-scaler-share]")  # type: ignore[attr-defined]

    runs = {path.name for path in (comfyui.output / "safe_scaler").glob("2*")}
    panel.locator("li", has_text="poisoned").get_by_role("button", name="Delete run").click()
    page.page.get_by_role("button", name="Confirm").click()
    gone = "![...document.querySelectorAll('.ss-run-name')].some((one) => one.textContent === 'poisoned')"
    page.wait(f"{gone} || document.querySelector('[role=alert]')?.innerText.includes('not deleted')")
    assert page.run(f"() => {gone}"), page.problems
    left = {path.name for path in (comfyui.output / "safe_scaler").glob("2*")}
    assert len(runs - left) == 1
    assert (comfyui.output / "loras" / "sound.safetensors").is_file()
