"""Which optimizers there are, how they are configured, LoRA+, and what they do at a step."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from optimizer_cases import ALL, Task, config_of, is_missing, same

from trainer_core.config import OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from trainer_core.config_fields import BadValue
from trainer_core.config_optimizers import CATALOGUE, describe, find_kind, install_command, parse_arguments
from trainer_core.config_rules_training import TRAINING_RULES
from trainer_core.errors import ConfigError
from trainer_core.optim import build_optimizer, effective_rates, set_learning_rates, trial


def problems(optimizer: dict[str, Any], schedule: dict[str, Any] | None = None) -> list[str]:
    config = TrainConfig(
        optimizer=OptimizerConfig(**optimizer),
        schedule=ScheduleConfig(**(schedule or {})),
        run=RunConfig(max_train_steps=100, device="cpu"),
    )
    return [str(problem) for rule in TRAINING_RULES for problem in rule(config)]


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", ALL)
def test_every_optimizer_passes_its_check_and_learns(name: str) -> None:
    """The task's loss falls; D-Adapt and RAdam only begin to move in so few steps."""
    if is_missing(name):
        pytest.skip(f"the library of {name} is not installed")
    rate = 1.0 if find_kind(name).rate_free else 1e-2  # type: ignore[union-attr]
    assert problems({"type": name, "learning_rate": rate}) == []
    task = Task(config_of(name, learning_rate=rate), total=60)

    def loss() -> float:
        return sum(float((parameter.detach() - 0.2).square().sum()) for parameter in task.parameters.values())

    before = loss()
    task.run(0, 60)
    assert loss() < before
    assert all(bool(torch.isfinite(parameter).all()) for parameter in task.parameters.values())


@pytest.mark.parametrize("typed", ["AdamW", "adamw", "AdamW8bit", "PagedAdamW8bit", "Prodigy", "AdaFactor", "CAME"])
def test_names_are_read_as_sd_scripts_users_write_them(typed: str) -> None:
    kind = find_kind(typed)
    assert kind is CATALOGUE[typed.lower()]


def test_every_optimizer_of_sd_scripts_is_known() -> None:
    theirs = (
        "AdamW AdamW8bit PagedAdamW PagedAdamW8bit PagedAdamW32bit Lion Lion8bit PagedLion8bit SGDNesterov "
        "SGDNesterov8bit DAdaptation DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD Prodigy AdaFactor "
        "RAdamScheduleFree AdamWScheduleFree SGDScheduleFree"
    )
    assert [name for name in theirs.split() if find_kind(name) is None] == []


def test_adamw_is_fused_where_the_device_has_it() -> None:
    task = Task(config_of("adamw"))
    assert isinstance(task.optimizer, torch.optim.AdamW)
    assert all(group["fused"] for group in task.optimizer.param_groups)
    plain = Task(config_of("adamw", args=("fused=False",)))
    assert not any(group["fused"] for group in plain.optimizer.param_groups)
    task.run(0, 5)
    plain.run(0, 5)
    for name, value in task.snapshot().items():
        torch.testing.assert_close(value, plain.parameters[name].detach(), rtol=1e-5, atol=1e-7)


def test_adamw_falls_back_where_the_device_has_no_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.optim.AdamW.__init__

    def refusing(self: Any, *args: Any, **options: Any) -> None:
        if options.get("fused"):
            raise RuntimeError("`fused=True` requires all the params to be on supported devices")
        original(self, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "__init__", refusing)
    task = Task(config_of("adamw"))
    assert not any(group["fused"] for group in task.optimizer.param_groups)
    task.run(0, 2)


