"""The escalation ladder by itself: order, counts, and what is passed over."""

from __future__ import annotations

from trainer_core.config import SafetyConfig
from trainer_core.health.ladder import Attempt, Ladder, Rung
from trainer_core.health.stop_report import StepRow, StopFacts, stop_report
from trainer_core.optim.phases import EXPLODING, FLOOR, OVERFLOW, Trigger

TROUBLE = Trigger(OVERFLOW, "8 rejected steps in a row")


def climb(ladder: Ladder, trigger: Trigger = TROUBLE, *, recovering: bool = True, cannot: str = "") -> str:
    """One more trigger; returns what was done."""
    rung, _ = ladder.next(trigger, recovering=recovering, cannot=lambda _: cannot, culprit="lora_x")
    if rung is None:
        return "stop"
    ladder.take(rung, culprit="lora_x")
    return rung.compute or rung.name


def test_u6_order_of_the_rungs() -> None:
    """The ladder's half of U6: rollback, bf16, fp32, learning rate, stop."""
    ladder = Ladder(SafetyConfig(), "fp16")
    done = [climb(ladder, recovering=number > 0) for number in range(5)]
    assert done == ["rollback", "bf16", "fp32", "learning_rate", "stop"]
    assert (ladder.compute, ladder.lr_factor) == ("fp32", 0.5)


def test_u6_stops_within_40_decided_steps() -> None:
    """17 rejected steps of the calibration, then 8 at a rung in fp16 and 3 at one without a scale to lower."""
    from trainer_core.config import PrecisionConfig
    from trainer_core.optim.phases import Phases

    ladder, steps, done = Ladder(SafetyConfig(), "fp16"), 0, []
    phases = Phases(PrecisionConfig(), SafetyConfig(), scaled=True)
    scale, kind = 65536.0, OVERFLOW
    while not done or done[-1] != "stop":
        steps += 1
        kind = FLOOR if ladder.compute != "fp16" or scale <= 1 else OVERFLOW
        trigger = phases.record(kind, scale).trigger
        scale = max(1.0, scale / 2)
        if trigger is not None:
            done.append(climb(ladder, trigger, recovering=phases.phase == "RECOVER"))
            phases.restart()
            scale = 4096.0
    assert done == ["rollback", "bf16", "fp32", "learning_rate", "stop"]
    assert steps <= 40


def test_a_new_fault_begins_with_a_rollback_while_there_are_some() -> None:
    ladder = Ladder(SafetyConfig(), "fp32")
    assert [climb(ladder, recovering=False) for _ in range(6)] == [
        *["rollback"] * 3,
        *["learning_rate"] * 2,
        "stop",
    ]
    assert ladder.lr_factor == 0.25


def test_formats_that_cannot_be_computed_are_passed_over_with_the_reason() -> None:
    ladder = Ladder(SafetyConfig(), "fp16", place=0)
    rung, passed = ladder.next(TROUBLE, recovering=True, cannot=lambda name: "no bf16" if name == "bf16" else "")
    assert rung == Rung("precision", "fp32")
    rung, passed = ladder.next(TROUBLE, recovering=True, cannot=lambda _: "4.8 GiB more are needed")
    assert rung == Rung("learning_rate")
    assert passed == ["precision: 4.8 GiB more are needed"]


def test_exploding_gradients_are_no_matter_of_the_format() -> None:
    ladder = Ladder(SafetyConfig(), "fp16")
    trigger = Trigger(EXPLODING, "3 spikes in 10 steps")
    assert [climb(ladder, trigger, recovering=number > 0) for number in range(3)] == [
        "rollback",
        "learning_rate",
        "stop",
    ]


def test_opt_in_rungs_are_reachable() -> None:
    ladder = Ladder(SafetyConfig(rungs=("reset_optimizer", "freeze_module")), "fp32")
    assert [climb(ladder, recovering=number > 0) for number in range(3)] == ["reset_optimizer", "freeze_module", "stop"]
    assert ladder.frozen == ["lora_x"]


def test_state_round_trip() -> None:
    ladder = Ladder(SafetyConfig(), "fp16")
    for number in range(4):
        climb(ladder, recovering=number > 0)
    ladder.history.append(Attempt(30, 20, "rollback", "other noise", "8 in a row"))
    other = Ladder(SafetyConfig(), "fp16")
    other.load_state_dict(ladder.state_dict())
    assert vars(other) == vars(ladder)
    fresh = Ladder(SafetyConfig(), "bf16")  # nothing was moved: the number format is the config's
    fresh.load_state_dict(Ladder(SafetyConfig(), "fp16").state_dict())
    assert fresh.compute == "bf16"


def test_the_report_names_what_happened_and_what_to_change() -> None:
    from collections import Counter

    facts = StopFacts(
        step=40,
        trigger=TROUBLE,
        why="There is no rung left on the ladder.",
        compute="fp16",
        passed=["precision: no bf16"],
        history=[Attempt(30, 20, "rollback", "other noise and other pictures", "8 in a row (OVERFLOW)")],
        rows=[StepRow(39, 1, "", 0.5, 0.1, 16.0), StepRow(40, 1, OVERFLOW, 0.5, float("inf"), 8.0)],
        tensors=Counter({"lora_unet_a": 3}),
        samples=Counter({"cat.png": 2}),
        quarantined=["dog.png"],
        learning_rate=1e-4,
    )
    text = stop_report(facts)
    for part in (
        "# Stopped at step 40",
        "back to step 20, other noise",
        "lora_unet_a (3 times)",
        "cat.png (2 times)",
        "dog.png",
        "precision.compute = 'bf16'",
        "optimizer.learning_rate = 2.5e-05",
        "| 40 | 1 | OVERFLOW | 0.5 | not finite | 8 |",
    ):
        assert part in text


def test_a_frozen_module_neither_moves_nor_decays() -> None:
    import torch

    from trainer_core.config import OptimizerConfig
    from trainer_core.optim import build_optimizer
    from trainer_core.recovery import freeze

    names = ("lora_x.lora_down.weight", "lora_xy.lora_down.weight")
    one, other = (torch.nn.Parameter(torch.ones(3)) for _ in names)
    optimizer = build_optimizer(
        {"unet": dict(zip(names, (one, other), strict=True))}, OptimizerConfig(learning_rate=0.1)
    )
    for _ in range(2):
        (one.sum() + other.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = one.detach().clone(), other.detach().clone()
    freeze(optimizer, "lora_x")
    (one.sum() + other.sum()).backward()
    optimizer.step()
    assert torch.equal(one, before[0])
    assert not torch.equal(other, before[1])
