"""Two Train nodes in one graph, pictures from the graph, ways to go on, and ComfyUI's own models before and after."""

from __future__ import annotations

from typing import Any

from comfyui_graphs import node, small_graph, train
from comfyui_server import ComfyUI, Message, Unbroken
from test_interruptions import tensors


def test_two_trains_beside_a_model_of_comfyui(comfyui: ComfyUI, unbroken: Unbroken) -> None:
    """Train 4 goes on exactly from step 4 of the unbroken run; Train 14 starts warm from its LoRA, on linked pictures
    that came through a VAE of ComfyUI, which is needed again afterwards.
    """
    run_id = unbroken.run_dir.name
    entries = comfyui.get("/object_info/SafeScalerResume")["SafeScalerResume"]["input"]["required"]["checkpoint"][0]
    line = next(entry for entry in entries if entry.startswith(f"{run_id} · step-00000004 "))
    assert "verified · finished" in line
    graph = small_graph(output_name="forked", resume=["resume", 0])
    graph |= {
        "resume": node("SafeScalerResume", checkpoint=line, mode="exact"),
        "warm": node("SafeScalerResume", checkpoint=line.replace("00000004", "00000012"), mode="warm start"),
        "pictures": node("ProbePictures", count=4, captions=4),
        "vae": node("ProbeTinyVAE"),
        "latents": node("VAEEncode", pixels=["pictures", 0], vae=["vae", 0]),
        "decoded": node("VAEDecode", samples=["latents", 0], vae=["vae", 0]),
        "12": node(
            "SafeScalerDataset", folder="", trigger_word="zorp", resolution=0, repeats=1, validation_split=0.0,
            model=["1", 0], images=["decoded", 0], captions=["pictures", 1],
        ),
        "14": train(
            dataset=["12", 0], output_name="warm", steps=2, save_every=0, resume=["warm", 0],
            preview_prompts="", preview_steps=2,
        ),
        "after": node("VAEEncode", pixels=["14", 3], vae=["vae", 0]),
        "used": node("ProbeDescribe", value=["again", 0]),
        "again": node("VAEDecode", samples=["after", 0], vae=["vae", 0]),
        "scan": node("ProbeDescribe", value=["12", 1]),
    }  # fmt: skip
    inside: dict[str, dict[str, Any]] = {}

    def look(message: Message) -> None:
        if message["type"] == "safe_scaler.event" and message["data"]["event"]["type"] == "RunStarted":
            inside[message["data"]["node_id"]] = comfyui.get("/probe")

    done = comfyui.run(graph, look)
    assert done.status == "success", f"{done.error}\n{comfyui.log[-2000:]}"
    assert tensors(comfyui.output / "loras" / "forked.safetensors") == tensors(unbroken.lora)
    assert unbroken.lora.is_file()
    assert "the old one stays" in done.shown("4")["text"][0]
    assert "Warm start from unbroken.safetensors" in done.shown("14")["text"][0]
    assert "4 pictures usable" in done.shown("scan")["text"][1]
    prompts = [event["data"]["prompt"] for event in done.events("PreviewReady")]
    assert prompts[0].startswith("zorp, picture number ")
    # While the worker runs no model of ComfyUI is on the device, and one child process is there; afterwards none.
    assert [(found["models"], len(found["children"])) for found in inside.values()] == [(0, 1), (0, 1)]
    after = comfyui.get("/probe")
    assert after["children"] == []
    assert after["modules"] == []
    assert done.shown("used")["text"][:1] == ["Tensor"]
    assert after["models"] == 1  # the VAE is loaded again