def test_arguments_by_name() -> None:
    task = Task(config_of("adamw", args=("betas=(0.8, 0.9)", "amsgrad=true"), weight_decay=0.3))
    group = task.optimizer.param_groups[0]
    assert (group["betas"], group["amsgrad"], group["weight_decay"]) == ((0.8, 0.9), True, 0.3)
    half = Task(config_of("adamw", beta1=0.5))
    assert half.optimizer.param_groups[0]["betas"] == (0.5, 0.999)
    assert parse_arguments(["a=1e-3", "b=none", "c=[1,2]", "d=fast", "e=0.9,0.99"]) == {
        "a": 1e-3, "b": None, "c": [1, 2], "d": "fast", "e": (0.9, 0.99),
    }  # fmt: skip


@pytest.mark.parametrize("words", [["decay"], ["a=1", "a=2"], ["=3"], ["a b=3"]])
def test_words_that_are_no_arguments(words: list[str]) -> None:
    with pytest.raises(BadValue):
        parse_arguments(words)


@pytest.mark.parametrize(
    ("optimizer", "part"),
    [
        ({"type": "adamw", "args": ("weight_deacy=0.1",)}, "Did you mean weight_decay?"),
        ({"type": "adamw", "args": ("lr=1",)}, "is set by optimizer.learning_rate"),
        ({"type": "adamw", "args": ("weight_decay=0.1",), "weight_decay": 0.2}, "Keep one of the two"),
        ({"type": "adamw", "args": ("wd",)}, "is not name=value"),
        ({"type": "adamw", "args": ("betas=3",)}, "does not work with adapters"),
        ({"type": "torch.optim.SGD", "beta1": 0.5}, "has no argument betas"),
        ({"type": "adamww"}, "Did you mean adamw?"),
        ({"type": "torch.optim.AdamWW"}, "Did you mean AdamW?"),
        ({"type": "os.path.join"}, "has no optimizer join"),
        ({"type": "torch.optim.LBFGS"}, "runs the model several times a step"),
        ({"type": "torch.optim.SparseAdam"}, "does not work with adapters"),
        ({"type": "torch.nosuchmodule.Adam"}, "cannot be imported"),
    ],
)
def test_what_cannot_be_is_told_at_the_config_check(optimizer: dict[str, Any], part: str) -> None:
    found = problems(optimizer)
    assert len(found) == 1
    assert part in found[0]


@pytest.mark.parametrize("name", ["prodigy", "adamw8bit", "came", "adamwschedulefree", "lion", "dadaptadam"])
def test_a_missing_library_gives_the_install_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_core.config_optimizers.find_spec", lambda module: None)
    kind = CATALOGUE[name]
    (found,) = problems({"type": name, "learning_rate": 1.0})
    assert f"{sys.executable} -m pip install {kind.package}" in found
    assert "which is not installed" in found
    with pytest.raises(ConfigError, match=f"pip install {kind.package}"):
        build_optimizer({"unet": {"w": torch.nn.Parameter(torch.ones(1))}}, OptimizerConfig(type=name))


def test_the_check_of_plain_adamw_looks_at_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> str:
        raise AssertionError("looked at the class")

    monkeypatch.setattr(trial, "try_optimizer", fail)
    assert problems({"weight_decay": 0.123}) == []
    assert install_command(CATALOGUE["adamw"]) is None


def test_an_optimizer_that_does_not_resume_exactly_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """State outside the optimizer's own record: allowed, and said."""

    class Forgetful(torch.optim.SGD):
        memory: dict[int, int] = {}

        def step(self, closure: Any = None) -> Any:
            seen = self.memory[id(self)] = self.memory.get(id(self), 0) + 1
            for group in self.param_groups:
                group["lr"] = 0.01 * seen
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "Forgetful", Forgetful, raising=False)
    assert "does not go on exactly" in trial.try_optimizer(OptimizerConfig(type="torch.optim.Forgetful"))
    assert trial.try_optimizer(OptimizerConfig(type="torch.optim.SGD")) == ""


def test_what_stands_in_the_file() -> None:
    assert describe(OptimizerConfig()) == "torch.optim.adamw.AdamW"
    given = describe(OptimizerConfig(type="Lion", weight_decay=0.1, args=("betas=(0.9,0.99)",)))
    assert given == "pytorch_optimizer.Lion(weight_decay=0.1,betas=(0.9,0.99))"


