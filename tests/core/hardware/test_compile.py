"""torch.compile on real runs: checked against the same steps without it, and off where it computes something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_setup import Recorder, light_config, write_pictures
from torch import nn

from trainer_core.build import TrainResult, resume_run, start_run
from trainer_core.config import TrainConfig
from trainer_core.config_rules import problems
from trainer_core.hardware import compile_check
from trainer_core.hardware.compile_check import deviations
from trainer_core.models.compiled import CompiledBlocks
from trainer_core.networks.file_check import body_hash
from trainer_core.networks.lora import LoraModule
from trainer_core.preflight import preflight
from trainer_core.runs.protocol import Commands
from trainer_core.trainer import Trainer


@pytest.fixture
def config(micro_model: Path, tmp_path: Path) -> TrainConfig:
    return light_config(micro_model, tmp_path, hardware={"compile": "eager"}, run={"max_train_steps": 4})


@pytest.fixture
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the middle of the UNet is compiled: compiling takes most of a small run's time."""
    monkeypatch.setattr(compile_check, "CompiledBlocks", lambda unet, backend: CompiledBlocks(unet.mid_block, backend))


def off(config: TrainConfig) -> TrainConfig:
    return replace(config, hardware=replace(config.hardware, compile="off"))


def told(recorder: Recorder) -> list[dict[str, Any]]:
    return [data for data in recorder.of("Verdict") if data["kind"] == "COMPILE"]


def losses(recorder: Recorder) -> list[float]:
    return [data["loss"] for data in recorder.of("StepFinished")]


def lora_hash(result: TrainResult) -> str:
    assert result.lora is not None, result.message
    return body_hash(result.lora)


@pytest.mark.usefixtures("few_blocks")
def test_compiled_and_compared(config: TrainConfig) -> None:
    compiled, plain = Recorder(), Recorder()
    assert start_run(config, sink=compiled).status == "finished"
    start_run(off(config), sink=plain)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)
    (word,) = told(compiled)
    assert (word["step"], word["severity"]) == (2, "ok")
    assert "0 graph breaks" in word["sentence"]
    assert int(word["sentence"].split(" graphs")[0].split()[-1]) > 0
    assert told(plain) == []


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut between lora_down and lora_up that is there in compiled code only."""
    original = LoraModule._down

    def down(self: LoraModule, x: torch.Tensor, source: Any) -> torch.Tensor:
        hidden = original(self, x, source)
        if torch.compiler.is_compiling() and self.name.endswith("attn1_to_q"):
            return hidden.detach()
        return hidden

    monkeypatch.setattr(LoraModule, "_down", down)


@pytest.mark.usefixtures("few_blocks", "planted")
def test_a_cut_in_compiled_code_is_named_and_never_reaches_the_weights(config: TrainConfig) -> None:
    compiled = Recorder()
    result = start_run(config, sink=compiled)
    (word,) = told(compiled)
    assert (word["step"], word["severity"]) == (2, "warning"), "lora_up is zero in the first step, so both are zero"
    assert "attn1_to_q.lora_down.weight (missing" in word["sentence"]
    assert lora_hash(result) == lora_hash(start_run(off(config)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"lora": {"rank": 2, "preset": "full", "conv_rank": 2}},
        {"lora": {"rank": 2, "max_norm": 1.0, "clamp": 16.0}},
        {"optimizer": {"te1_lr": 1e-3, "te2_lr": 1e-3}},
        {"precision": {"gradient_checkpointing": True}},
        {"precision": {"compute": "bf16"}},
        {"precision": {"compute": "fp16"}},
        {"gradient": {"accumulation": 2}},
        {"memory": {"micro_batch": 1}},
        {"lora": {"rank": 2, "network": "peft:dora"}},
    ],
    ids=lambda sections: next(iter(sections), "plain") + "-" + "-".join(map(str, next(iter(sections.values()), {}))),
)
def test_sound_models_pass_and_a_stopped_run_goes_on_bit_equal(
    config: TrainConfig, sections: dict[str, dict[str, Any]]
) -> None:
    config = replace(config, hardware=replace(config.hardware, compile="aot_eager"))
    for name, fields in sections.items():
        config = replace(config, **{name: replace(getattr(config, name), **fields)})
    whole = Recorder()
    unbroken = start_run(config, sink=whole)
    assert [word["severity"] for word in told(whole)] == ["ok"], told(whole)
    commands = Commands()
    stopped = start_run(config, commands=commands, sink=Recorder(commands, stop_after=2))
    assert stopped.status == "stopped"
    assert lora_hash(resume_run(stopped.run_dir)) == lora_hash(unbroken)


@pytest.mark.slow
def test_every_shape_is_compared(config: TrainConfig, tmp_path: Path) -> None:
    """The second bucket appears later: its graphs are compared as well."""
    pictures = write_pictures(tmp_path / "two", 4, sizes=((32, 32), (24, 40)))
    recorder = Recorder()
    config = replace(config, dataset=replace(config.dataset, path=str(pictures)))
    assert start_run(config, sink=recorder).status == "finished"
    assert {word["severity"] for word in told(recorder)} == {"ok"}
    (last,) = [word["step"] for word in told(recorder)][-1:]
    assert last >= 3


def test_a_compiler_that_fails_is_told_and_the_run_goes_on(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C++ compiler here")

    broken_blocks: Any = broken
    monkeypatch.setattr(compile_check, "CompiledBlocks", lambda unet, backend: CompiledBlocks(unet, broken_blocks))
    recorder = Recorder()
    result = start_run(config, sink=recorder)
    assert [(word["step"], word["severity"]) for word in told(recorder)] == [(1, "warning")]
    assert "no C++ compiler here" in told(recorder)[0]["sentence"]
    assert lora_hash(result) == lora_hash(start_run(off(config)))


@pytest.mark.usefixtures("few_blocks")
def test_what_compiles_in_every_step_goes_off(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapter dropout would; it is refused. This stands for what nobody thought of."""
    down, loss, words = LoraModule._down, Trainer.loss, ["now"]

    def changing(self: LoraModule, x: torch.Tensor, source: Any) -> torch.Tensor:
        return down(self, x, source) * (2.0 if words[0] == "never" else 1.0)

    def next_word(self: Trainer, epoch: int, batch: Any) -> torch.Tensor:
        words[0] = f"step {self.state.step}"
        return loss(self, epoch, batch)

    monkeypatch.setattr(LoraModule, "_down", changing)
    monkeypatch.setattr(Trainer, "loss", next_word)
    recorder = Recorder()
    config = replace(config, run=replace(config.run, max_train_steps=6))
    assert start_run(config, sink=recorder).status == "finished"
    (word,) = told(recorder)
    assert (word["step"], word["severity"]) == (5, "warning")
    assert "compiled 4 times what it had compiled before" in word["sentence"]


