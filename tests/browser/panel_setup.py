"""What browser tests share: a training graph of the toy, a ComfyUI with a named front end, a place for pictures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from comfyui_server import ComfyUI

ROOT = Path(__file__).resolve().parents[2]
TOY = "toy (built in, for a first try)"

Nodes = list[dict[str, Any]]
Links = list[tuple[str, str, str, str]]


def toy_graph(*, dataset: Mapping[str, Any], monitor: bool, **train: Any) -> tuple[Nodes, Links]:
    """Nodes and links of a graph that trains the toy on the CPU; `dataset` and `train`: what their widgets hold."""
    settled = {
        "purpose": "own settings", "vram": "own settings", "learning_rate": 1e-3, "train_seed": 7, "device": "cpu",
        "batch_size": 1,
    }  # fmt: skip
    nodes: Nodes = [
        {"key": "load", "type": "SafeScalerLoadSDXL", "pos": [20, 60],
         "widgets": {"checkpoint": TOY, "precision": "fp32"}},
        {"key": "data", "type": "SafeScalerDataset", "pos": [20, 260], "size": [300, 720], "widgets": dict(dataset)},
        {"key": "targets", "type": "SafeScalerTargets", "pos": [360, 60], "size": [330, 450], "widgets": {"rank": 4}},
        {"key": "train", "type": "SafeScalerTrain", "pos": [740, 60], "size": [330, 980],
         "widgets": {**settled, **train}},
    ]  # fmt: skip
    links = [
        ("load", "model", "data", "model"),
        ("load", "model", "train", "model"),
        ("data", "dataset", "train", "dataset"),
        ("targets", "targets", "train", "targets"),
    ]
    if monitor:
        size = {"pos": [360, 580], "size": [330, 400]}
        nodes.insert(3, {"key": "monitor", "type": "SafeScalerGradientMonitor", **size})
        links.append(("monitor", "monitor", "train", "monitor"))
    return nodes, links


@contextmanager
def comfyui_with(
    front_end: str,
    base: Path,
    settings: Mapping[str, bool],
    *,
    packs: tuple[Path, ...] = (),
    before: Callable[[Path], None] = lambda base: None,
) -> Iterator[ComfyUI]:
    """A ComfyUI with this front end; skips where that cannot be had. `before` fills its folder first."""
    from comfyui_server import ComfyUI
    from front_ends import static_root

    root = static_root(front_end)
    if root is None:
        pytest.skip(f"the front end {front_end} can be neither found nor downloaded")
    server = ComfyUI(base, "--front-end-root", str(root), packs=packs)
    server.front_end = front_end  # type: ignore[attr-defined]
    try:
        before(base)
        server.wait_until_up()
        # Without the first a window of templates covers the page.
        for setting, value in {"Comfy.TutorialCompleted": True, **settings}.items():
            server.post(f"/api/settings/{setting}", value)
        yield server
    finally:
        server.stop()


def pictures(tmp_path: Path) -> Path:
    """Where screenshots go: docs/pictures when SAFE_SCALER_PICTURES is set, else a temporary folder."""
    return ROOT / "docs" / "pictures" if os.environ.get("SAFE_SCALER_PICTURES") else tmp_path
