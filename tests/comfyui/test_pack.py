"""What the server shows of the pack: declarations, files for the browser, examples."""

from __future__ import annotations

from pathlib import Path

import pytest
from comfyui_server import PACK, ROOT, ComfyUI, Unbroken
from workflows import classes_of, load_workflow, to_prompt

EXAMPLES = sorted((ROOT / "example_workflows").glob("*.json"))
NODES = ("LoadSDXL", "Dataset", "Targets", "GradientMonitor", "Train", "Resume", "Report", "Preview")


def test_the_pack_loads_quickly_and_without_complaint(comfyui: ComfyUI) -> None:
    assert f"(IMPORT FAILED): {comfyui.base}" not in comfyui.log
    assert comfyui.import_seconds() < 5  # wall time on a busy machine; tests/nodes measures the CPU time


@pytest.mark.parametrize("name", NODES)
def test_the_server_knows_every_node_with_tooltips(comfyui: ComfyUI, name: str) -> None:
    info = comfyui.get(f"/object_info/SafeScaler{name}")[f"SafeScaler{name}"]
    declared = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    assert all(declaration[1]["tooltip"] for declaration in declared.values())
    assert len(info["output_tooltips"]) == len(info["output"])
    assert info["category"] == "Safe-Scaler"


@pytest.mark.parametrize("name", NODES)
def test_every_node_has_a_help_page(comfyui: ComfyUI, name: str) -> None:
    status, body = comfyui.get_raw(f"/extensions/{PACK}/docs/SafeScaler{name}.md")
    assert status == 200
    assert len(body) > 500


@pytest.mark.parametrize("language", ["en", "zh"])
def test_texts_of_both_languages_are_served(comfyui: ComfyUI, language: str) -> None:
    texts = comfyui.get("/i18n")[language]["nodeDefs"]["SafeScalerTrain"]
    assert texts["display_name"] == {"en": "Safe-Scaler Train", "zh": "Safe-Scaler 训练"}[language]


def test_examples_are_offered_as_templates(comfyui: ComfyUI) -> None:
    assert set(comfyui.get("/api/workflow_templates")[PACK]) == {example.stem for example in EXAMPLES}
    assert len(EXAMPLES) == 6


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_has_no_missing_nodes_and_valid_values(comfyui: ComfyUI, example: Path) -> None:
    """Valid as the server judges it: the graph is queued behind nothing and taken off again."""
    workflow = load_workflow(example)
    info = comfyui.get("/object_info")
    assert classes_of(workflow) <= set(info)
    graph = to_prompt(workflow, info)
    assert any(node["class_type"] == "SafeScalerTrain" for node in graph.values())
    for node in graph.values():
        declared = {
            **info[node["class_type"]]["input"]["required"],
            **info[node["class_type"]]["input"].get("optional", {}),
        }
        for name, value in node["inputs"].items():
            kind = declared[name][0]
            if isinstance(kind, list) and not isinstance(value, list):
                assert value in kind, f"{node['class_type']}.{name} = {value!r}"


SHORT = {"steps": 3, "batch_size": 2, "save_every": 0, "preview_steps": 1, "preview_every": 0, "lora_every": 0}


def run_short(comfyui: ComfyUI, name: str) -> None:
    """Run an example on the toy to its end, with few steps."""
    graph = to_prompt(load_workflow(ROOT / "example_workflows" / f"{name}.json"), comfyui.get("/object_info"))
    for node in graph.values():
        if node["class_type"] == "SafeScalerTrain":
            node["inputs"] |= {**SHORT, "output_name": f"example_{name}", "device": "cpu"}
        elif node["class_type"] == "SafeScalerPreview":
            node["inputs"] |= {"sampling_steps": 1, "device": "cpu"}
    done = comfyui.run(graph)
    assert done.status == "success", done.error
    assert set(graph) - set(done.cached) == set(done.ran)
    assert (comfyui.output / "loras" / f"example_{name}.safetensors").is_file()


@pytest.mark.slow
def test_the_first_example_runs_to_the_end(comfyui: ComfyUI) -> None:
    run_short(comfyui, "first_lora")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["style_with_validation", "train_then_generate", "health_investigation", "fault_drill"]
)
def test_the_other_examples_run_to_the_end(comfyui: ComfyUI, name: str) -> None:
    run_short(comfyui, name)


@pytest.mark.slow
def test_the_resume_example_goes_on_from_the_first(comfyui: ComfyUI) -> None:
    info = comfyui.get("/object_info")
    graph = to_prompt(load_workflow(ROOT / "example_workflows" / "resume.json"), info)
    train = next(node for node in graph.values() if node["class_type"] == "SafeScalerTrain")
    first = {name: node for name, node in graph.items() if node["class_type"] != "SafeScalerResume"}
    inputs = {**train["inputs"], **SHORT, "output_name": "example_resume", "device": "cpu"}
    key = next(name for name, node in graph.items() if node is train)
    begun = {name: value for name, value in inputs.items() if name != "resume"}
    assert comfyui.run({**first, key: {**train, "inputs": begun}}).status == "success"
    longer = comfyui.run({**graph, key: {**train, "inputs": {**inputs, "steps": 5}}})
    assert longer.status == "success", longer.error
    assert [event["step"] for event in longer.events("StepFinished")] == [4, 5]


def test_nothing_of_ours_is_left_where_it_should_not_be(comfyui: ComfyUI, unbroken: Unbroken) -> None:
    """Only the two folders that README's part on uninstalling names."""
    ours = {path.name for path in comfyui.output.iterdir() if not path.name.startswith("_")}
    assert ours == {"loras", "safe_scaler"}
