"""Freezing: what is named stops at its step, useless adapters are found, useful ones kept, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from health_records import fast

from trainer_core.config_freezing import FreezingConfig, parse_stop
from trainer_core.events import EventBus, ValidationFinished
from trainer_core.health.engine import Measurement
from trainer_core.health.freezing import Freezing
from trainer_core.health.groups import describe
from trainer_core.health.records import SlowRecord, TensorSample

COUNT = 100
USELESS = frozenset(range(0, COUNT, 10))


class Bench:
    """A hundred scalar adapters on an AdamW; ten of them get noise instead of a gradient."""

    def __init__(self, config: FreezingConfig) -> None:
        self.names = [f"lora_unet_input_blocks_{4 + n % 2}_1_{n}_attn2_to_q.lora_up.weight" for n in range(COUNT)]
        self.names[-1] = "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_up.weight"
        self.weights = [torch.nn.Parameter(torch.full((4, 1), 1.0)) for _ in self.names]
        group = {"params": self.weights, "names": self.names, "lr": 1e-3}
        self.optimizer = torch.optim.AdamW([group])
        self.tensors = {name: describe(name, "te1" if "te1" in name else "unet") for name in self.names}
        self.told: list[frozenset[str]] = []
        self.events: list[dict[str, object]] = []
        self.step_number = 0
        self.bus = EventBus(run_id="x")
        self.bus.subscribe(self.events.append)
        self.freezing = Freezing(
            config, self.optimizer, self.tensors, self.bus, total_steps=100, step=lambda: self.step_number,
            tell_engine=self.told.append,
        )  # fmt: skip

    def step(self) -> list[bool]:
        """One update; which weights moved."""
        before = [weight.detach().clone() for weight in self.weights]
        for weight in self.weights:
            weight.grad = torch.ones_like(weight)
        self.optimizer.step()
        self.step_number += 1
        return [not torch.equal(old, new) for old, new in zip(before, self.weights, strict=True)]

    def measure(self, generator: np.random.Generator) -> None:
        samples = {
            name: TensorSample(True, True, gain=0.0 if n in USELESS else float(abs(generator.normal(1.0, 0.5))))
            for n, name in enumerate(self.names)
        }
        record = SlowRecord(self.step_number, 1.0, 1.0, samples)
        self.freezing.measured(Measurement(fast(self.tensors, self.step_number), slow=record))


def test_a_part_stops_at_its_step_and_does_not_decay() -> None:
    bench = Bench(FreezingConfig(stop_after=("te1:0.03", "down1.cross:5")))
    for step in range(1, 8):
        moved = bench.step()
        assert moved[-1] == (step <= 3), "3 % of 100 steps"
        assert moved[0] == (step <= 5)
    assert bench.told[-1] >= {bench.names[-1], bench.names[0]}
    assert sum("frozen" in str(event["data"]) for event in bench.events) == 2


def test_useless_adapters_are_frozen_useful_ones_are_not() -> None:
    bench = Bench(FreezingConfig(rule="contribution", window=20, windows=3))
    generator = np.random.default_rng(0)
    for weight in bench.weights:
        weight.requires_grad_(True)
    for _ in range(90):
        # Useless adapters do not grow.
        bench.step()
        with torch.no_grad():
            for number in USELESS:
                bench.weights[number].fill_(1.0)
        if bench.step_number % 10 == 0:
            bench.measure(generator)
    frozen = {number for number, name in enumerate(bench.names) if name.partition(".")[0] in bench.freezing.frozen}
    assert len(frozen & USELESS) >= 9
    assert len(frozen - USELESS) <= 2


def test_a_worse_validation_loss_thaws() -> None:
    bench = Bench(FreezingConfig(rule="contribution"))
    bench.freezing.frozen = {"lora_unet_input_blocks_4_1_0_attn2_to_q"}
    for step, loss in ((10, 1.0), (20, 1.01), (30, 1.05)):
        assert bench.freezing.frozen, "not yet"
        bench.bus.emit(ValidationFinished(step=step, validation_loss=loss, bands=(loss,), pictures=1, seconds=1.0))
    assert not bench.freezing.frozen


def test_the_articles_rule_freezes_nearly_everything() -> None:
    """gamma(t) = 0.012 exp(-t / 500): norms of LoRA tensors are 1e-4 to 1e-2."""
    bench = Bench(FreezingConfig(rule="gamma"))
    generator = np.random.default_rng(0)
    norms = dict(zip(bench.names, 10 ** generator.uniform(-4, -2, COUNT), strict=True))
    bench.freezing.measured(Measurement(fast(bench.tensors, 5, norms=norms)))
    assert len(bench.freezing.frozen) >= 0.9 * COUNT
    again = Bench(FreezingConfig(rule="gamma"))
    again.freezing.load_state_dict(bench.freezing.state_dict())
    assert again.freezing.frozen == bench.freezing.frozen


@pytest.mark.parametrize(("text", "wanted"), [("te1:0.3", ("te1", 0.3)), ("down1.cross:200", ("down1.cross", 200.0))])
def test_stops_are_read(text: str, wanted: tuple[str, float]) -> None:
    assert parse_stop(text) == wanted


@pytest.mark.parametrize("text", ["te1", "te1:x", ":5", "te1:0", "te1:1.5", "te1:-3"])
def test_what_is_no_stop_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_stop(text)


def test_figures_of_a_step_are_not_shared() -> None:
    assert replace(TensorSample(True, True), gain=1.0).gain == 1.0
