"""ComfyUI's own LoRA loader as judge, in its own Python: keys and shapes on real SDXL, and every kind's output."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from judge_cases import differences, read_table, verdict
from network_cases import ALL_PARTS

from trainer_core.config import LoraConfig
from trainer_core.networks import create_network, save_lora
from trainer_core.networks.file_formats import to_format

COMFYUI = Path(os.environ.get("COMFYUI_PATH", Path.home() / "ComfyUI"))
PYTHON = Path(os.environ.get("COMFYUI_PYTHON", Path.home() / "comfy-venv" / "bin" / "python"))

pytestmark = [
    pytest.mark.skipif(not (COMFYUI / "comfy").is_dir(), reason=f"no ComfyUI at '{COMFYUI}' (COMFYUI_PATH)"),
    pytest.mark.skipif(not PYTHON.is_file(), reason=f"no Python of ComfyUI at '{PYTHON}' (COMFYUI_PYTHON)"),
]


def write(sdxl: Any, path: Path, form: str, **settings: Any) -> int:
    """A file of zeros with all names and shapes of real SDXL; returns the number of modules."""
    network = create_network(sdxl, LoraConfig(rank=1, **settings), trained_parts=ALL_PARTS, seed=0)
    state = {
        f"{name}.{key}": torch.ones(value.shape)
        for name, module in network.modules.items()
        for key, value in module.export_tensors().items()
    }
    network.detach()
    save_lora(path, to_format(state, sdxl, form), {}, "fp16")
    return len(network.modules)


@pytest.fixture(scope="module")
def judged(kind_files: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All questions in one start of ComfyUI's Python: files of all modules of SDXL, and one of every kind."""
    folder = tmp_path_factory.mktemp("comfyui")
    sdxl = kind_files.sdxl
    wanted = {
        "linear": write(sdxl, folder / "linear.safetensors", "kohya"),
        "conv": write(sdxl, folder / "conv.safetensors", "kohya", conv_rank=1),
        "own_names": write(sdxl, folder / "own_names.safetensors", "comfyui", conv_rank=1),
        "everything": write(sdxl, folder / "everything.safetensors", "kohya", targets=("time rank=1",)),
    }
    files = [{"file": str(folder / f"{name}.safetensors"), "outputs": None} for name in wanted]
    for i, one in enumerate(kind_files.files.values()):
        files.append({"file": str(one.path), "outputs": str(folder / f"outputs{i}.safetensors")})
    (folder / "jobs.json").write_text(json.dumps({"probe": str(kind_files.probe), "files": files}), encoding="utf-8")
    done = subprocess.run(
        [str(PYTHON), str(Path(__file__).with_name("comfyui_judge.py")), str(COMFYUI), str(folder / "jobs.json")],
        capture_output=True,
        text=True,
        check=False,
        cwd=COMFYUI,
        timeout=900,
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
    )
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"ComfyUI's Python lacks a module: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(files)
    outputs = [safetensors.torch.load_file(one["outputs"]) for one in files if one["outputs"]]
    return SimpleNamespace(
        wanted=wanted,
        whole=dict(zip(wanted, lines, strict=False)),
        kinds=dict(zip(kind_files.files, zip(lines[len(wanted) :], outputs, strict=True), strict=True)),
    )


def test_comfyui_matches_every_key_with_the_right_shape(judged: Any) -> None:
    assert judged.wanted["linear"] == 986
    assert judged.wanted["conv"] == 1052
    for name, line in judged.whole.items():
        assert line["warnings"] == [], name
        assert line["wrong_shapes"] == [], name
        assert line["patches"] == judged.wanted[name], name


def test_comfyui_reads_every_kind_that_it_supports_and_the_page_says_which(judged: Any, kind_files: Any) -> None:
    verdicts = {}
    for kind, (line, outputs) in judged.kinds.items():
        file, prefix = kind_files.files[kind], "lora key not loaded: "
        unread = [text.removeprefix(prefix) for text in line["warnings"] if text.startswith(prefix)]
        assert len(unread) == len(line["warnings"]), (kind, line["warnings"])
        assert line["wrong_shapes"] == [], kind
        assert line["patches"] == (0 if unread else file.modules), kind
        verdicts[kind] = verdict(unread, outputs, file)
        print(kind, verdicts[kind], max(differences(outputs, file.outputs).values()))
    page = read_table()
    cells = {kind: page[kind]["ComfyUI"].replace(" (`test_comfyui_judge.py`)", "") for kind in verdicts}
    assert cells == verdicts
