"""Precision: one unscale and one device read a step, verdicts, and what a rejected step leaves untouched."""

from __future__ import annotations

import math

import pytest
import torch

from trainer_core.config import GradientConfig, OptimizerConfig, PrecisionConfig
from trainer_core.errors import CheckpointError
from trainer_core.optim import Precision, build_optimizer, load_optimizer_state, optimizer_state
from trainer_core.optim.phases import OVERFLOW, POISON

CPU = torch.device("cpu")


def make(
    compute: str = "fp32", max_norm: float = 1.0, **options: object
) -> tuple[torch.nn.Parameter, torch.optim.Optimizer, Precision]:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = build_optimizer({"unet": {"w": weight}}, OptimizerConfig(learning_rate=0.1))
    config = PrecisionConfig(**options)  # type: ignore[arg-type]
    return weight, optimizer, Precision(config, compute, CPU, gradient=GradientConfig(max_norm=max_norm))


def step(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer, precision: Precision, scale: float = 1.0) -> str:
    precision.backward((weight * scale).square().sum().view(1), 1)
    reading = precision.read(optimizer)
    verdict = precision.judge(optimizer, reading)
    if verdict.action == "apply":
        precision.apply(optimizer, reading)
    else:
        precision.reject(optimizer, verdict, reading)
    precision.phases.record(verdict.kind, reading.loss_scale)
    return verdict.action


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_kind_loss_scale_no_scaler_without_fp16(compute: str) -> None:
    """B07: bf16 and fp32 have no scaler; the scale reads 1."""
    weight, optimizer, precision = make(compute)
    precision.backward(weight.square().sum().view(1), 1)
    reading = precision.read(optimizer)
    assert not precision.scaled
    assert reading.loss_scale == 1.0
    assert reading.grad_norm == pytest.approx(2 * math.sqrt(14), rel=1e-6)


def test_fp16_norm_is_unscaled() -> None:
    weight, optimizer, precision = make("fp16", initial_loss_scale=1024.0)
    precision.backward(weight.square().sum().view(1), 1)
    reading = precision.read(optimizer)
    assert reading.loss_scale == 1024.0
    assert reading.grad_norm == pytest.approx(2 * math.sqrt(14), rel=1e-6)


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_kind_grad_clip_accumulation_equals_one_batch(compute: str) -> None:
    """B08: accumulation 4 x 1 equals batch 4 in norm and update, and the logged loss is the mean of the four."""
    inputs = torch.tensor([0.5, 1.0, 2.0, 4.0])
    results = []
    for groups in (inputs.split(1), inputs.split(4)):
        weight, optimizer, precision = make(compute, initial_loss_scale=1024.0)
        for group in groups:
            precision.backward((group[:, None] * weight).square().sum(1), 4)
        reading = precision.read(optimizer)
        assert precision.apply(optimizer, reading).acted
        results.append((reading, weight.detach().clone()))
    (one, first), (four, second) = results
    assert one.grad_norm == pytest.approx(four.grad_norm, rel=1e-6)
    assert one.loss == pytest.approx(four.loss, rel=1e-6)
    assert one.loss == pytest.approx(float((inputs.square() * 14).mean()), rel=1e-6)
    torch.testing.assert_close(first, second)


def test_kind_grad_clip_short_last_group_is_averaged_by_what_it_holds() -> None:
    """6 micro-batches, accumulation 4: the second step has 2. sd-scripts divides it by 4 and halves its update."""
    inputs = torch.tensor([0.5, 1.0, 2.0, 4.0, 1.5, 3.0])
    weight, _, precision = make(max_norm=0.0)
    plain = torch.optim.SGD([{"params": [weight], "names": ["w"]}], lr=0.1)
    for group in (inputs[:4], inputs[4:]):
        before = weight.detach().clone()
        for one in group.split(1):
            precision.backward((one[:, None] * weight).sum(1), len(group))
        reading = precision.read(plain)
        precision.apply(plain, reading)
        torch.testing.assert_close(before - weight.detach(), torch.full((3,), 0.1) * group.mean())
        assert reading.loss == pytest.approx(float(group.mean() * before.sum()), rel=1e-5)


def test_kind_monitoring_logged_loss_is_the_mean_of_the_single_losses() -> None:
    """B65: not the last micro-batch's, not divided twice."""
    losses = torch.tensor([1.0, 2.0, 4.0, 8.0])
    for sizes in ([4], [1, 1, 1, 1], [3, 1]):
        weight, optimizer, precision = make()
        for part in losses.split(sizes):
            precision.backward(part + 0.0 * weight.sum(), 4)
        assert precision.read(optimizer).loss == 3.75


def test_kind_step_count_rates_follow_applied_steps_only() -> None:
    """B64: a rejected step moves the step number and not the rate."""
    from trainer_core.config import ScheduleConfig
    from trainer_core.optim import learning_rate_factor

    schedule, applied, rates = ScheduleConfig(type="linear", warmup_steps=2), 0, []
    weight, optimizer, precision = make()
    for number in range(8):
        rates.append(learning_rate_factor(schedule, applied, 8))
        scale = float("nan") if number in (2, 3) else 1.0
        applied += step(weight, optimizer, precision, scale) == "apply"
    assert applied == 6
    assert rates[2] == rates[3] == rates[4] == 1.0
    assert rates[5:] == [learning_rate_factor(schedule, n, 8) for n in (3, 4, 5)]


