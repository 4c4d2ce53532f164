"""Verdicts from made-up records: what must be said, when, and about which tensors; and what must not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from health_records import changed, fast, network, slow

from trainer_core.config_health import VERDICTS, HealthConfig
from trainer_core.health.alerts import Alerts
from trainer_core.health.findings import Finding, Streaks, Thresholds
from trainer_core.health.groups import allowed_dead
from trainer_core.health.records import FastRecord, SlowRecord
from trainer_core.health.rules_slow import SlowRules
from trainer_core.health.rules_step import ConnectionRules, NormRules
from trainer_core.health.sentences import _TEXTS, sentence

TENSORS = network()
NOBODY: frozenset[str] = frozenset()
ALLOWED = allowed_dead(list(TENSORS.values()), layers={"te1": 3, "te2": 3}, pooled_cached=False)
DOWN = [name for name, tensor in TENSORS.items() if tensor.part == "unet" and tensor.role == "A"]
UP = [name for name, tensor in TENSORS.items() if tensor.part == "unet" and tensor.role == "B"]
TE2 = [name for name, tensor in TENSORS.items() if tensor.part == "te2"]


class Connections:
    def __init__(self) -> None:
        self.rules = ConnectionRules(TENSORS, ALLOWED, Streaks())

    def steps(self, count: int, record: FastRecord, expected: frozenset[str] = NOBODY) -> list[Finding]:
        found: list[Finding] = []
        for step in range(1, count + 1):
            found = self.rules.look(replace(record, step=step), expected, set())
        return found


def slow_rules() -> SlowRules:
    config = HealthConfig()
    return SlowRules(TENSORS, config, Streaks(), Thresholds(config))


def looks(count: int, record: SlowRecord, step: FastRecord | None = None, every: int = 10) -> list[Finding]:
    rules = slow_rules()
    found: list[Finding] = []
    for number in range(1, count + 1):
        aged = changed(record, list(TENSORS), age=float(number * every))
        found = rules.look(replace(aged, step=number * every), step or fast(TENSORS), NOBODY, set())
    return found


def without(names: list[str], record: FastRecord | None = None) -> FastRecord:
    record = record or fast(TENSORS)
    return replace(record, norms={name: norm for name, norm in record.norms.items() if name not in names})


def test_only_text_encoder_1s_last_layer_may_be_dead() -> None:
    assert {name.split("_layers_")[1][0] for name in ALLOWED} == {"2"}
    assert all(name.startswith("lora_te1") for name in ALLOWED)
    cached = allowed_dead(list(TENSORS.values()), layers={"te1": 3, "te2": 3}, pooled_cached=True)
    assert {name[:8] for name in cached} == {"lora_te1", "lora_te2"}


def test_disconnected_after_eight_steps_names_exactly_the_cut_tensors() -> None:
    assert Connections().steps(7, without(DOWN[:2])) == []
    (finding,) = Connections().steps(8, without(DOWN[:2]))
    assert (finding.kind, finding.subject, set(finding.tensors)) == ("DISCONNECTED", "down1.cross", set(DOWN[:2]))
    assert finding.cause == "between"
    assert "detached" in sentence(finding)


def test_by_design_dead_tensors_are_no_fault() -> None:
    assert Connections().steps(20, without(list(ALLOWED))) == []


@pytest.mark.parametrize("zero", [False, True])
def test_a_dead_text_encoder_is_named_and_not_its_tensors(zero: bool) -> None:
    record = fast(TENSORS)
    record = replace(record, norms={**record.norms, **dict.fromkeys(TE2, 0.0)}) if zero else without(TE2)
    (finding,) = Connections().steps(8, record)
    assert (finding.kind, finding.subject) == ("TE2-DEAD", "te2")


def test_steps_with_dropped_captions_say_nothing_about_encoders() -> None:
    rules = ConnectionRules(TENSORS, ALLOWED, Streaks())
    dead = replace(fast(TENSORS), norms={**fast(TENSORS).norms, **dict.fromkeys(TE2, 0.0)})
    for _ in range(20):
        for _ in range(6):
            assert rules.look(replace(dead, captions_dropped=True), NOBODY, set()) == []
        assert rules.look(fast(TENSORS), NOBODY, set()) == []


def test_zero_gradients_everywhere_are_an_underflow_and_no_dead_encoder() -> None:
    norms = {**fast(TENSORS).norms, **dict.fromkeys([*TE2, *UP[:5]], 0.0)}
    assert Connections().steps(20, fast(TENSORS, norms=norms, step=30)) == []


def test_frozen_rate_and_requires_grad() -> None:
    everything = frozenset(TENSORS)
    assert Connections().steps(4, fast(TENSORS, zero_rate=everything)) == []
    assert {f.kind for f in Connections().steps(5, fast(TENSORS, zero_rate=everything))} == {"FROZEN"}
    off = without(DOWN[:1], fast(TENSORS, not_trainable=frozenset(DOWN[:1])))
    found = Connections().steps(9, off)
    assert [(f.kind, f.tensors, f.cause) for f in found] == [("FROZEN", (DOWN[0],), "off")]


def test_what_is_frozen_on_purpose_is_no_fault() -> None:
    record = without(DOWN[:1], fast(TENSORS, zero_rate=frozenset(DOWN[:1]), not_trainable=frozenset(DOWN[:1])))
    assert Connections().steps(20, record, frozenset(DOWN[:1])) == []


def norm_rules() -> NormRules:
    config = HealthConfig()
    return NormRules(TENSORS, config, Streaks(), Thresholds(config))


def test_three_spikes_in_ten_steps_are_exploding_and_one_is_news_only() -> None:
    rules = norm_rules()
    generator = np.random.default_rng(0)
    for step in range(1, 41):
        norm = 0.5 * 10 ** generator.normal(0, 0.1)
        assert rules.look(fast(TENSORS, step, grad_norm=float(norm))) == []
    severities = []
    for step in range(41, 44):
        (finding,) = rules.look(fast(TENSORS, step, grad_norm=80.0))
        severities.append((finding.kind, finding.severity))
    assert severities == [("EXPLODING", "info"), ("EXPLODING", "info"), ("EXPLODING", "warning")]


def test_noisy_healthy_norms_do_not_explode() -> None:
    """Spread 0.3 decades, as at batch 1 with min-SNR: 20 runs of 500 steps."""
    alarms = 0
    for seed in range(20):
        rules, generator = norm_rules(), np.random.default_rng(seed)
        for step in range(1, 501):
            norm = float(0.5 * 10 ** generator.normal(0, 0.3))
            alarms += any(f.severity != "info" for f in rules.look(fast(TENSORS, step, grad_norm=norm)))
    assert alarms == 0


def test_a_group_that_stopped_learning_while_the_loss_did_not_fall() -> None:
    rules = norm_rules()
    for step in range(1, 121):
        rules.look(fast(TENSORS, step))
    gone = {**fast(TENSORS).norms, **dict.fromkeys(DOWN + UP, 1e-6)}
    for step in range(121, 181):
        rules.look(fast(TENSORS, step, norms=gone))
    assert [(f.kind, f.subject, f.cause) for f in rules.declining(set())] == [("VANISHING", "down1.cross", "median")]
    improved = norm_rules()
    for step in range(1, 121):
        improved.look(fast(TENSORS, step))
    for step in range(121, 181):
        improved.look(fast(TENSORS, step, norms=gone, loss=1e-6))
    assert improved.declining(set()) == []


def test_vanishing_needs_three_measurements_and_a_tenth_of_the_tensors() -> None:
    some = changed(slow(TENSORS), UP[:3], zero=0.9)
    assert looks(2, some) == []
    (finding,) = looks(3, some)
    assert (finding.kind, set(finding.tensors)) == ("VANISHING", set(UP[:3]))
    assert looks(6, changed(slow(TENSORS), UP[:1], zero=0.9)) == []


def test_lora_down_without_a_gradient_is_no_fault_while_lora_up_is_zero() -> None:
    fresh = changed(changed(slow(TENSORS), DOWN, zero=1.0, grad=0.0), UP, weight=0.0, update=0.0)
    assert [f for f in looks(1, fresh)] == []


def test_stale_by_rounding_and_by_replacement() -> None:
    assert [(f.kind, f.cause) for f in looks(3, changed(slow(TENSORS), UP, changed=0.1))] == [("STALE", "rounding")]
    assert looks(3, changed(slow(TENSORS), UP[:1], changed=0.1)) == [], "one tensor alone"
    (finding,) = looks(1, changed(slow(TENSORS), UP[:4], in_optimizer=False, changed=0.0))
    assert (finding.kind, finding.cause, set(finding.tensors)) == ("STALE", "outside", set(UP[:4]))


def test_rounding_names_large_and_small_weights_of_a_group_in_one_finding() -> None:
    """The alerts speak once of a group: a second finding about it would be swallowed, and its tensors with it."""
    some, others = UP[:2], UP[2:4]
    found = looks(3, changed(changed(slow(TENSORS), some, changed=0.1), others, changed=0.0))
    assert len({finding.subject for finding in found}) == len(found)
    assert {finding.cause for finding in found} == {"rounding"}
    assert {name for finding in found for name in finding.tensors} == {*some, *others}


def test_a_rate_near_zero_at_the_end_of_a_schedule_is_not_stale() -> None:
    rules = slow_rules()
    rules.look(slow(TENSORS), fast(TENSORS), NOBODY, set())
    end = changed(slow(TENSORS), list(TENSORS), changed=0.0, rate=1e-7, age=20.0)
    for number in range(5):
        end = changed(end, list(TENSORS), age=20.0 + number)
        assert rules.look(end, fast(TENSORS), NOBODY, set()) == []


def test_lora_up_that_stays_zero_is_imbalanced_and_lora_down_is_not_blamed() -> None:
    record = changed(
        changed(slow(TENSORS), UP, weight=0.0, update=0.0, rate=0.0, changed=0.0), DOWN, zero=1.0, grad=0.0
    )
    step = fast(TENSORS, zero_rate=frozenset(UP))
    found = looks(2, record, step)
    assert [(f.kind, f.cause, set(f.tensors)) for f in found] == [("IMBALANCED", "b rate", set(UP))]
    assert {f.kind for f in looks(5, record, step)} == {"IMBALANCED"}


def test_quotient_is_judged_after_step_50_only() -> None:
    modules = {tensor.module for tensor in TENSORS.values()}
    record = replace(slow(TENSORS), quotients=dict.fromkeys(modules, 4.2))
    assert looks(5, record) == []
    assert {f.kind for f in looks(8, record)} == {"IMBALANCED"}
    assert looks(8, replace(record, quotients=dict.fromkeys(modules, 1.0))) == []


def test_a_factor_that_adams_eps_holds_back_is_news_and_no_imbalance() -> None:
    """A loss weighted with 1e-5: lora_down's gradients are below eps, so the quotient says nothing about the rates."""
    modules = {tensor.module for tensor in TENSORS.values()}
    record = replace(changed(slow(TENSORS), DOWN, rms=0.01), quotients=dict.fromkeys(modules, 3.4))
    rules, found = slow_rules(), []
    for step in range(10, 130, 10):
        aged = changed(record, list(TENSORS), age=float(step))
        found += rules.look(replace(aged, step=step), fast(TENSORS), NOBODY, set())
    assert {(f.kind, f.cause, f.severity) for f in found if f.subject != "te1"} >= {("IMBALANCED", "eps", "info")}
    assert not [f for f in found if f.severity == "warning" and set(f.tensors) & {*UP, *DOWN}]
    assert sum(f.cause == "eps" for f in found) == 1, "told once"
    assert "eps" in sentence(next(f for f in found if f.cause == "eps"))


