"""The unit-test oracle of the safe scaler, U1 to U15 of the specification. Those that need a whole run are in
tests/core/test_safety.py (U4, U15) and the distributed ones in test_safe_scaler_ranks.py (U11, U12)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from trainer_core.config import GradientConfig, OptimizerConfig, PrecisionConfig, SafetyConfig
from trainer_core.optim import Precision, build_optimizer, optimizer_state
from trainer_core.optim.clipping import Clip
from trainer_core.optim.phases import (
    ALERT,
    CALIBRATE,
    FLOOR,
    NORM_OVERFLOW,
    NORMAL,
    OVERFLOW,
    POISON,
    RECOVER,
    SANITIZED,
    WEIGHTS,
    Change,
    Phases,
)

CPU = torch.device("cpu")


class Rig:
    """Two trained tensors, A and B, whose gradients the test chooses. `S = 16`, interval 3 unless said."""

    def __init__(
        self,
        compute: str = "fp16",
        *,
        optimizer: OptimizerConfig | None = None,
        gradient: GradientConfig | None = None,
        safety: SafetyConfig | None = None,
        **precision: float,
    ) -> None:
        options = {"initial_loss_scale": 16.0, "loss_scale_growth_interval": 3, **precision}
        self.a = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        self.b = torch.nn.Parameter(torch.tensor([0.5, 0.25]))
        self.optimizer = build_optimizer(
            {"unet": {"A": self.a, "B": self.b}}, optimizer or OptimizerConfig(learning_rate=0.1)
        )
        self.precision = Precision(
            PrecisionConfig(**options),  # type: ignore[arg-type]
            compute,
            CPU,
            gradient=gradient or GradientConfig(max_norm=0.0),
            safety=safety,
        )
        self.last: Change = Change()
        self.clip: Clip | None = None

    def step(self, a: float = 1.0, b: float = 1.0, micro: Sequence[tuple[float, float]] = (), loss: float = 1.0) -> str:
        """One step whose unscaled gradients are a and b in every element; returns its kind ("" = applied)."""
        pairs = list(micro) or [(a, b)]
        for one, two in pairs:
            value = _with_gradient(self.a, one).sum() + _with_gradient(self.b, two).sum()
            self.precision.backward((value - value.detach() + loss).view(1), 1)
        self.reading = self.precision.read(self.optimizer)
        verdict = self.precision.judge(self.optimizer, self.reading)
        if verdict.action == "apply":
            self.clip = self.precision.apply(self.optimizer, self.reading, verdict)
        else:
            self.precision.reject(self.optimizer, verdict, self.reading)
        self.last = self.precision.phases.record(verdict.kind, self.reading.loss_scale)
        return verdict.kind

    @property
    def scale(self) -> float:
        return float(self.precision.scaler.state_dict()["scale"])

    @property
    def tracker(self) -> int:
        return int(self.precision.scaler.state_dict()["_growth_tracker"])

    def snapshot(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, object]]:
        return [self.a.detach().clone(), self.b.detach().clone()], *optimizer_state(self.optimizer)

    def same_as(self, before: tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, object]]) -> bool:
        weights, moments, numbers = self.snapshot()
        return (
            all(torch.equal(one, two) for one, two in zip(weights, before[0], strict=True))
            and all(torch.equal(moments[name], before[1][name]) for name in before[1])
            and numbers == before[2]
        )


class _Gradient(torch.autograd.Function):
    """Identity whose gradient is the incoming one times `size`, whatever the value."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, size: float) -> torch.Tensor:
        ctx.size = size  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.size, None  # type: ignore[attr-defined]


def _with_gradient(parameter: torch.Tensor, size: float) -> torch.Tensor:
    result = _Gradient.apply(parameter, size)
    assert isinstance(result, torch.Tensor)
    return result


def calm(rig: Rig, steps: int = 5) -> None:
    for _ in range(steps):
        assert rig.step() == ""


def test_u1_clean_step() -> None:
    rig = Rig()
    before = rig.a.detach().clone()
    assert rig.step() == ""
    assert not torch.equal(rig.a, before)
    assert (rig.scale, rig.tracker) == (16.0, 1)


def test_u2_three_clean_steps_grow_the_scale() -> None:
    rig = Rig()
    calm(rig, 3)
    assert (rig.scale, rig.tracker) == (32.0, 0)


@pytest.mark.parametrize("fused", [False, True])
def test_u3_u5_u7_overflow_in_b_then_clean(fused: bool) -> None:
    """U7: a fused optimizer takes our one path with its explicit unscale, so the outcome is U3's."""
    rig = Rig(optimizer=OptimizerConfig(learning_rate=0.1, args=(f"fused={fused}",)))
    rig.step()
    before = rig.snapshot()
    assert rig.step(b=math.inf) == OVERFLOW
    assert rig.same_as(before)
    assert rig.scale == 8.0
    assert rig.reading.bad_gradients == ("B",)
    assert rig.step() == ""
    assert rig.reading.loss_scale == 8.0
    assert not rig.same_as(before)