def test_exactly_one_device_read_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way of reading a tensor on the host is counted, over several steps with scaler and clipping."""
    weight, optimizer, precision = make("fp16", initial_loss_scale=16.0)
    step(weight, optimizer, precision)
    reads: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: object, _name: str = name, _original: object = original) -> object:
            # AdamW's own step counter is a CPU number, not a read from the device.
            if self.numel() != 1 or self.requires_grad or _name != "item":
                reads.append(_name)
            return _original(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(torch.Tensor, name, counted)
    for _ in range(3):
        assert step(weight, optimizer, precision) == "apply"
    assert reads == ["tolist"] * 3


def test_rejected_step_leaves_everything_untouched() -> None:
    """Kind non-finite: a NaN loss changes neither weights nor moments nor the loss scale."""
    weight, optimizer, precision = make("fp16", initial_loss_scale=64.0)
    step(weight, optimizer, precision)
    before, (moments, counts) = weight.detach().clone(), optimizer_state(optimizer)
    precision.backward((weight * float("nan")).sum().view(1), 1)
    reading = precision.read(optimizer)
    verdict = precision.judge(optimizer, reading)
    assert (verdict.action, verdict.kind) == ("reject", POISON)
    assert reading.bad_gradients == ("w",)
    assert reading.bad_losses == (0,)
    precision.reject(optimizer, verdict, reading)
    after, after_counts = optimizer_state(optimizer)
    assert torch.equal(weight, before)
    assert after_counts == counts
    assert all(torch.equal(after[name], moments[name]) for name in moments)
    assert precision.state_dict()["scaler"]["scale"] == 64.0
    assert step(weight, optimizer, precision) == "apply"
    assert precision.rejected_in_a_row == 0


def test_overflow_halves_the_scale() -> None:
    weight, optimizer, precision = make("fp16", initial_loss_scale=2.0**40, max_loss_scale=2.0**41)
    precision.backward((weight * 1e15).square().sum().view(1), 1)
    reading = precision.read(optimizer)
    verdict = precision.judge(optimizer, reading)
    assert (verdict.action, verdict.kind) == ("reject", OVERFLOW)
    assert "loss scale 1.09951e+12" in verdict.reason
    precision.reject(optimizer, verdict, reading)
    assert precision.state_dict()["scaler"]["scale"] == 2.0**39


def test_kind_loss_scale_a_persistent_nan_never_moves_weights() -> None:
    """B04: weights and moments are as before; what ends the run is in test_safe_scaler.py."""
    weight, optimizer, precision = make("fp16", max_rejected_steps=8)
    before = weight.detach().clone()
    for number in range(17):
        assert step(weight, optimizer, precision, scale=float("inf")) == "reject"
        assert precision.phases.phase == "CALIBRATE", number
    assert torch.equal(weight, before)
    assert not optimizer.state


def test_clipping_uses_the_measured_norm() -> None:
    weight, optimizer, precision = make(max_norm=0.5)
    precision.backward(weight.square().sum().view(1), 1)
    reading = precision.read(optimizer)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(weight.grad.norm().item()))  # type: ignore[union-attr]
    assert precision.apply(optimizer, reading).acted
    assert seen[0] == pytest.approx(0.5, rel=1e-6)


def test_half_precision_parameters_are_refused() -> None:
    """Kind precision-params (B66)."""
    half = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="must be float32"):
        build_optimizer({"unet": {"w": half}}, OptimizerConfig())


def test_optimizer_state_round_trip_by_name() -> None:
    weight, optimizer, precision = make()
    for _ in range(3):
        step(weight, optimizer, precision)
    tensors, numbers = optimizer_state(optimizer)
    other, fresh, _ = make()
    with torch.no_grad():
        other.copy_(weight)
    load_optimizer_state(fresh, tensors, numbers)
    assert float(tensors["step/w"]) == 3.0
    assert numbers["shapes"] == {"w": [3]}
    assert fresh.param_groups[0]["lr"] == 0.1
    step(weight, optimizer, precision)
    step(other, fresh, precision)
    assert torch.equal(weight, other)


def test_kind_resume_config_foreign_optimizer_state_is_refused_by_name() -> None:
    """B21: another rank or part is listed; nothing is half-loaded."""
    _, optimizer, _ = make()
    with pytest.raises(CheckpointError) as caught:
        load_optimizer_state(optimizer, {"exp_avg/w": torch.zeros(5), "exp_avg/te2": torch.zeros(3)}, {})
    assert any("w: (5,) in the checkpoint, (3,) now" in line for line in caught.value.differences)
    assert any("te2: in the checkpoint only" in line for line in caught.value.differences)
    assert not optimizer.state


def test_gradient_config_default_clips_at_one() -> None:
    assert GradientConfig().max_norm == 1.0