def test_lost_optimizer_state() -> None:
    rules = slow_rules()
    assert rules.look(slow(TENSORS, age=300.0), fast(TENSORS), NOBODY, set()) == []
    (finding,) = rules.look(slow(TENSORS, age=4.0), fast(TENSORS), NOBODY, set())
    assert finding.kind == "STATE-LOST"
    assert "4 updates, 300" in sentence(finding)
    rules.optimizer_was_reset()
    assert rules.look(slow(TENSORS, age=1.0), fast(TENSORS), NOBODY, set()) == []


def test_gradients_beyond_what_the_optimizer_expects() -> None:
    assert [f.severity for f in looks(1, changed(slow(TENSORS), list(TENSORS), rms=5.0))] == ["info"]
    (finding,) = looks(1, changed(slow(TENSORS), list(TENSORS), rms=9.0))
    assert (finding.kind, finding.severity) == ("EXPLODING", "warning")


def test_weights_that_leap_are_exploding_though_no_norm_shows_it() -> None:
    rules = slow_rules()
    for age in (1.0, 10.0, 20.0):
        assert rules.look(slow(TENSORS, age=age), fast(TENSORS), NOBODY, set()) == []
    leap = changed(slow(TENSORS, age=30.0), list(TENSORS), update=0.2)
    (finding,) = rules.look(leap, fast(TENSORS), NOBODY, set())
    assert (finding.kind, finding.cause) == ("EXPLODING", "leap")
    assert "moves by 20% of itself in one step, 1.0% was usual" in sentence(finding)
    fresh = slow_rules()
    assert fresh.look(changed(slow(TENSORS), list(TENSORS), update=0.2), fast(TENSORS), NOBODY, set()) == []