def test_u4_poison_keeps_the_scale_and_its_count() -> None:
    """The scaler's half of U4: no backoff. The picture is dropped and the rest computed again in test_safety.py."""
    rig = Rig()
    rig.step()
    before = rig.snapshot()
    assert rig.step(a=math.nan, loss=math.nan) == POISON
    assert rig.same_as(before)
    assert (rig.scale, rig.tracker) == (16.0, 1)
    calm(rig, 2)
    assert rig.scale == 32.0


def test_u6_persistent_nan_reaches_a_trigger_and_never_leaves_the_floor() -> None:
    """The scaler's half of U6 (the ladder's is in tests/core/health/test_ladder.py): 17 rejected steps, S >= 1."""
    rig = Rig(initial_loss_scale=65536.0)
    kinds = []
    for _ in range(17):
        kinds.append(rig.step(a=math.nan))
        assert rig.scale >= 1.0
    assert kinds == [OVERFLOW] * 16 + [FLOOR]
    assert rig.last.trigger is not None
    assert "17 rejected steps" in rig.last.trigger.reason
    rig.precision.restart()
    assert rig.scale == 65536 / 16
    for number in range(8):
        assert rig.last.trigger is None or number == 0
        rig.step(a=math.nan)
    assert rig.last.trigger is not None
    assert rig.last.trigger.reason == "8 rejected steps in a row"


def test_u6_at_the_floor_three_are_enough() -> None:
    rig = Rig(initial_loss_scale=2.0)
    calm(rig)
    rig.precision.scaler.reset(1.0)
    triggers = []
    for _ in range(3):
        assert rig.step(a=math.inf) == FLOOR
        triggers.append(rig.last.trigger)
    assert triggers[:2] == [None, None]
    assert "at the lowest loss scale (1)" in triggers[2].reason  # type: ignore[union-attr]


def test_u8_half_precision_parameters_are_refused_by_name() -> None:
    half = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"must be float32.*lora_x"):
        build_optimizer({"unet": {"lora_x": half}}, OptimizerConfig())


@pytest.mark.parametrize(("compute", "size"), [("fp16", 1e19), ("bf16", 3e38), ("fp32", 1.9e37)])
def test_u9_finite_gradients_whose_norm_overflows(compute: str, size: float) -> None:
    """fp16: at S = 16 the scaled ones are finite as well, so the native check would apply the step."""
    rig = Rig(compute)
    rig.step()
    before = rig.snapshot()
    assert rig.step(a=size, b=size) == NORM_OVERFLOW
    assert rig.same_as(before)
    assert rig.precision.phases.rejected_in_a_row == 1


def test_u10_infinity_in_one_micro_batch_of_four() -> None:
    rig = Rig()
    rig.step()
    before = rig.snapshot()
    assert rig.step(micro=[(1.0, 1.0), (1.0, math.inf), (1.0, 1.0), (1.0, 1.0)]) == OVERFLOW
    assert rig.same_as(before)
    assert rig.scale == 8.0


def test_u13_state_round_trip_in_alert() -> None:
    rig = Rig()
    calm(rig)
    for _ in range(3):
        rig.step(b=math.inf)
    rig.step()
    rig.step(b=math.inf)
    state = rig.precision.state_dict()
    assert state["phases"]["phase"] == ALERT
    other = Rig()
    other.precision.load_state_dict(state)
    assert other.precision.state_dict() == state
    for one in (rig, other):
        with torch.no_grad():
            one.a.fill_(1.0)
        assert one.step() == ""
    assert other.scale == rig.scale
    assert list(other.precision.phases.ring) == list(rig.precision.phases.ring)


def test_another_number_format_starts_without_the_old_scale() -> None:
    rig = Rig()
    calm(rig)
    rig.precision.restart("bf16")
    assert (rig.precision.compute, rig.precision.scaled, rig.precision.phases.phase) == ("bf16", False, RECOVER)
    assert rig.step() == ""
    assert rig.reading.loss_scale == 1.0


def test_u14_five_overflows_at_the_start_are_calibration() -> None:
    rig = Rig()
    for _ in range(5):
        rig.step(a=math.inf)
        assert rig.last == Change()
    assert rig.precision.phases.phase == CALIBRATE
    calm(rig, 5)
    assert rig.last.entered == NORMAL
    assert rig.precision.phases.reference_scale is not None


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_without_a_scaler_the_checks_are_the_same(compute: str) -> None:
    rig = Rig(compute)
    assert rig.precision.phases.phase == NORMAL
    rig.step()
    before = rig.snapshot()
    assert rig.step(b=math.inf) == FLOOR
    assert rig.last.entered == ALERT
    assert rig.same_as(before)
    assert rig.step(loss=math.nan) == POISON
    calm(rig, 20)
    assert rig.last.entered == NORMAL


