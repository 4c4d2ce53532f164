"""One real ComfyUI for all tests of this folder; they are skipped, with the reason, where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # comfyui_server, comfyui_graphs, under --import-mode=importlib

from comfyui_graphs import node, small_graph  # noqa: E402
from comfyui_server import ComfyUI, Unbroken, missing  # noqa: E402

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


@pytest.fixture(scope="session")
def unbroken(comfyui: ComfyUI) -> Unbroken:
    """Trained once; other tests compare with it and go on from it."""
    graph = small_graph(output_name="unbroken", preview_prompts="a red zorp --s 2", preview_every=6, lora_every=6)
    graph["3a"] = node(
        "SafeScalerGradientMonitor", max_grad_norm=1.0, clip="fixed", max_rejected_steps=8, drop_bad_pictures=True,
        ladder=True, watch=True, audit="repair",
    )  # fmt: skip
    graph["4"]["inputs"]["monitor"] = ["3a", 0]
    graph |= {
        "name": node("ProbeDescribe", value=["4", 0]),
        "path": node("ProbeDescribe", value=["4", 1]),
        "weights": node("ProbeDescribe", value=["4", 2]),
        "previews": node("ProbeDescribe", value=["4", 3]),
        "curve": node("ProbeDescribe", value=["4", 4]),
        "run": node("ProbeDescribe", value=["4", 5]),
        "text": node("ProbeDescribe", value=["4", 6]),
        "nothing": node("ProbeNoModel"),
        "loader": node(
            "LoraLoader", model=["nothing", 0], clip=["nothing", 1], lora_name=["4", 0],
            strength_model=0.0, strength_clip=0.0,
        ),
        "loaded": node("ProbeDescribe", value=["loader", 0]),
        "report": node("SafeScalerReport", choose="the linked run", run=["4", 5]),
        "page": node("ProbeDescribe", value=["report", 2]),
        "charts": node("ProbeDescribe", value=["report", 0]),
        "look": node(
            "SafeScalerPreview", lora="the linked run", prompts="a red zorp\na blue square --d 3", strengths="0, 1",
            steps_shown="last", sampling_steps=2, guidance=3.0, sampler="euler", preview_seed=1, run=["4", 5],
            device="cpu",
        ),
        "pictures": node("ProbeDescribe", value=["look", 0]),
        "sheet": node("ProbeDescribe", value=["look", 1]),
    }  # fmt: skip
    outcome = comfyui.run(graph)
    assert outcome.status == "success", f"{outcome.error}\n{comfyui.log[-3000:]}"
    run_id = outcome.events("RunStarted")[0]["run_id"]
    lora = comfyui.output / "loras" / "unbroken.safetensors"
    return Unbroken(graph, outcome, comfyui.output / "safe_scaler" / run_id, lora)
