"""Faults of a device that raise no error: a step computed again, and the same batch computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_setup import Recorder, light_config

from trainer_core.build import start_run
from trainer_core.config import TrainConfig
from trainer_core.hardware import recheck
from trainer_core.hardware.recheck import SpikeRecheck
from trainer_core.hardware.sentinel import Sentinel
from trainer_core.networks.file_check import body_hash
from trainer_core.trainer import Trainer


class _Larger(torch.autograd.Function):
    """Identity with a thousandfold gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 1000.0


@pytest.fixture
def config(micro_model: Path, tmp_path: Path) -> TrainConfig:
    return light_config(micro_model, tmp_path, hardware={"sentinel_every": 3}, run={"max_train_steps": 7})


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The gradient of step 6 is a thousand times too large at its first computation only. Steps that were hit."""
    monkeypatch.setattr(recheck, "_ENOUGH", 4)
    original, hits = Trainer.loss, []

    def loss(self: Trainer, epoch: int, batch: Any) -> torch.Tensor:
        loss_B = original(self, epoch, batch)
        if self.state.step != 5 or hits:
            return loss_B
        hits.append(self.state.step)
        larger = _Larger.apply(loss_B)
        assert isinstance(larger, torch.Tensor)
        return larger

    monkeypatch.setattr(Trainer, "loss", loss)
    return hits


def test_a_transient_fault_never_reaches_the_weights(config: TrainConfig, fault: list[int]) -> None:
    recorder = Recorder()
    result = start_run(config, sink=recorder)
    assert (result.status, result.applied, fault) == ("finished", 7, [5])
    told = [data for data in recorder.of("Verdict") if data["kind"] == "HARDWARE"]
    assert [(data["step"], data["severity"]) for data in told] == [(6, "warning")]
    assert "The second computation was used" in told[0]["sentence"]
    norms = [data["grad_norm"] for data in recorder.of("StepFinished")]
    assert norms[5] < 10 * max(norms[:5]), "what was applied"


@pytest.mark.slow
def test_after_a_transient_fault_the_lora_is_the_undisturbed_runs(config: TrainConfig, fault: list[int]) -> None:
    """Bit for bit, with the sentinel looking on as well."""
    disturbed = start_run(config)
    assert fault == [5]
    plain = start_run(replace(config, hardware=replace(config.hardware, sentinel_every=0)))
    assert plain.lora is not None
    assert disturbed.lora is not None
    assert body_hash(disturbed.lora) == body_hash(plain.lora)


class Watched:
    """A trainer's surroundings, and what is told there."""

    def __init__(self, **hardware: Any) -> None:
        config = TrainConfig()
        self.told: list[Any] = []
        self.state = SimpleNamespace(step=0)
        self.parts = SimpleNamespace(processes=None)
        self.bus = SimpleNamespace(emit=self.told.append)
        self.guard = SimpleNamespace(alarms=set())
        changed = type(config.hardware)(**hardware)
        self.config = SimpleNamespace(hardware=changed, health=config.health)


def norms(trainer: Watched, looks: SpikeRecheck, *values: float) -> Iterator[bool]:
    """Whether a step is wanted again, for each computation with these norms."""
    for value in values:
        reading: Any = SimpleNamespace(grad_norm=value)
        verdict: Any = SimpleNamespace(action="apply")
        again = looks.wanted(reading, verdict)
        trainer.state.step += not again
        yield again


def test_a_spike_that_comes_again_is_no_fault_of_the_device() -> None:
    trainer: Any = Watched()
    looks = SpikeRecheck(trainer)
    assert not any(norms(trainer, looks, *[1.0, 1.1] * 15))
    assert list(norms(trainer, looks, 30.0, 30.0)) == [True, False]
    assert list(norms(trainer, looks, 30.0, 1.0)) == [False, False], "one cause makes many: quiet for ten steps"
    assert not any(norms(trainer, looks, *[1.0] * 10))
    assert trainer.told == []
    assert list(norms(trainer, looks, 30.0, 1.05)) == [True, False]
    assert len(trainer.told) == 1


def test_noise_is_not_computed_again_and_it_can_be_switched_off() -> None:
    """Healthy norms of batch 1 scatter by 0.3 decades (diagnostics section 3)."""
    scatter = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 0.3
    trainer: Any = Watched()
    assert not any(norms(trainer, SpikeRecheck(trainer), *(10**scatter).tolist()))
    trainer = Watched(recheck_spikes=False)
    assert not any(norms(trainer, SpikeRecheck(trainer), *[1.0] * 30, 1e6))


def looking(trainer: Any, prints: list[int]) -> Sentinel:
    class Scripted(Sentinel):
        def _print(self) -> tuple[int, int]:
            return prints.pop(0), 0

    return Scripted(trainer, 10)


def look_at(trainer: Any, sentinel: Sentinel, *steps: int) -> list[str]:
    for step in steps:
        trainer.state.step = step
        sentinel()
    return [getattr(event, "severity", type(event).__name__) for event in trainer.told]


def test_bits_that_differ_twice_make_the_device_suspect() -> None:
    trainer: Any = Watched()
    sentinel = looking(trainer, [1, 1, 2, 2, 3, 4, 3, 3, 5, 6, 5, 7])
    assert look_at(trainer, sentinel, 9, 10, 11, 20) == []
    assert look_at(trainer, sentinel, 30) == ["warning"]
    assert not trainer.guard.alarms
    assert look_at(trainer, sentinel, 40) == ["warning", "error"]
    assert trainer.guard.alarms == {"HARDWARE"}, "no checkpoint of now is one to go back to"
    assert "this device computes wrong" in trainer.told[-1].sentence


def test_with_several_processes_the_one_that_differs_is_named() -> None:
    trainer: Any = Watched()
    trainer.parts.processes = SimpleNamespace(
        gather=lambda text: [text, "other" if trainer.state.step > 10 else "same"]
    )
    assert look_at(trainer, looking(trainer, [1] * 6), 10, 20) == ["error"]
    assert "two times in a row (process 1): this device computes wrong." in trainer.told[0].sentence


def test_kernels_that_do_not_repeat_themselves_switch_it_off_and_say_so() -> None:
    trainer: Any = Watched()
    assert look_at(trainer, looking(trainer, [1, 2]), 10, 20, 30) == ["Warned"]
    assert "is off for this run" in trainer.told[0].message
