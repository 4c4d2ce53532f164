"""Cancel, killed workers and NaN: what was done is kept, the result is the unbroken run's, and the server lives."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from comfyui_graphs import small_graph
from comfyui_server import ComfyUI, Message, Unbroken
from safetensors import safe_open


def tensors(file: Path) -> dict[str, bytes]:
    with safe_open(file, framework="np") as opened:
        return {name: opened.get_tensor(name).tobytes() for name in sorted(opened.keys())}


class AfterStep:
    """Calls `action(run_id)` once, when a step of at least `step` has been reported."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action, self.run_id = step, action, ""

    def __call__(self, message: Message) -> None:
        if self.run_id or message["type"] != "safe_scaler.event":
            return
        event = message["data"]["event"]
        if event["type"] == "StepFinished" and event["step"] >= self.step:
            self.run_id = event["run_id"]
            self.action(self.run_id)


def test_cancel_keeps_everything_and_run_again_goes_on_bit_equal(comfyui: ComfyUI, unbroken: Unbroken) -> None:
    graph = small_graph(output_name="cancelled")
    asked = 0.0

    def cancel(_: str) -> None:
        nonlocal asked
        asked = time.monotonic()
        comfyui.interrupt()

    watch = AfterStep(2, cancel)
    first = comfyui.run(graph, watch)
    seconds = time.monotonic() - asked
    assert first.status == "interrupted"
    run_dir = comfyui.output / "safe_scaler" / watch.run_id
    stopped = first.events("RunFinished")[0]
    assert stopped["data"]["status"] == "stopped"
    assert 2 <= stopped["step"] < 12
    assert f"Stopped after step {stopped['step']} of 12" in stopped["data"]["message"]
    assert str(comfyui.base) not in json.dumps(first.events())
    assert (run_dir / "checkpoints" / f"step-{stopped['step']:08d}" / "verified").is_file()
    kept = comfyui.output / "loras" / f"cancelled-step{stopped['step']:08d}.safetensors"
    assert kept.is_file()
    assert kept.name in comfyui.get("/object_info/LoraLoader")["LoraLoader"]["input"]["required"]["lora_name"][0]
    assert seconds < 60, f"cancel took {seconds:.0f} s"

    again = comfyui.run(graph)
    assert again.status == "success", again.error
    assert again.events("Resumed")[0]["step"] == stopped["step"]
    assert f"Continued run {watch.run_id} from step {stopped['step']}" in again.shown("4")["text"][0]
    assert tensors(comfyui.output / "loras" / "cancelled.safetensors") == tensors(unbroken.lora)


def test_a_killed_worker_is_started_again_and_the_result_is_bit_equal(comfyui: ComfyUI, unbroken: Unbroken) -> None:
    def kill(run_id: str) -> None:
        holder = (comfyui.output / "safe_scaler" / run_id / ".lock").read_text()
        os.kill(int(holder.split()[1]), signal.SIGKILL)

    done = comfyui.run(small_graph(output_name="killed"), AfterStep(5, kill))
    assert done.status == "success", done.error
    restarts = [event for event in done.events("Warned") if event["data"]["topic"] == "restart"]
    assert len(restarts) == 1
    assert "was killed by SIGKILL" in restarts[0]["data"]["message"]
    assert "The worker was started again 1 times" in done.shown("4")["text"][0]
    assert tensors(comfyui.output / "loras" / "killed.safetensors") == tensors(unbroken.lora)


def test_injected_infinity_is_told_as_rejected_steps_and_the_server_lives(comfyui: ComfyUI) -> None:
    """alpha = 1e38: the first step moves lora_up off zero, and from then on the output is not finite."""
    graph = small_graph(output_name="poisoned", steps=8)
    graph["4"]["inputs"]["more_settings"] += (
        "\nlora.alpha = 1e38\nprecision.max_rejected_steps = 2\nsafety.ladder = false"
    )
    done = comfyui.run(graph)
    assert done.status == "error"
    rejected = done.events("StepRejected")
    assert rejected
    assert "loss" in rejected[0]["data"]["nonfinite"] or "grad_norm" in rejected[0]["data"]["nonfinite"]
    assert "rejected" in done.error
    assert "(bug" not in done.error
    assert comfyui.get("/system_stats")["system"]["comfyui_version"]
    json.dumps(comfyui.get(f"/history/{done.prompt_id}"), allow_nan=False)


def test_a_wrong_setting_is_said_with_all_others_before_anything_runs(comfyui: ComfyUI) -> None:
    graph = small_graph(output_name="wrong", steps=0)
    graph["4"]["inputs"]["more_settings"] = "dataset.bacth_size = 3\noptimizer.beta1 = 2"
    done = comfyui.run(graph)
    assert done.status == "error"
    assert "3 problems" in done.error
    assert "Did you mean dataset.batch_size?" in done.error
    assert not list((comfyui.output / "loras").glob("wrong*"))


@pytest.mark.slow
def test_stop_from_the_panel_ends_the_node_normally_and_run_again_goes_on(comfyui: ComfyUI, unbroken: Unbroken) -> None:
    graph = small_graph(output_name="stopped")

    def stop(run_id: str) -> None:
        status, reply = comfyui.post(f"/safe_scaler/api/v1/runs/{run_id}/commands", {"cmd": "stop"})
        assert (status, reply["ok"]) == (200, True), reply

    first = comfyui.run(graph, AfterStep(3, stop))
    assert first.status == "success"
    assert first.shown("4")["text"][0].count("stopped")
    again = comfyui.run(graph)
    assert "4" in again.ran
    assert tensors(comfyui.output / "loras" / "stopped.safetensors") == tensors(unbroken.lora)
    assert comfyui.run(graph).ran == []
