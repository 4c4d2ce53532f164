"""ComfyUI is restarted in the middle of a run: the worker saves, and Run in the new server goes on, bit-equal."""

from __future__ import annotations

import time
from typing import Any

import pytest
from comfyui_graphs import small_graph
from comfyui_server import ComfyUI, Message, Unbroken
from test_interruptions import tensors

API = "/safe_scaler/api/v1"


def state_of(comfyui: ComfyUI, run_id: str) -> dict[str, Any]:
    """The run's line in the list once no process writes it any more."""
    deadline = time.monotonic() + 120
    while (run := comfyui.get(f"{API}/runs/{run_id}"))["state"] == "running":
        assert time.monotonic() < deadline, "the worker of the old server does not end"
        time.sleep(0.2)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exec", "SIGTERM"])
def test_run_again_after_a_restart_of_the_server_goes_on_bit_equal(
    comfyui: ComfyUI, unbroken: Unbroken, how: str
) -> None:
    graph = small_graph(output_name=f"restarted_{how}")
    found = ""

    def stepped(message: Message) -> bool:
        nonlocal found
        if message["type"] == "safe_scaler.event" and message["data"]["event"]["type"] == "StepFinished":
            found = message["data"]["run_id"]
        return bool(found)

    comfyui.wait(comfyui.queue(graph), stepped)
    comfyui.restart(how)
    run = state_of(comfyui, found)
    assert (run["state"], run["live"]) == ("stopped", False)
    assert 1 <= run["step"] < 12, "the run was over before the server was"
    choices = comfyui.get("/object_info/SafeScalerResume")["SafeScalerResume"]["input"]["required"]["checkpoint"][0]
    wanted = f"{found} · step-{run['step']:08d} · verified · stopped · "
    assert [line for line in choices if line.startswith(wanted)], choices
    seen = comfyui.get(f"{API}/runs/{found}/snapshot")
    assert (seen["run"]["state"], seen["run"]["step"]) == ("stopped", run["step"])

    again = comfyui.run(graph)
    assert again.status == "success", again.error
    assert [event["step"] for event in again.events("Resumed")] == [run["step"]]
    assert [event["step"] for event in again.events("StepFinished")] == list(range(run["step"] + 1, 13))
    assert f"Continued run {found} from step {run['step']}" in again.shown("4")["text"][0]
    assert tensors(comfyui.output / "loras" / f"restarted_{how}.safetensors") == tensors(unbroken.lora)
    assert comfyui.get(f"{API}/runs/{found}")["state"] == "finished"
    assert comfyui.run(graph).ran == []
