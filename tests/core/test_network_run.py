"""Networks in whole runs: coverage before the first step, clamp rate, copies in other formats, early refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from run_setup import Recorder, small_config

from trainer_core import cli
from trainer_core.build import create_run, run, start_run
from trainer_core.errors import ConfigError
from trainer_core.networks import load_lora, save_lora
from trainer_core.runs.record import open_readonly


@pytest.fixture(scope="module")
def finished(micro_model: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One run of two steps with a clamp that cuts nearly everything, and a copy under diffusers' names."""
    config = small_config(
        micro_model,
        pictures,
        tmp_path_factory.mktemp("run"),
        lora={"clamp": 1e-9, "conv_rank": 2},
        optimizer={"te2_lr": 1e-3},
        checkpoint={"save_format": "diffusers"},
        run={"max_train_steps": 2},
    )
    folder = create_run(config)
    stored = folder.read_config()
    folder.write_config({**stored, "workflow": {"nodes": [1, 2]}})
    recorder = Recorder()
    return run(folder.path, sink=recorder), recorder


def test_a_run_leaves_its_coverage_and_shows_it(finished: Any) -> None:
    result, _ = finished
    assert result.status == "finished", result.message
    facts = json.loads((result.run_dir / "coverage.json").read_text(encoding="utf-8"))
    states = {(row["part"], row["block"]): row["state"] for row in facts["blocks"]}
    assert states["unet", "IN04"] == states["te2", "layer 0"] == "reached"
    assert facts["unreached"]
    assert all("text encoder 1" in reason for reason in facts["unreached"].values())
    page = (result.run_dir / "report.html").read_text(encoding="utf-8")
    assert 'id="coverage"' in page
    assert "data:image/svg+xml;base64," in page


def test_the_clamp_rate_is_in_the_step_record(finished: Any) -> None:
    result, recorder = finished
    rates = [data["clamp_rate"] for data in recorder.of("StepFinished")]
    # The first step's adapters add nothing (up is zero); after the update nearly every output is beyond the limit.
    assert rates[0] == 0.0
    assert 0.5 < rates[1] <= 1.0
    with open_readonly(result.run_dir / "run.db") as record:
        stored = [row["data"]["rate"] for row in record.health() if row["module"] == "clamp"]
    assert stored == rates


def test_the_copy_in_diffusers_names_computes_the_same(finished: Any) -> None:
    result, recorder = finished
    copy = result.lora.with_name(f"{result.lora.stem}.diffusers.safetensors")
    assert any("Also written for diffusers" in data["message"] for data in recorder.of("Warned"))
    ours, theirs = load_lora(result.lora), load_lora(copy)
    assert set(theirs.families) == {"diffusers"} or theirs.families != ours.families
    for name in ours.ranks:
        a, b = (
            file.scales[name]
            * file.state[f"{name}.lora_up.weight"].flatten(1)
            @ file.state[f"{name}.lora_down.weight"].flatten(1)
            for file in (ours, theirs)
        )
        assert torch.allclose(a, b, atol=1e-7)


