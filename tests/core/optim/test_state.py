"""Optimizer state by name: every optimizer goes on bit for bit after its state went through files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from optimizer_cases import ALL, Task, config_of, is_missing, same
from safetensors.torch import load_file, save_file

from trainer_core.errors import CheckpointError
from trainer_core.optim import build_optimizer, load_optimizer_state, optimizer_state

_NOT_LORAPLUS = ("prodigy", "dadapt")


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", ALL)
def test_kind_resume_state_every_optimizer_goes_on_exactly(name: str, tmp_path: Path) -> None:
    """B16: 5 steps, state through a file and JSON into a new optimizer, 4 more: equal to 9 steps, and needed for it."""
    if is_missing(name):
        pytest.skip(f"the library of {name} is not installed")
    config = config_of(name)
    going_on = Task(config)
    going_on.run(0, 5)
    values, (tensors, numbers) = going_on.snapshot(), optimizer_state(going_on.optimizer)
    save_file(tensors, tmp_path / "optimizer.safetensors")
    numbers = json.loads(json.dumps(numbers, allow_nan=False))
    resumed, weights_only = Task(config, values), Task(config, values)
    load_optimizer_state(resumed.optimizer, load_file(tmp_path / "optimizer.safetensors"), numbers)
    assert_same_state(optimizer_state(resumed.optimizer), (tensors, numbers))
    for task in (going_on, resumed, weights_only):
        task.run(5, 9)
    assert same(going_on.snapshot(), resumed.snapshot())
    assert_same_state(optimizer_state(resumed.optimizer), optimizer_state(going_on.optimizer))
    assert not same(going_on.snapshot(), weights_only.snapshot())
    assert not same(going_on.snapshot(), values)


def assert_same_state(
    one: tuple[dict[str, torch.Tensor], dict[str, object]], other: tuple[dict[str, torch.Tensor], dict[str, object]]
) -> None:
    assert same(one[0], other[0])
    assert one[1] == other[1]


def test_state_of_an_8bit_optimizer_stays_8bit() -> None:
    if is_missing("adamw8bit"):
        pytest.skip("bitsandbytes is not installed")
    task = Task(config_of("adamw8bit"))
    task.run(0, 3)
    tensors, _ = optimizer_state(task.optimizer)
    assert tensors["state1/lora_unet_a.lora_down.weight"].dtype == torch.uint8
    assert tensors["state1/lora_te1_b.lora_down.weight"].dtype == torch.float32  # small tensors stay exact


def test_rates_and_settings_of_a_group_stay_the_configs() -> None:
    """B20: a changed learning rate or weight decay wins over what the checkpoint was made with."""
    task = Task(config_of("adamw"))
    task.run(0, 3)
    other = Task(config_of("adamw", learning_rate=5e-4, weight_decay=0.5))
    load_optimizer_state(other.optimizer, *optimizer_state(task.optimizer))
    assert [group["lr"] for group in other.optimizer.param_groups] == [5e-4, 5e-4]
    assert [group["weight_decay"] for group in other.optimizer.param_groups] == [0.5, 0.5]


def test_kind_resume_config_other_rank_is_refused_by_name() -> None:
    """B21: also where no state tensor has the parameter's shape (Adafactor's are rows and columns)."""
    task = Task(config_of("torch.optim.Adafactor"))
    task.run(0, 2)
    parameter = torch.nn.Parameter(torch.zeros(8, 320))
    other = build_optimizer({"unet": {"lora_unet_a.lora_down.weight": parameter}}, config_of("torch.optim.Adafactor"))
    with pytest.raises(CheckpointError) as caught:
        load_optimizer_state(other, *optimizer_state(task.optimizer))
    lines = caught.value.differences
    assert "lora_unet_a.lora_down.weight: (16, 320) in the checkpoint, (8, 320) now" in lines
    assert "lora_te1_b.lora_up.weight: in the checkpoint only" in lines
    assert not other.state


def test_group_state_of_other_groups_is_refused() -> None:
    """CAME counts its steps a group: with LoRA+ switched on there is a group without a count."""
    if is_missing("came"):
        pytest.skip("pytorch-optimizer is not installed")
    task = Task(config_of("came"))
    task.run(0, 2)
    other = Task(config_of("came", loraplus_ratio=4.0), task.snapshot())
    with pytest.raises(CheckpointError) as caught:
        load_optimizer_state(other.optimizer, *optimizer_state(task.optimizer))
    assert "groups: unet, te1 in the checkpoint, unet, unet_up, te1, te1_up now (LoRA+ on or off)" in (
        caught.value.differences
    )


def test_state_that_cannot_be_stored_is_an_error() -> None:
    task = Task(config_of("adamw"))
    task.run(0, 1)
    task.optimizer.state[task.parameters["lora_unet_a.lora_up.weight"]]["plan"] = object()
    with pytest.raises(CheckpointError, match="cannot be stored"):
        optimizer_state(task.optimizer)


def test_nested_and_odd_values_survive() -> None:
    task = Task(config_of("adamw"))
    task.run(0, 1)
    parameter = task.parameters["lora_unet_a.lora_up.weight"]
    odd = {"list": [torch.ones(2), (1, None)], "inf": float("inf"), "on": True, "name": "x", "int": 3}
    task.optimizer.state[parameter].update(odd)
    tensors, numbers = optimizer_state(task.optimizer)
    other = Task(config_of("adamw"), task.snapshot())
    load_optimizer_state(other.optimizer, tensors, json.loads(json.dumps(numbers)))
    state = other.optimizer.state[other.parameters["lora_unet_a.lora_up.weight"]]
    assert torch.equal(state["list"][0], torch.ones(2))
    assert state["list"][1] == (1, None)
    assert (state["inf"], state["on"], state["name"], state["int"]) == (float("inf"), True, "x", 3)