# LoRA+


def test_loraplus_splits_every_part_and_multiplies_lora_up() -> None:
    config = config_of("adamw", learning_rate=1e-4, te1_lr=2e-4, loraplus_ratio=16.0, loraplus_te_ratio=4.0)
    task = Task(config)
    assert {group["label"]: group["lr"] for group in task.optimizer.param_groups} == pytest.approx(
        {"unet": 1e-4, "unet_up": 16e-4, "te1": 2e-4, "te1_up": 8e-4}
    )
    for group in task.optimizer.param_groups:
        assert all((".lora_up" in name) == group["label"].endswith("_up") for name in group["names"])
    assert sum(len(group["params"]) for group in task.optimizer.param_groups) == len(task.parameters)
    assert set_learning_rates(task.optimizer, 0.5)["unet_up"] == pytest.approx(8e-4)


def test_loraplus_moves_lora_up_faster_and_the_rest_as_before() -> None:
    plain, plus = Task(config_of("sgdnesterov")), Task(config_of("sgdnesterov", loraplus_unet_ratio=8.0))
    start = plain.snapshot()
    for task in (plain, plus):
        task.run(2, 3)
    for name in start:
        moved = plus.parameters[name].detach() - start[name]
        usual = plain.parameters[name].detach() - start[name]
        factor = 8.0 if "unet" in name and "lora_up" in name else 1.0
        torch.testing.assert_close(moved, usual * factor, rtol=1e-3, atol=1e-7)


def test_loraplus_of_zero_and_without_lora_up_is_refused() -> None:
    assert "nothing would be learnt" in problems({"loraplus_ratio": 0.0})[0]
    with pytest.raises(ConfigError, match="no such tensors"):
        build_optimizer({"unet": {"w": torch.nn.Parameter(torch.ones(1))}}, OptimizerConfig(loraplus_ratio=2.0))


def test_kind_part_lr_every_part_has_its_own_rate() -> None:
    """sd-scripts' LoRA module takes the first text-encoder rate for both."""
    parts = {part: {f"{part}.w": torch.nn.Parameter(torch.ones(1))} for part in ("unet", "te1", "te2")}
    optimizer = build_optimizer(parts, OptimizerConfig(learning_rate=1e-4, te1_lr=2e-5, te2_lr=3e-5))
    assert effective_rates(optimizer) == {"unet": 1e-4, "te1": 2e-5, "te2": 3e-5}


# Faults of sd-scripts that are not copied


@pytest.mark.parametrize("name", ["prodigy", "dadaptadam", "pytorch_optimizer.Prodigy"])
def test_one_rate_for_all_parts_is_demanded_where_one_is_found(name: str) -> None:
    """Theirs logs a warning and takes the first rate; a rate of 1e-4 trains nothing."""
    if is_missing(name):
        pytest.skip(f"the library of {name} is not installed")
    assert problems({"type": name, "learning_rate": 1.0}) == []
    (found,) = problems({"type": name, "learning_rate": 1.0, "te1_lr": 0.5})
    assert "unet 1, te1 0.5" in found
    (found,) = problems({"type": name, "learning_rate": 1e-4})
    assert "Write 1." in found
    (found,) = problems({"type": name, "learning_rate": 1.0, "loraplus_ratio": 16.0})
    assert "LoRA+ wants two" in found


def test_the_rate_prodigy_found_is_what_is_reported() -> None:
    if is_missing("prodigy"):
        pytest.skip("prodigyopt is not installed")
    task = Task(config_of("prodigy"))
    task.run(0, 8)
    group = task.optimizer.param_groups[0]
    rates = effective_rates(task.optimizer)
    assert rates["unet"] == pytest.approx(group["d"] * group["lr"])
    assert group["d"] > group["d0"]