def test_the_file_says_who_trained_it(finished: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result, _ = finished
    assert cli.main(["inspect", str(result.lora)]) == 0
    text = capsys.readouterr().out
    assert '"applied": 2' in text
    assert f"run: {result.run_dir.name}" in text
    assert "round trip (read, write again, compare): equal" in text
    metadata = load_lora(result.lora).metadata
    assert json.loads(metadata["workflow"]) == {"nodes": [1, 2]}
    assert metadata["safe_scaler_dataset_hash"]


def test_the_coverage_of_a_run_is_shown_again(
    finished: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result, _ = finished
    assert cli.main(["coverage", str(result.run_dir), "--svg", str(tmp_path / "c.svg")]) == 0
    assert "text encoder 2  layer 0" in capsys.readouterr().out
    assert (tmp_path / "c.svg").read_text(encoding="utf-8").startswith("<svg")


def test_a_text_encoder_that_is_not_reached_ends_the_run_before_training(
    micro_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer_core.models import SDXLModel

    denoise = SDXLModel.denoise

    def cut(self: SDXLModel, noisy: Any, timesteps: Any, context: torch.Tensor, pooled: torch.Tensor, ids: Any) -> Any:
        return denoise(self, noisy, timesteps, context.detach(), pooled.detach(), ids)

    monkeypatch.setattr(SDXLModel, "denoise", cut)
    recorder = Recorder()
    result = start_run(small_config(micro_model, pictures, tmp_path, optimizer={"te1_lr": 1e-3}), sink=recorder)
    assert result.status == "failed"
    assert "text encoder" in result.message
    assert "no gradient reaches any of its" in result.message
    assert not recorder.of("StepFinished")
    facts = json.loads((result.run_dir / "coverage.json").read_text(encoding="utf-8"))
    assert any(row["state"] == "broken" for row in facts["blocks"])
    assert result.report is not None
    assert 'id="coverage"' in result.report.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("section", "field", "why"),
    [
        ({"targets": ("IN07 cros rank=8",)}, "lora.targets", "Did you mean 'cross'"),
        ({"targets": ("path:*.attn3.to_k rank=8",)}, "lora.targets", "no layer of this model is called"),
        ({"targets": ("te1 rank=8",), "te1_rank": 0, "te2_rank": 0}, "lora.targets", "not trained"),
        ({"targets": ("IN04 te2 rank=8",)}, "lora.targets", "never hold together"),
        ({"network": "peft:dorra"}, "lora.network", "Did you mean 'peft:dora'"),
        ({"network": "no_such.module"}, "lora.network", "cannot be imported"),
        ({"network": "peft:lora", "network_args": ("lora_dropuot=0.1",)}, "lora.network_args", "lora_dropout"),
        ({"block_dims": "4,4"}, "lora.block_dims", "23"),
        ({"preset": "text_encoders"}, "lora.targets", "leave none of its"),
    ],
)
def test_wrong_networks_are_refused_before_there_is_a_run(
    section: dict[str, Any], field: str, why: str, micro_model: Path, pictures: Path, tmp_path: Path
) -> None:
    config = small_config(micro_model, pictures, tmp_path / "out", lora=section)
    with pytest.raises(ConfigError) as error:
        create_run(config)
    assert field in {problem.field for problem in error.value.problems}
    assert why in str(error.value)
    assert not (tmp_path / "out" / "safe_scaler").exists()


def test_files_that_a_run_cannot_start_from_are_refused_before_it(
    finished: Any, micro_model: Path, pictures: Path, tmp_path: Path
) -> None:
    def refusal(path: Path, **lora: Any) -> str:
        config = small_config(micro_model, pictures, tmp_path / "out", lora={"weights": str(path), **lora})
        with pytest.raises(ConfigError) as error:
            create_run(config)
        assert not (tmp_path / "out" / "safe_scaler").exists()
        assert {problem.field for problem in error.value.problems} == {"lora.weights"}
        return str(error.value)

    good = load_lora(finished[0].lora)
    assert "modules that are not trained in this run" in refusal(finished[0].lora)  # it has convolutions
    unet = {key: value for key, value in good.state.items() if key.startswith("lora_unet_") and "_attn1_" in key}
    save_lora(tmp_path / "unet.safetensors", unet, {})
    assert "matches nothing" in refusal(tmp_path / "unet.safetensors", unet_rank=0)
    key = next(key for key in unet if key.endswith("lora_up.weight"))
    broken = {**unet, key: torch.full_like(unet[key], float("nan"))}
    safetensors.torch.save_file(broken, tmp_path / "nan.safetensors")
    assert "holds NaN or infinity in 1 of" in refusal(tmp_path / "nan.safetensors")
    fewer = {name: value for name, value in unet.items() if name != key}
    safetensors.torch.save_file(fewer, tmp_path / "half.safetensors")
    assert "have only one of lora_down and lora_up" in refusal(tmp_path / "half.safetensors")


def test_a_format_without_names_for_the_kind_is_refused(micro_model: Path, pictures: Path, tmp_path: Path) -> None:
    config = small_config(micro_model, pictures, tmp_path / "out", lora={"network": "peft:oft"})
    config = replace(config, checkpoint=replace(config.checkpoint, save_format="diffusers"))
    with pytest.raises(ConfigError, match="checkpoint.save_format"):
        create_run(config)