def test_weights_that_are_not_finite_trigger_at_once() -> None:
    rig = Rig()
    rig.step()
    rig.optimizer.state[rig.b]["exp_avg"][0] = math.nan
    assert rig.step(b=math.inf) == WEIGHTS
    assert rig.last.trigger is not None
    rig = Rig("bf16", safety=SafetyConfig(check_weights_every=3))
    rig.step()
    rig.optimizer.state[rig.b]["exp_avg"][0] = math.nan
    with torch.no_grad():
        rig.b.fill_(1.0)
    found = [rig.step() for _ in range(3)]
    assert found[-1] == WEIGHTS


def test_growth_stops_at_the_ceiling() -> None:
    rig = Rig(max_loss_scale=24.0)
    calm(rig, 9)
    assert rig.scale == 24.0


def test_the_share_of_rejected_steps_triggers() -> None:
    rig = Rig("bf16")
    reasons = []
    for number in range(100):
        rig.step(b=math.inf if number % 4 == 0 else 1.0)
        reasons += [rig.last.trigger.reason] if rig.last.trigger else []
    assert reasons[0].startswith("21 of the last ")


def test_recovery_holds_after_200_applied_steps() -> None:
    phases = Phases(PrecisionConfig(), SafetyConfig(), scaled=False)
    phases.restart()
    entered = [phases.record("", 1.0).entered for _ in range(200)]
    assert entered[-1] == NORMAL
    assert not any(entered[:-1])


def test_a_collapsing_scale_is_told_once_and_taken_back() -> None:
    phases = Phases(PrecisionConfig(), SafetyConfig(), scaled=True)
    for _ in range(5):
        phases.record("", 1024.0)
    alarms = [phases.record("", scale).scale_alarm for scale in (512.0, 32.0, 16.0, 8.0, 16.0, 64.0, 1024.0)]
    assert alarms == [None, None, True, None, None, False, None]


def test_sanitize_leaves_the_tensor_out_and_halves_the_scale() -> None:
    """Not zero but None: a zeroed tensor would still be moved by its momentum and decay."""
    rig = Rig(safety=SafetyConfig(sanitize=True, sanitize_share=0.5))
    rig.step()
    before = rig.snapshot()
    assert rig.step(b=math.inf) == SANITIZED
    assert torch.equal(rig.b, before[0][1])
    assert not torch.equal(rig.a, before[0][0])
    assert rig.scale == 8.0
    assert rig.clip is not None
    assert rig.clip.norm == pytest.approx(math.sqrt(3.0))
    assert rig.step(a=math.inf, b=math.inf) == OVERFLOW  # more than the allowed share


def test_sanitize_at_the_floor_rejects() -> None:
    rig = Rig(safety=SafetyConfig(sanitize=True, sanitize_share=0.5), initial_loss_scale=1.0)
    assert rig.step(b=math.inf) == FLOOR


def test_an_applied_step_reads_the_host_once_whatever_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights check, module clipping and scaler together: still one transfer."""
    rig = Rig(gradient=GradientConfig(clip="module"), safety=SafetyConfig(check_weights_every=1))
    rig.step()
    reads: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: object, _name: str = name, _original: object = original) -> object:
            if self.numel() != 1 or self.requires_grad or _name != "item":  # AdamW's own counter is a CPU number
                reads.append(_name)
            return _original(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(torch.Tensor, name, counted)
    for _ in range(3):
        assert rig.step() == ""
    assert reads == ["tolist"] * 3


def test_healthy_fp16_runs_never_trigger() -> None:
    """300 runs of 1,000 steps: the largest gradient varies by 0.15 decades and drifts down by one decade; an overflow
    is what the scale makes of it. No trigger, and few rejected steps once the scale is found."""
    import numpy as np

    precision, generator = PrecisionConfig(), np.random.default_rng(11)
    triggers = rejected = 0
    for _ in range(300):
        phases, scale, tracker = Phases(precision, SafetyConfig(), scaled=True), precision.initial_loss_scale, 0
        center = generator.uniform(-4, 0)
        for number, noise in enumerate(0.15 * generator.standard_normal(1000)):
            overflow = scale * 10 ** (center + noise - number / 1000) > 65504
            change = phases.record(OVERFLOW if overflow else "", scale)
            triggers += change.trigger is not None
            rejected += overflow and phases.phase != CALIBRATE
            if overflow:
                scale, tracker = max(1.0, scale / 2), 0
            else:
                tracker += 1
                if tracker == precision.loss_scale_growth_interval:
                    scale, tracker = scale * 2, 0
    assert triggers == 0
    assert rejected < 0.01 * 300 * 1000


def test_a_run_taken_up_in_fp16_looks_for_its_loss_scale_first() -> None:
    """In NORMAL the overflows of the search would be rejected steps, and eight in a row call the ladder."""
    settings = PrecisionConfig(), SafetyConfig()
    plain, scaled = Phases(*settings, scaled=False), Phases(*settings, scaled=True)
    scaled.load_state_dict(plain.state_dict())
    assert scaled.phase == CALIBRATE
    plain.load_state_dict(scaled.state_dict())
    assert plain.phase == NORMAL
    for _ in range(5):
        scaled.record("", 1024.0)
    found = Phases(*settings, scaled=True)
    found.load_state_dict(scaled.state_dict())
    assert found.phase == NORMAL