def test_adafactor_keeps_the_rates_it_is_given() -> None:
    """Theirs turns relative_step on unless told not to, and with it throws away rates and schedule."""
    task = Task(config_of("adafactor", learning_rate=1e-3, te1_lr=5e-4))
    group = task.optimizer.param_groups[0]
    assert (group["relative_step"], group["scale_parameter"], group["warmup_init"]) == (False, False, False)
    task.run(2, 4)
    assert effective_rates(task.optimizer) == {"unet": 1e-3, "te1": 5e-4}
    assert "throw the learning rates" in problems({"type": "adafactor", "args": ("relative_step=True",)})[0]


def test_a_schedule_under_schedule_free_is_refused_and_warmup_is_not() -> None:
    """Theirs puts a dummy in the schedule's place without a word."""
    if is_missing("adamwschedulefree"):
        pytest.skip("schedulefree is not installed")
    assert "takes the place of a schedule" in problems({"type": "adamwschedulefree"}, {"type": "cosine"})[0]
    assert problems({"type": "adamwschedulefree"}, {"warmup_steps": 10}) == []
    assert "averages the weights itself" in problems({"type": "adamwschedulefree", "ema_decay": 0.9})[0]


@pytest.mark.parametrize(
    ("schedule", "part"),
    [
        ({"type": "warmup_stable_decay"}, "without a decay"),
        ({"type": "cosine", "decay_steps": 0.1}, "has no effect with the schedule cosine"),
        ({"type": "warmup_stable_decay", "warmup_steps": 60, "decay_steps": 50}, "longer than the run (100 steps)"),
        ({"type": "warmup_stable_decay", "warmup_steps": 0.6, "decay_steps": 0.5}, "longer than the run"),
        ({"warmup_steps": 100}, "all of them would be warm-up"),
        ({"warmup_steps": 1.5}, "neither whole steps nor a share"),
        ({"type": "piecewise_constant"}, "schedule.step_rules"),
        ({"type": "piecewise_constant", "step_rules": "1:10"}, "the last factor has a step"),
        ({"type": "cosine", "step_rules": "1:10,0.1"}, "has no effect with the schedule cosine"),
        ({"type": "polynomial", "end_lr": 0.01}, "the rate would rise"),
    ],
)
def test_schedules_that_cannot_be(schedule: dict[str, Any], part: str) -> None:
    found = problems({}, schedule)
    assert len(found) == 1
    assert part in found[0]


def test_kind_precision_params_move_as_far_as_they_should() -> None:
    """B66: 200 steps of AdamW at 1e-4 from 1.0 move 0.02; bf16 weights would not move at all and are refused."""
    weight = torch.nn.Parameter(torch.ones(16))
    optimizer = build_optimizer({"unet": {"w": weight}}, OptimizerConfig(learning_rate=1e-4, weight_decay=0.0))
    for _ in range(200):
        weight.grad = torch.ones(16)
        optimizer.step()
    assert float(1.0 - weight.detach().mean()) == pytest.approx(0.02, rel=0.05)
    half = torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    with torch.no_grad():
        half -= 1e-4
    assert bool((half == 1.0).all())
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match="must be float32"):
            build_optimizer({"unet": {"w": torch.nn.Parameter(torch.ones(2, dtype=dtype))}}, OptimizerConfig())


def test_kind_loss_scale_trained_tensors_stay_float32() -> None:
    """B03: after steps, looks at averaged weights, and a resume."""
    task = Task(config_of("adamw", ema_decay=0.9))
    task.run(0, 3)
    with task.live.evaluation("preview"):
        assert {parameter.dtype for parameter in task.parameters.values()} == {torch.float32}
    resumed = Task(config_of("adamw", ema_decay=0.9), task.snapshot())
    resumed.run(3, 6)
    assert {parameter.dtype for parameter in resumed.parameters.values()} == {torch.float32}


def test_optimizers_draw_nothing_from_the_global_random_state() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = Task(config_of("adamw"))
    first.run(0, 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    second = Task(config_of("adamw"))
    second.run(0, 3)
    assert same(first.snapshot(), second.snapshot())
