"""Training Dataset: folders, linked pictures, trigger word, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def scan(part: Any) -> Any:
    """Runs the node as ComfyUI does for a node that takes lists; returns (handle, report, shown)."""

    def call(images: Any = None, captions: Any = None, **inputs: Any) -> tuple[Any, str, dict[str, Any]]:
        plain = {"folder": "", "trigger_word": "", "resolution": 0, "repeats": 1, "validation_split": 0.1, **inputs}
        lists: dict[str, Any] = {name: [value] for name, value in plain.items()}
        if images is not None:
            lists["images"] = images
        if captions is not None:
            lists["captions"] = captions
        made = part("dataset").SafeScalerDataset().execute(**lists)
        return (*made["result"], made["ui"])

    return call


def pictures(count: int, side: int = 64) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.rand(1, side, side, 3, generator=generator) for _ in range(count)]


def test_the_built_in_pictures(scan: Any) -> None:
    handle, report, shown = scan(folder="toy")
    assert handle.pictures == 72  # 24 of the lesson, 48 prior ones
    assert handle.captions[0] == "a red zorp"
    assert "72 pictures usable" in report
    assert len(shown["images"]) == 12
    assert shown["text"] == [report]


def test_a_scan_is_known_to_the_panel_by_an_id(scan: Any, part: Any, core: Any, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (80, 64), "red").save(tmp_path / "a.png")
    handle, report, shown = scan(folder=str(tmp_path), validation_split=0.0)
    known = part("scans").scanned()[shown["data_set"][0]]
    assert (known.title, known.pictures, known.report) == (tmp_path.name, 1, report)
    config, _ = core.load_config(None, dict(handle.settings), check=False)
    assert core.data_set_id(config.dataset) == shown["data_set"][0]  # a run of it has the same id


def test_a_relative_folder_starts_in_the_input_folder(scan: Any, comfyui: Any) -> None:
    from PIL import Image

    (comfyui.root / "input" / "mine").mkdir(exist_ok=True)
    Image.new("RGB", (80, 64), "red").save(comfyui.root / "input" / "mine" / "a.png")
    handle, report, _ = scan(folder="mine", validation_split=0.0)
    assert (handle.pictures, handle.title) == (1, "mine")
    assert "caption" in report  # the missing one is told


def test_linked_pictures_and_captions(scan: Any, comfyui: Any) -> None:
    handle, _, _ = scan(pictures(3), ["first", "second", "third"], trigger_word="ohwx")
    assert handle.captions == ("ohwx, first", "ohwx, second", "ohwx, third")
    assert handle.settings["metadata.trigger_phrase"] == "ohwx"
    folder = Path(handle.settings["dataset.path"])
    assert folder.parent == comfyui.root / "output" / "safe_scaler" / "pictures"
    assert len(list(folder.glob("*.png"))) == 3


def test_the_same_linked_pictures_are_written_once_and_others_apart(scan: Any) -> None:
    first, _, _ = scan(pictures(2), ["a", "b"])
    again, _, _ = scan(pictures(2), ["a", "b"])
    other, _, _ = scan(pictures(2), ["a", "c"])
    assert first.settings["dataset.path"] == again.settings["dataset.path"] != other.settings["dataset.path"]


def test_one_caption_serves_all_pictures(scan: Any) -> None:
    import torch

    handle, _, _ = scan([torch.cat(pictures(3))], ["the same"])
    assert (handle.pictures, handle.captions) == (3, ("the same",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "No pictures: give a folder, link images, or write toy"),
        ({"images": 3, "captions": ["a", "b"]}, "3 pictures and 2 captions"),
        ({"captions": ["a"]}, "Captions are linked without images"),
        ({"images": 1, "folder": "toy"}, "Empty the folder, or cut the link"),
        ({"folder": "no such folder"}, "no such folder"),
    ],
)
def test_what_is_refused_says_what_to_do(scan: Any, core: Any, arguments: dict[str, Any], message: str) -> None:
    if "images" in arguments:
        arguments = {**arguments, "images": pictures(arguments["images"])}
    with pytest.raises(core.DatasetError, match=message):
        scan(**arguments)


def test_a_broken_picture_of_the_graph_is_refused_by_number(scan: Any, core: Any) -> None:
    images = pictures(3)
    images[1][0, 5, 5, 0] = float("nan")
    with pytest.raises(core.DatasetError, match="Picture 2 of 3 from the graph holds NaN"):
        scan(images, ["a"])


def test_a_changed_file_is_scanned_again_and_an_unchanged_folder_is_not(part: Any, tmp_path: Path) -> None:
    stamp = part("dataset").SafeScalerDataset.IS_CHANGED
    (tmp_path / "a.txt").write_text("one")
    before = stamp(folder=[str(tmp_path)], images=None)
    assert stamp(folder=[str(tmp_path)], images=None) == before
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    assert stamp(folder=[str(tmp_path)], images=None) != before
    assert stamp(folder=["toy"]) == stamp(folder=["toy"])


def test_cancel_during_the_scan_is_comfyuis_own_exception(scan: Any, comfyui: Any, tmp_path: Path) -> None:
    from PIL import Image

    for index in range(3):
        Image.new("RGB", (64, 64), "red").save(tmp_path / f"{index}.png")
    comfyui.interrupted = True
    try:
        with pytest.raises(Exception, match="^$") as caught:
            scan(folder=str(tmp_path))
    finally:
        comfyui.interrupted = False
    assert type(caught.value).__name__ == "Interrupted"
