"""The pressure guard with an injected allocator: recompute first, then host memory, then it says that this was all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_core.config import LoraConfig
from trainer_core.config_memory import MemoryConfig
from trainer_core.events import Intervention, MemoryState
from trainer_core.memory.activations import Held, Recompute, offloaded, watched
from trainer_core.memory.guard import MemoryReading, Pressure, PressureGuard
from trainer_core.memory.ladder import MemoryLadder
from trainer_core.memory.run_memory import RunMemory
from trainer_core.models import SDXLModel, load_sdxl
from trainer_core.networks import create_network

CPU = torch.device("cpu")
FULL = MemoryReading(peak_allocated=90, current_reserved=95, device_used=97, capacity=100)
EASY = MemoryReading(peak_allocated=50, current_reserved=60, device_used=60, capacity=100)
CROWDED = MemoryReading(peak_allocated=50, current_reserved=80, device_used=95, capacity=100)


class Units:
    """Two steps of recomputation."""

    def __init__(self) -> None:
        self.left = ["up_blocks.2", "down_blocks.0"]

    @property
    def exhausted(self) -> bool:
        return not self.left

    def more(self) -> str:
        return self.left.pop(0)

    def everything(self) -> None:
        self.left.clear()


def guard_of(readings: list[MemoryReading | None], told: list[Pressure], threshold: float = 0.85) -> PressureGuard:
    ladder = MemoryLadder()
    queue = iter(readings)
    return PressureGuard(threshold, CPU, recompute=Units(), ladder=ladder, read=lambda: next(queue), tell=told.append)


def test_under_pressure_recompute_comes_before_host_memory() -> None:
    told: list[Pressure] = []
    guard = guard_of([FULL] * 8, told)
    for step in range(8):
        guard.after_step(step)
    assert [pressure.action.split(" ")[2] for pressure in told[:2]] == ["up_blocks.2", "down_blocks.0"]
    assert "host memory" in told[2].action
    assert "close to the limit" in told[3].action
    assert len(told) == 4, "the step after each crossing is counted first"


def test_below_the_threshold_nothing_happens() -> None:
    told: list[Pressure] = []
    guard = guard_of([EASY] * 4, told)
    for step in range(4):
        guard.after_step(step)
    off = guard_of([FULL] * 4, told, threshold=0.0)
    off.after_step(1)
    unknown = guard_of([None], told)
    unknown.after_step(1)
    assert told == []


def test_blocks_are_given_back_when_others_fill_the_device_but_not_every_step() -> None:
    told: list[Pressure] = []
    guard = guard_of([CROWDED] * 60, told)
    for step in range(60):
        guard.after_step(step)
    assert [pressure.action for pressure in told] == ["cached blocks are given back to the device"] * 2


def test_the_counted_activations_stand_in_the_event() -> None:
    told: list[Pressure] = []
    guard = guard_of([FULL] * 4, told)
    guard.after_step(1)
    weight = torch.nn.Parameter(torch.randn(512, 1024))
    with guard.context():
        (torch.tanh(torch.randn(512, 1024) * weight)).sum()
    guard.after_step(2)
    # The random factor and tanh's output, 2 MiB each; the weight is no activation.
    assert (told[0].evictable_tensors, told[0].evictable_bytes) == (2, 2 * 512 * 1024 * 4)


def assembled(path: Path, *, granularity: str | None = None) -> tuple[SDXLModel, Any, Recompute | None]:
    model = load_sdxl(path, dtype=torch.float32, device=CPU)
    network = create_network(model, LoraConfig(rank=4), trained_parts=("unet",), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, parameter in network.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model, network, None if granularity is None else Recompute(model, granularity)


def gradients(model: SDXLModel, network: Any) -> list[torch.Tensor]:
    config: Any = model.unet.config
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    pooled = draw(2, model.text_encoders[1].config.projection_dim)
    inputs = (draw(2, 4, 8, 8), torch.tensor([10.0, 700.0]), draw(2, 77, config.cross_attention_dim), pooled)
    model.denoise(*inputs, torch.full((2, 6), 64.0)).pow(2).mean().backward()
    found = [parameter.grad for _, parameter in network.named_parameters() if parameter.grad is not None]
    for _, parameter in network.named_parameters():
        parameter.grad = None
    return found


def test_recomputing_and_moving_change_no_number_and_free_memory(micro_model: Path) -> None:
    model, network, recompute = assembled(micro_model, granularity="module")
    assert recompute is not None
    plain = gradients(model, network)
    held = [_held(model, network)]
    while not recompute.exhausted:
        recompute.more()
        held.append(_held(model, network))
        for found, wanted in zip(gradients(model, network), plain, strict=True):
            assert torch.equal(found, wanted)
    # A block without attention keeps little as it is, and its boundary costs something.
    assert all(after < 1.05 * before for before, after in zip(held, held[1:], strict=False))
    assert held[-1] < 0.6 * held[0]
    with offloaded(smallest=0):
        moved = gradients(model, network)
    for found, wanted in zip(moved, plain, strict=True):
        assert torch.equal(found, wanted)


def _held(model: SDXLModel, network: Any) -> int:
    held = Held()
    with watched(held, smallest=0):
        gradients(model, network)
    return held.bytes


@pytest.mark.parametrize(("granularity", "least"), [("layer", 10), ("module", 5), ("global", 1)])
def test_granularity_says_how_much_at_a_time(micro_model: Path, granularity: str, least: int) -> None:
    model, _, recompute = assembled(micro_model, granularity=granularity)
    assert recompute is not None
    units = [unit for unit in model.unet.modules() if hasattr(unit, "gradient_checkpointing")]
    assert recompute.total >= least
    recompute.more()
    active = sum(bool(unit.gradient_checkpointing) for unit in units)
    assert active == {"layer": 1, "global": len(units)}.get(granularity, active)
    recompute.everything()
    assert all(unit.gradient_checkpointing for unit in units)


def test_a_run_tells_what_it_did(micro_model: Path) -> None:
    model, network, _ = assembled(micro_model)
    events: list[Any] = []
    optimizer = torch.optim.AdamW([parameter for _, parameter in network.named_parameters()])
    memory = RunMemory(
        model, optimizer, MemoryConfig(gc_granularity="global"), CPU, events.append, step=lambda: 7, read=lambda: FULL
    )
    memory.after_step()
    memory.after_step()
    intervention, state = events
    assert isinstance(intervention, Intervention)
    assert isinstance(state, MemoryState)
    assert "90% of the device's memory was needed: activations of the whole model are recomputed" in state.detail
    assert (state.step, state.peak_allocated, state.current_reserved) == (7, 90, 95)
