"""The frozen base in 8 bits: what is refused, and (with torchao installed) that it trains close to the full one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_setup import Recorder, small_config
from torch import nn

from trainer_core import config_rules_safety
from trainer_core.build import start_run
from trainer_core.config import LoraConfig, MemoryConfig, OptimizerConfig, PrecisionConfig, TrainConfig
from trainer_core.config_rules import problems
from trainer_core.memory.estimate import stored_bytes


def refused(config: TrainConfig) -> dict[str, str]:
    return {problem.field: problem.why for problem in problems(config)}


def test_what_does_not_go_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    eight = PrecisionConfig(base_format="int8")
    monkeypatch.setattr(config_rules_safety, "find_spec", lambda name: None)
    assert "torchao, which is not installed" in refused(TrainConfig(precision=eight))["precision.base_format"]
    monkeypatch.setattr(config_rules_safety, "find_spec", lambda name: name)
    assert "precision.base_format" not in refused(TrainConfig(precision=eight))
    for lora in (LoraConfig(network="peft:dora"), LoraConfig(init="pissa")):
        assert "precision.base_format" in refused(TrainConfig(precision=eight, lora=lora))
    host = MemoryConfig(text_encoders="host")
    assert "memory.text_encoders" not in refused(TrainConfig(memory=host))
    trained = OptimizerConfig(te2_lr=1e-5)
    assert "cannot hold te2" in refused(TrainConfig(memory=host, optimizer=trained))["memory.text_encoders"]


def test_bytes_of_a_plain_tensor() -> None:
    assert stored_bytes(torch.zeros(3, 5, dtype=torch.float16)) == 30


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "near"), [("int8", 1e-3), ("fp8", 5e-3)])
def test_a_run_on_an_8_bit_base(
    compute: str, kind: str, near: float, micro_model: Path, pictures: Path, tmp_path: Path
) -> None:
    """Trains, is proven and saved; losses near those of the full base, and the base is smaller."""
    pytest.importorskip("torchao")
    losses: dict[str, list[float]] = {}
    base: dict[str, int] = {}
    for stored in ("compute", kind):
        recorder = Recorder()
        sections: dict[str, dict[str, Any]] = {
            "precision": {"compute": compute, "base_format": stored},
            "lora": {"preset": "attention"},
            "optimizer": {"te1_lr": 0.0, "te2_lr": 0.0},
            "run": {"max_train_steps": 2},
        }
        result = start_run(small_config(micro_model, pictures, tmp_path / stored, **sections), sink=recorder)
        assert result.status == "finished", result.message
        losses[stored] = recorder.losses
        base[stored] = json.loads((result.run_dir / "memory.json").read_text(encoding="utf-8"))["parts"][0][1]
    assert losses[kind] != losses["compute"], "rounded"
    assert losses[kind] == pytest.approx(losses["compute"], rel=near)
    assert base[kind] < 0.8 * base["compute"]


@pytest.mark.slow
def test_quantised_layers_give_the_gradient_of_the_rounded_weights() -> None:
    ao = pytest.importorskip("torchao.quantization")
    layer = nn.Linear(64, 48).requires_grad_(False)
    plain = layer.weight.clone()
    ao.quantize_(nn.Sequential(layer), ao.Int8WeightOnlyConfig())
    x = torch.randn(5, 64, requires_grad=True)
    layer(x).pow(2).sum().backward()
    rounded: Any = layer.weight
    y = x.detach().requires_grad_()
    torch.nn.functional.linear(y, rounded.dequantize(), layer.bias).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert stored_bytes(rounded) < 0.4 * plain.nbytes