def test_thresholds_become_stricter_and_never_looser() -> None:
    config = HealthConfig()
    quiet, noisy = Thresholds(config), Thresholds(config)
    for step in range(1, 101):
        quiet.learn(step, "rms", 1.5)
        noisy.learn(step, "rms", 7.0)
    assert (quiet.rms, noisy.rms) == (8.0, 8.0), "the document's values alone until then"
    quiet.settle(101)
    noisy.settle(101)
    assert (quiet.rms, noisy.rms) == (4.5, 8.0)


def test_verdicts_are_spoken_once_and_over_after_twice_as_many_clean_looks() -> None:
    alerts, finding = Alerts(), Finding("STALE", "down1.cross", (UP[0],), "rounding")
    assert [t.over for t in alerts.update(1, ["STALE"], [finding])] == [False]
    assert alerts.update(2, ["STALE"], [finding]) == []
    for step in range(3, 8):
        assert alerts.update(step, ["STALE"], []) == []
    assert alerts.update(8, ["IMBALANCED"], []) == [], "a look for something else says nothing"
    assert [t.over for t in alerts.update(9, ["STALE"], [])] == [True]


def test_ignored_verdicts_are_not_spoken_and_state_goes_through_json() -> None:
    finding = Finding("STALE", "down1.cross", (UP[0],), "rounding", numbers={"changed": 0.1, "tensors": 1})
    assert Alerts(["STALE"]).update(1, ["STALE"], [finding]) == []
    alerts = Alerts()
    alerts.update(1, ["STALE"], [finding])
    again = Alerts()
    again.load_state_dict(alerts.state_dict())
    assert again.of_group("down1.cross") == finding
    assert again.of_group("te1") is None


def test_every_sentence_can_be_made_and_gives_two_things_to_try() -> None:
    numbers = dict.fromkeys(
        (
            "ratio",
            "usual",
            "tensors",
            "spikes",
            "norm",
            "times",
            "rms",
            "share",
            "changed",
            "q",
            "slope",
            "before",
            "now",
            "micro_batch",
        ),
        2.0,
    )
    for (kind, cause), (_, _, fix) in _TEXTS.items():
        text = sentence(Finding(kind, "down1.cross", (UP[0],), cause, numbers=numbers))
        assert kind in VERDICTS
        assert "Likely cause: " in text
        assert " or " in fix, f"{kind} {cause} gives one thing to try"


def test_nan_is_in_no_sentence_of_the_records() -> None:
    assert not math.isnan(sum(s.rms for s in slow(TENSORS).tensors.values()))


def test_streak_state_survives(tmp_path: Path) -> None:
    streaks = Streaks()
    streaks.see("x", ["a"], 3)
    again = Streaks()
    again.load_state_dict(streaks.state_dict())
    again.see("x", ["a"], 3)
    assert again.see("x", ["a", "b"], 3) == ("a",)
