"""One run from the graph to the LoRA, and everything the nodes give."""

from __future__ import annotations

import json

import pytest
from comfyui_server import ComfyUI, Unbroken


def test_every_step_reached_the_browser_in_order(unbroken: Unbroken) -> None:
    events = unbroken.outcome.events()
    assert [event["step"] for event in events if event["type"] == "StepFinished"] == list(range(1, 13))
    numbers = [event["seq"] for event in events if event["run_id"] == unbroken.run_dir.name]
    assert numbers == sorted(numbers)
    messages = [m["data"] for m in unbroken.outcome.messages if m["type"] == "safe_scaler.event"]
    trained = [message for message in messages if message["run_id"] == unbroken.run_dir.name]
    assert {(message["node_id"], message["monitor_node_id"]) for message in trained} == {("4", "3a")}


def test_no_event_carries_a_path_outside_its_run(comfyui: ComfyUI, unbroken: Unbroken) -> None:
    ended = unbroken.outcome.events("RunFinished")[0]["data"]
    saved = unbroken.outcome.events("LoraSaved")[-1]["data"]
    assert (ended["lora"], saved["file"]) == ("unbroken.safetensors", "unbroken.safetensors")
    assert str(comfyui.base) not in json.dumps(unbroken.outcome.events())


def test_the_bar_moves_to_the_last_step(unbroken: Unbroken) -> None:
    moved = [
        (message["data"]["value"], message["data"]["max"])
        for message in unbroken.outcome.messages
        if message["type"] == "progress" and message["data"]["node"] == "4"
    ]
    assert (12, 12) in moved


def test_previews_appear_in_the_node_while_it_runs_and_stay(unbroken: Unbroken) -> None:
    shown = [
        message["data"]["output"]["images"]
        for message in unbroken.outcome.messages
        if message["type"] == "executed" and message["data"]["node"] == "4"
    ]
    assert [len(images) for images in shown] == [1, 2, 3, 3]
    assert shown[-1][-1]["filename"] == "step-00000012-00.png"


def test_pictures_of_the_node_can_be_fetched(comfyui: ComfyUI, unbroken: Unbroken) -> None:
    image = unbroken.outcome.shown("4")["images"][0]
    status, body = comfyui.get_raw(
        f"/view?filename={image['filename']}&subfolder={image['subfolder']}&type={image['type']}"
    )
    assert (status, body[:4]) == (200, b"\x89PNG")


def test_the_lora_stands_in_the_lists_without_a_restart(comfyui: ComfyUI, unbroken: Unbroken) -> None:
    listed = comfyui.get("/object_info/LoraLoader")["LoraLoader"]["input"]["required"]["lora_name"][0]
    assert "unbroken.safetensors" in listed
    assert unbroken.lora.is_file()


def test_the_name_links_to_lora_loader(unbroken: Unbroken) -> None:
    assert unbroken.outcome.shown("loaded")["text"] == ["str", "no model"]


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("name", ["str", "unbroken.safetensors"]),
        ("weights", ["dict", "576", "cpu", "inference=False"]),  # 192 modules of the toy, three tensors each
        ("previews", ["Tensor", "[1, 64, 64, 3]"]),
        ("curve", ["Tensor", "[1, 532, 960, 3]"]),
        ("pictures", ["Tensor", "[4, 64, 64, 3]"]),
    ],
)
def test_outputs(unbroken: Unbroken, output: str, shown: list[str]) -> None:
    assert unbroken.outcome.shown(output)["text"][: len(shown)] == shown


def test_pictures_differ_between_base_model_and_lora(unbroken: Unbroken) -> None:
    assert unbroken.outcome.shown("look")["text"] == ["base model", "step 12, strength 1"]
    images = unbroken.outcome.shown("look")["images"]
    assert len(images) == 4
    assert len({image["subfolder"] for image in images}) == 1


def test_the_run_handle_prints_as_one_short_line(unbroken: Unbroken) -> None:
    kind, text = unbroken.outcome.shown("run")["text"]
    assert (kind, text) == ("RunHandle", f"<Safe-Scaler run {unbroken.run_dir.name}, finished at step 12>")


def test_the_report_is_in_words_and_as_a_page(unbroken: Unbroken) -> None:
    text = unbroken.outcome.shown("text")["text"][1]
    assert "The run finished: 12 steps on 72 pictures" in text
    assert "nan" not in text.lower()
    assert unbroken.outcome.shown("page")["text"][1] == str(unbroken.run_dir / "report.html")
    assert (unbroken.run_dir / "report.html").is_file()
    charts = unbroken.outcome.shown("charts")["text"][1]
    assert int(charts.strip("[]").split(",")[0]) >= 3


def test_a_second_run_of_the_same_graph_comes_from_the_cache(comfyui: ComfyUI, unbroken: Unbroken) -> None:
    again = comfyui.run(unbroken.graph)
    assert again.status == "success"
    assert again.ran == []
    assert set(again.cached) == set(unbroken.graph)
