"""What ComfyUI is told about the nodes, and what loading the pack costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NODES = (
    "SafeScalerLoadSDXL", "SafeScalerDataset", "SafeScalerTargets", "SafeScalerGradientMonitor",
    "SafeScalerTrain", "SafeScalerResume", "SafeScalerReport", "SafeScalerPreview",
)  # fmt: skip
CONNECTABLE = {"INT", "FLOAT", "STRING", "BOOLEAN", "IMAGE", "LORA_MODEL", "COMBO,STRING"}


def inputs_of(cls: Any) -> dict[str, Any]:
    types = cls.INPUT_TYPES()
    return {**types.get("required", {}), **types.get("optional", {})}


def test_ids_are_the_known_ones(pack: Any) -> None:
    """They stand in saved workflows: an id that is taken away breaks them."""
    assert tuple(pack.NODE_CLASS_MAPPINGS) == NODES
    assert set(pack.NODE_DISPLAY_NAME_MAPPINGS) == set(NODES)


@pytest.mark.parametrize("name", NODES)
def test_every_input_and_output_has_a_tooltip(pack: Any, name: str) -> None:
    cls = pack.NODE_CLASS_MAPPINGS[name]
    for key, (_, options) in inputs_of(cls).items():
        assert options["tooltip"].endswith((".", "=0.5")), key
    assert len(cls.RETURN_TYPES) == len(cls.RETURN_NAMES) == len(cls.OUTPUT_TOOLTIPS)
    assert cls.CATEGORY == "Safe-Scaler"
    assert callable(getattr(cls, cls.FUNCTION))
    assert len(cls.DESCRIPTION) > 40


@pytest.mark.parametrize("name", NODES)
def test_declarations_are_what_the_front_end_takes(pack: Any, name: str) -> None:
    for key, (kind, options) in inputs_of(pack.NODE_CLASS_MAPPINGS[name]).items():
        json.dumps(options, allow_nan=False)
        assert key not in ("seed", "noise_seed"), "the front end would change it at every run"
        if isinstance(kind, list):
            assert options["default"] in kind, key
        elif kind in ("INT", "FLOAT"):
            assert options["min"] <= options["default"] <= options["max"], key
            assert options["max"] <= 2**53, "larger numbers are not exact in JavaScript"
        else:
            assert kind in CONNECTABLE or kind.startswith("SAFE_SCALER_"), key


def test_types_agree_between_outputs_and_inputs(pack: Any) -> None:
    given = {str(kind) for cls in pack.NODE_CLASS_MAPPINGS.values() for kind in cls.RETURN_TYPES}
    wanted = {
        kind
        for cls in pack.NODE_CLASS_MAPPINGS.values()
        for kind, _ in inputs_of(cls).values()
        if isinstance(kind, str) and kind.startswith("SAFE_SCALER_")
    }
    assert wanted <= given


def test_the_lora_name_fits_lists_and_texts(part: Any) -> None:
    name = part("handles").LORA_NAME
    fits = [kind for kind in (["a.safetensors"], "COMBO,STRING", "IMAGE") if not name != kind]  # noqa: SIM202 - ComfyUI's way
    assert fits == [["a.safetensors"], "COMBO,STRING"]
    assert {"STRING", "COMBO"} == set(name.split(","))


def test_help_pages_and_texts_are_current() -> None:
    """`python tools/make_node_texts.py` makes them new; a text that another language lacks is named too."""
    done = subprocess.run(
        [sys.executable, "tools/make_node_texts.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, f"run python tools/make_node_texts.py:\n{done.stdout}{done.stderr}"


def test_examples_are_current() -> None:
    """`python tools/make_example_workflows.py` makes them new."""
    done = subprocess.run(
        [sys.executable, "tools/make_example_workflows.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, f"run python tools/make_example_workflows.py:\n{done.stdout}{done.stderr}"


def test_loading_the_pack_is_quick_and_light() -> None:
    """CPU seconds, the best of three: another process's work is not the pack's."""
    code = """
import sys, time
sys.path.insert(0, "tools")
import make_example_workflows as tool
start = time.process_time()
tool.pack()
print(time.process_time() - start)
print([name for name in ("torch", "diffusers", "transformers", "peft", "numpy", "PIL") if name in sys.modules])
"""
    outputs = [
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )
        for _ in range(3)
    ]
    assert outputs[0][1] == "[]"
    assert min(float(lines[0]) for lines in outputs) < 0.5, outputs


def test_outside_comfyui_the_root_module_imports_nothing() -> None:
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location('__init__', r'{ROOT / "__init__.py"}')
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(hasattr(module, 'NODE_CLASS_MAPPINGS'), module.WEB_DIRECTORY)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "./web"]
