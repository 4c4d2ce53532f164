"""The shortest way through: four nodes, a run, a LoRA in the lists."""

from __future__ import annotations

from graphs import node, small_graph
from server import ComfyUI


def test_four_nodes_train_a_lora(comfyui: ComfyUI) -> None:
    graph = small_graph(output_name="vertical", preview_prompts="a red heart --s 2", preview_every=2)
    graph |= {
        "5": node("ProbeDescribe", value=["4", 2]),
        "6": node("ProbeDescribe", value=["4", 3]),
        "7": node("ProbeDescribe", value=["4", 4]),
        "8": node("ProbeDescribe", value=["4", 6]),
        "9": node("ProbeDescribe", value=["4", 0]),
    }
    done = comfyui.run(graph)
    assert done.status == "success", done.error or comfyui.log[-3000:]
    steps = [event["step"] for event in done.events("StepFinished")]
    assert steps == [1, 2, 3, 4]
    assert (comfyui.output / "loras" / "vertical.safetensors").is_file()
    assert (
        "vertical.safetensors"
        in comfyui.get("/object_info/LoraLoader")["LoraLoader"]["input"]["required"]["lora_name"][0]
    )
    assert done.shown("5")["text"][3:] == ["count=576", "device=cpu", "inference=False"]  # 192 modules of the toy
    print(done.shown("6"), done.shown("7"), done.shown("8"), done.shown("9"), done.shown("4"), comfyui.import_seconds())
