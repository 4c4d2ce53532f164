"""The example graphs and every node, opened in a real browser.

With SAFE_SCALER_PICTURES set the pictures beside the examples and on the nodes' help pages are made anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from panel_setup import comfyui_with

if TYPE_CHECKING:
    from browser_page import ComfyPage
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "example_workflows").glob("*.json"))
NODES = (
    "SafeScalerLoadSDXL", "SafeScalerDataset", "SafeScalerTargets", "SafeScalerGradientMonitor",
    "SafeScalerTrain", "SafeScalerResume", "SafeScalerReport", "SafeScalerPreview",
)  # fmt: skip
SAVED = bool(os.environ.get("SAFE_SCALER_PICTURES"))

FIT = """() => {
  const nodes = (app.rootGraph ?? app.graph).nodes, canvas = app.canvas.canvas.getBoundingClientRect();
  const left = Math.min(...nodes.map((n) => n.pos[0])) - 40, top = Math.min(...nodes.map((n) => n.pos[1])) - 70;
  const right = Math.max(...nodes.map((n) => n.pos[0] + n.size[0])) + 40;
  const bottom = Math.max(...nodes.map((n) => n.pos[1] + n.size[1])) + 40;
  const edge = 90;  // the sidebar and the top bar cover this much
  const scale = Math.min((canvas.width - edge) / (right - left), (canvas.height - edge) / (bottom - top), 1.6);
  app.canvas.ds.scale = scale;
  // A far view has no texts, and the canvas shows its frame rate: neither belongs into a picture.
  app.canvas.min_font_size_for_lod = app.canvas.low_quality_zoom_threshold = 0;
  app.canvas.show_info = false;
  app.canvas.ds.offset[0] = -left + edge / scale;
  app.canvas.ds.offset[1] = -top + edge / scale;
  app.canvas.setDirty(true, true);
  return { x: edge, y: edge, width: (right - left) * scale, height: (bottom - top) * scale };
}"""


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyPage]:
    from browser_page import ComfyPage

    base = tmp_path_factory.mktemp("examples") / "base"
    with comfyui_with("newest", base, {"Comfy.VueNodes.Enabled": False}) as server:
        opened = ComfyPage(browser, server.port, width=2000, height=1300)
        opened.open()
        yield opened


def shoot(page: ComfyPage, file: Path) -> None:
    """A picture of the graph alone; JPEG, as templates want it, or PNG."""
    clip = page.run(FIT)
    page.page.wait_for_timeout(700)  # two drawn frames and the widgets' own layout
    width, height = page.page.viewport_size["width"], page.page.viewport_size["height"]  # type: ignore[index]
    clip["width"], clip["height"] = min(clip["width"], width - clip["x"]), min(clip["height"], height - clip["y"])
    kind = {"type": "jpeg", "quality": 82} if file.suffix == ".jpg" else {"type": "png"}
    file.parent.mkdir(parents=True, exist_ok=True)
    page.page.screenshot(path=file, clip=clip, **kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_opens_complete(page: ComfyPage, example: Path, tmp_path: Path) -> None:
    workflow = json.loads(example.read_text(encoding="utf-8"))
    page.run("(workflow) => app.loadGraphData(workflow)", workflow)
    found = page.run(
        """() => (app.rootGraph ?? app.graph).nodes.map((node) => ({
          id: Number(node.id), type: node.type, known: node.type in LiteGraph.registered_node_types,
          linked: (node.inputs ?? []).filter((input) => input.link != null).length,
          widgets: (node.widgets ?? []).filter((w) => w.serialize !== false && w.type !== "button").map((w) => w.value),
        }))"""
    )
    assert [node["type"] for node in found if not node["known"]] == []
    assert len(found) == len(workflow["nodes"])
    links = {node["id"]: sum(1 for slot in node["inputs"] if slot["link"] is not None) for node in workflow["nodes"]}
    assert {node["id"]: node["linked"] for node in found} == links
    values = {node["id"]: node["widgets_values"] for node in workflow["nodes"]}
    for node in found:
        if node["type"].startswith("SafeScaler"):
            kept = node["widgets"][: len(values[node["id"]])]
            assert kept == values[node["id"]], f"{node['type']}: the front end reads other values"
    shoot(page, example.with_suffix(".jpg") if SAVED else tmp_path / f"{example.stem}.jpg")
    assert page.problems == []


@pytest.mark.parametrize("kind", NODES)
def test_a_node_can_be_added_and_has_its_help_picture(page: ComfyPage, kind: str, tmp_path: Path) -> None:
    page.build([{"key": "it", "type": kind, "pos": [100, 100]}], [])
    if kind == "SafeScalerTrain":  # at once, not with the first tick
        page.wait("document.querySelector('[data-testid=safe-scaler-train]')")
        line = "() => document.querySelector('[data-testid=safe-scaler-train]').innerText"
        assert page.run(line).strip() == "Not trained yet"
    page.run(
        """() => { const node = (app.rootGraph ?? app.graph).nodes[0];
          const size = node.computeSize(); node.setSize([Math.max(380, size[0]), size[1]]); }"""
    )
    folder = ROOT / "web" / "docs" / "pictures" if SAVED else tmp_path
    shoot(page, folder / f"{kind}.png")
    assert page.problems == []
    page_text = (ROOT / "web" / "docs" / f"{kind}.md").read_text(encoding="utf-8")
    assert f"pictures/{kind}.png" in page_text
    assert (ROOT / "web" / "docs" / "pictures" / f"{kind}.png").is_file()