def test_adapter_dropout_is_refused(config: TrainConfig) -> None:
    (problem,) = problems(replace(config, lora=replace(config.lora, rank_dropout=0.1)))
    assert (problem.field, "lora.rank_dropout" in problem.why) == ("hardware.compile", True)


class _Blocks(nn.Module):
    """One block with a layer inside, as the class names of diffusers' UNet have it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = BasicTransformerBlock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)  # type: ignore[no-any-return]


class BasicTransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2.0  # type: ignore[no-any-return]


def test_a_hook_put_on_after_compiling_is_compiled_in() -> None:
    """torch leaves such hooks out by default, without a word."""
    net, x = _Blocks(), torch.randn(2, 3)
    blocks = CompiledBlocks(net, "eager")
    with blocks.on():
        net(x)
    assert blocks.graphs == 1
    net.block.inner.register_forward_hook(lambda module, inputs, output: output + 100.0)
    with blocks.on():
        inside = net(x)
    assert blocks.graphs == 2, "so the step is compared"
    assert torch.equal(inside, net(x))
    assert "forward" not in net.block.__dict__


def test_which_gradients_are_the_same() -> None:
    torch.manual_seed(0)
    one = {name: torch.randn(50) for name in "abcde"}
    same = {name: value * (1 + 1e-5 * torch.randn(50)) for name, value in one.items()}
    assert deviations(one, same, "fp32") == []
    other = {**same, "a": None, "b": one["b"] * 1.01, "c": -one["c"], "d": one["d"] * torch.nan}
    found = {deviation.name: deviation for deviation in deviations(one, other, "fp32")}
    assert found.keys() == {"a", "b", "c", "d"}
    assert found["c"].cosine == pytest.approx(-1.0)
    assert found["b"].decades == pytest.approx(0.00432, abs=1e-4)
    assert {deviation.name for deviation in deviations(one, other, "bf16")} == {"a", "c", "d"}
    assert "missing" in str(found["a"])


def test_noise_and_zeros_are_no_deviation() -> None:
    torch.manual_seed(0)
    large = torch.randn(50)
    one = {"large": large, "tiny": torch.randn(50) * 1e-9, "zero": torch.zeros(50), "none": None, "bad": large / 0.0}
    other = {"large": large, "tiny": torch.randn(50) * 1e-9, "zero": None, "none": None, "bad": large * torch.nan}
    assert deviations(one, other, "fp32") == []


def test_several_processes_are_refused(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [problem.field for problem in preflight(config)] == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    (problem,) = preflight(config)
    assert problem.field == "hardware.compile"
    assert [found.field for found in preflight(off(config))] == []
