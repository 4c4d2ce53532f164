"""EMA, schedule-free averages, and the swap that never changes what is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_cases import Task, config_of, is_missing, same

from trainer_core.config import OptimizerConfig
from trainer_core.errors import CheckpointError
from trainer_core.optim import Ema, LiveWeights, build_optimizer, optimizer_state

SCHEDULE_FREE = ("adamwschedulefree", "radamschedulefree", "sgdschedulefree", "pytorch_optimizer.ScheduleFreeAdamW")


def averaged(name: str) -> Task:
    if is_missing(name):
        pytest.skip(f"the library of {name} is not installed")
    return Task(config_of(name, **({"ema_decay": 0.9} if name == "adamw" else {})))


def test_ema_by_hand() -> None:
    """average += (1 - d) (value - average), d = min(decay, (1 + n) / (10 + n))."""
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    ema = Ema({"w": parameter}, 0.2)
    expected = 1.0
    for n, value in enumerate((2.0, 4.0, -1.0, 3.0)):
        with torch.no_grad():
            parameter.fill_(value)
        ema.update()
        decay = min(0.2, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * value
        assert float(ema.averages["w"]) == pytest.approx(expected, rel=1e-6)
    assert ema.updates == 4


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, 1.5])
def test_ema_decay_must_average(decay: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Ema({}, decay)


def test_ema_state_goes_on_exactly_and_refuses_another_adapter() -> None:
    task = Task(config_of("adamw", ema_decay=0.9))
    task.run(0, 4)
    assert task.live.ema is not None
    averages, updates = task.live.ema.state()
    other = Task(config_of("adamw", ema_decay=0.9), task.snapshot())
    assert other.live.ema is not None
    other.live.ema.load_state(averages, updates)
    for each in (task, other):
        assert each.live.ema is not None
        each.gradients(4)
        with torch.no_grad():
            for parameter in each.parameters.values():
                parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
        each.live.after_update()
    assert same(task.live.ema.averages, other.live.ema.averages)
    del averages["lora_unet_a.lora_up.weight"]
    with pytest.raises(CheckpointError) as caught:
        other.live.ema.load_state({**averages, "x": torch.zeros(1)}, 1)
    assert caught.value.differences == (
        "x: in the checkpoint only",
        "lora_unet_a.lora_up.weight: no average in the checkpoint",
    ) or list(caught.value.differences) == [
        "x: in the checkpoint only",
        "lora_unet_a.lora_up.weight: no average in the checkpoint",
    ]


def test_ema_is_off_by_default() -> None:
    assert OptimizerConfig().ema_decay == 0
    task = Task(config_of("adamw"))
    task.run(0, 2)
    before = task.snapshot()
    with task.live.evaluation("export"):
        assert same(task.snapshot(), before)
    assert task.live.ema is None


@pytest.mark.parametrize("name", ["adamw", *SCHEDULE_FREE])
def test_kind_side_effects_looking_changes_nothing(name: str) -> None:
    """B63: a run whose averaged weights are looked at after every step is bit-equal to one that is never looked at."""
    looked, alone = averaged(name), averaged(name)
    for step in range(8):
        looked.step(step)
        alone.step(step)
        with looked.live.evaluation("validation"):
            shown = looked.snapshot()
        with pytest.raises(RuntimeError, match="preview"), looked.live.evaluation("preview"):
            raise RuntimeError("a preview that fails")
        assert same(looked.snapshot(), alone.snapshot())
    assert not same(shown, looked.snapshot())
    one, other = optimizer_state(looked.optimizer), optimizer_state(alone.optimizer)
    assert same(one[0], other[0])
    assert one[1] == other[1]


@pytest.mark.parametrize("name", ["adamw", "adamwschedulefree"])
def test_a_checkpoint_inside_an_evaluation_holds_the_trained_weights(name: str) -> None:
    """The command `save` may come while a preview is made."""
    task = averaged(name)
    task.run(0, 5)
    trained, state = task.snapshot(), optimizer_state(task.optimizer)
    with task.live.evaluation("preview"):
        shown = task.snapshot()
        assert not same(shown, trained)
        with task.live.training():
            assert same(task.snapshot(), trained)
            assert optimizer_state(task.optimizer)[1] == state[1]
        assert same(task.snapshot(), shown)
        with task.live.evaluation("validation"):
            assert same(task.snapshot(), shown)
    assert same(task.snapshot(), trained)
    assert optimizer_state(task.optimizer)[1] == state[1]


def test_each_purpose_may_see_the_trained_weights_instead() -> None:
    task = Task(config_of("adamw", ema_decay=0.9, ema_preview=False))
    task.run(0, 5)
    trained = task.snapshot()
    with task.live.evaluation("preview"):
        assert same(task.snapshot(), trained)
    with task.live.evaluation("export"):
        averages = task.snapshot()
        assert not same(averages, trained)
        with task.live.evaluation("preview"):
            assert same(task.snapshot(), trained)
        assert same(task.snapshot(), averages)
    assert same(task.snapshot(), trained)


def test_schedule_free_result_is_its_average() -> None:
    """What is judged is x of the paper: after one step x = z, and it is not the point y that is trained."""
    if is_missing("adamwschedulefree"):
        pytest.skip("schedulefree is not installed")
    task = averaged("adamwschedulefree")
    task.run(2, 3)
    parameter = task.parameters["lora_unet_a.lora_up.weight"]
    with task.live.evaluation("export"):
        torch.testing.assert_close(parameter.detach(), task.optimizer.state[parameter]["z"], rtol=1e-5, atol=1e-7)


def test_a_step_inside_an_evaluation_is_impossible_for_schedule_free() -> None:
    """The library itself refuses it; nothing here trains averaged weights by mistake."""
    task = averaged("adamwschedulefree")
    task.run(0, 2)
    task.gradients(2)
    with task.live.evaluation("validation"), pytest.raises(Exception, match="train"):
        task.optimizer.step()


def test_the_memory_of_the_swap_is_given_back() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    live = LiveWeights(
        build_optimizer({"unet": {"w": weight}}, OptimizerConfig(ema_decay=0.5)), OptimizerConfig(ema_decay=0.5)
    )
    with live.evaluation("validation"):
        pass
    kept: Any = vars(live)["_kept"]
    assert kept is None
