"""The share sheet: what it tells, what the minimal one keeps back, and which file it is about."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from trainer_core.panel.api import PanelApi
from trainer_core.panel.exchange import Reply, Request
from trainer_core.runs.folder import RunFolder

_SPEC = importlib.util.spec_from_file_location("panel_recorded_run", Path(__file__).with_name("recorded_run.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
runs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(runs)

RUN = "20261129T171500Z-1a2b"
CONFIG = {
    "model": {"path": "/home/somebody/models/sd_xl_base_1.0.safetensors"},
    "lora": {"rank": 16, "alpha": None},
    "dataset": {"path": "/home/somebody/pictures", "caption_prefix": "ohwx `cat` | x, ", "batch_size": 2},
    "gradient": {"accumulation": 2},
    "optimizer": {"learning_rate": 1e-4, "type": "adamw"},
    "preview": {"prompts": ["a secret prompt"]},
    "run": {"output_name": "cat"},
}


def ask(output: Path, metadata: str = "full") -> Reply:
    return PanelApi(lambda: [output]).handle(Request("GET", f"/runs/{RUN}/share", {"metadata": metadata}))


def shared_run(output: Path) -> RunFolder:
    folder = runs.make_run(output, runs.finished())
    final = output / "cat.safetensors"
    final.write_bytes(b"weights")
    folder.write_config({"run_id": RUN, "config": CONFIG, "config_hash": "h", "final_lora": str(final)})
    return folder


def test_the_full_sheet(tmp_path: Path) -> None:
    shared_run(tmp_path)
    sheet = ask(tmp_path).data
    digest = hashlib.sha256(b"weights").hexdigest()
    assert (sheet["file"], sheet["bytes"], sheet["sha256"]) == ("cat.safetensors", 7, digest)
    assert sheet["auto_v2"] == digest[:10].upper()
    facts = dict(sheet["facts"])
    assert facts["Base model"] == "sd_xl_base_1.0"
    assert facts["Trigger words"] == "ohwx `cat` | x"
    assert (facts["Rank"], facts["Alpha"], facts["Batch size"], facts["Steps"]) == ("16", "8", "4", "10")
    assert facts["Best validation loss"] == "0.4 at step 0"
    assert dict(sheet["civitai"])["Base model"] == "SDXL 1.0"
    card = sheet["model_card"]
    assert card.startswith("---\ntags:\n- text-to-image\n- lora\n")
    assert 'instance_prompt: "ohwx `cat` | x"' in card
    assert "| Preview prompts | a secret prompt |" in card
    assert "somebody" not in str(sheet)


def test_the_minimal_sheet_keeps_prompts_and_names_back(tmp_path: Path) -> None:
    shared_run(tmp_path)
    text = str(ask(tmp_path, "minimal").data)
    assert "secret" not in text
    assert "sd_xl_base" not in text
    assert "ohwx" in text  # without it the file is of no use


def test_a_stopped_run_shares_the_file_it_saved_on_the_way(tmp_path: Path) -> None:
    folder = shared_run(tmp_path)
    (tmp_path / "cat.safetensors").unlink()
    assert ask(tmp_path).data["error"]["code"] == "no_lora"
    (folder.loras / "cat.safetensors").write_bytes(b"partial")
    assert ask(tmp_path).data["bytes"] == 7


def test_a_config_from_elsewhere_cannot_name_other_files(tmp_path: Path) -> None:
    folder = shared_run(tmp_path)
    (tmp_path / "cat.safetensors").unlink()
    secret = tmp_path / "secret.txt"
    secret.write_text("x")
    folder.write_config({"run_id": RUN, "config": CONFIG, "config_hash": "h", "final_lora": str(secret)})
    assert ask(tmp_path).data["error"]["code"] == "no_lora"


def test_only_two_amounts_are_known(tmp_path: Path) -> None:
    shared_run(tmp_path)
    assert ask(tmp_path, "everything").status == 400
