"""Error counters of a GPU: what is said of them, and a run that stops, with a made-up NVML."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_setup import Recorder, small_config

from trainer_core.build import resume_run, start_run
from trainer_core.hardware import watch
from trainer_core.hardware.counters import CounterPolicy, Counters, NvmlSource, Unreadable
from trainer_core.trainer import Trainer


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeNvml(SimpleNamespace):
    """The part of pynvml that is used, of a card whose state tests set. `missing`: functions that it does not have."""

    NVML_VOLATILE_ECC, NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 0, 1
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_FUNCTION_NOT_FOUND, nvmlEventTypeXidCriticalError = 3, 13, 8
    NVMLError = NVMLError

    def __init__(self) -> None:
        super().__init__(ecc={0: 0, 1: 0}, rows=(0, 0, 0, 0), xids=[], missing=set(), lost=False)

    def _check(self, name: str) -> None:
        if self.lost:
            raise NVMLError(15)
        if name in self.missing:
            raise NVMLError(3)

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: Any, kind: int, events: Any) -> None:
        self._check("events")

    def nvmlEventSetWait_v2(self, events: Any, timeout: int) -> Any:
        if not self.xids:
            raise NVMLError(10)
        return SimpleNamespace(eventData=self.xids.pop(0))

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, counter: int) -> int:
        self._check("ecc")
        return int(self.ecc[kind])

    def nvmlDeviceGetRemappedRows(self, handle: Any) -> tuple[int, int, int, int]:
        self._check("rows")
        return tuple(self.rows)  # type: ignore[return-value]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    return fake


def test_counters_are_read_and_what_a_card_lacks_counts_as_none(nvml: FakeNvml) -> None:
    nvml.ecc, nvml.rows, nvml.xids = {0: 7, 1: 1}, (3, 1, 1, 0), [48, 63]
    read = NvmlSource("gpu")
    assert read() == Counters(7, 1, True, False, (48, 63))
    assert read().xids == (), "an Xid is told once"
    nvml.missing = {"ecc", "rows", "events"}
    assert NvmlSource("gpu")() == Counters()
    nvml.missing, nvml.lost = set(), True
    with pytest.raises(Unreadable):
        read()


@pytest.mark.parametrize(
    ("now", "topic", "fatal"),
    [
        (Counters(uncorrected=3), "uncorrected", True),
        (Counters(uncorrected=2, remap_failed=True), "remap failed", True),
        (Counters(uncorrected=2, xids=(48,)), "xid 48", True),
        (Counters(uncorrected=2, xids=(94,)), "xid 94", True),
        (Counters(uncorrected=2, xids=(95,)), "xid 95", True),
        (Counters(uncorrected=2, xids=(63,)), "remap pending", False),
        (Counters(uncorrected=2, remap_pending=True), "remap pending", False),
        (Counters(uncorrected=2, xids=(13,)), "", False),
        (Counters(uncorrected=2, corrected=5), "", False),
    ],
)
def test_what_follows_from_a_counter(now: Counters, topic: str, fatal: bool) -> None:
    """Old errors are told at the start and stop nothing; each thing is said once."""
    policy = CounterPolicy("GPU 0")
    assert [(one.topic, one.fatal) for one in policy.look(Counters(uncorrected=2), 0.0)] == [("before", False)]
    assert [(one.topic, one.fatal) for one in policy.look(now, 10.0)] == ([(topic, fatal)] if topic else [])
    assert policy.look(now, 20.0) == []


@pytest.mark.parametrize(("late", "told"), [(4, False), (40, True)])
def test_corrected_errors_are_told_when_they_rise(late: int, told: bool) -> None:
    """Four errors in ten minutes, then as many or ten times as many in the next ten."""
    policy, topics = CounterPolicy("GPU 0"), []
    for minute in range(21):
        count = 4 * min(minute, 10) // 10 + late * max(0, minute - 10) // 10
        topics += [one.topic for one in policy.look(Counters(corrected=count), minute * 60.0)]
    assert topics == (["corrected"] if told else [])


def test_a_failing_device_stops_the_run_and_its_late_checkpoints_are_set_aside(
    micro_model: Path, pictures: Path, tmp_path: Path, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Xid 94 after step 4: the verified checkpoint of step 2, from before the last clean look, is the one to go on
    from; step 3's is set aside and step 4's state is not saved. Without the fault the run then goes on from there."""
    config = small_config(
        micro_model,
        pictures,
        tmp_path,
        lora={"rank": 2, "preset": "attention"},
        optimizer={"te1_lr": 0.0, "te2_lr": 0.0},
        checkpoint={"every_steps": 1, "keep_last": 9},
        run={"max_train_steps": 6},
    )
    original, now = Trainer.train_step, [0.0]

    def train_step(self: Trainer) -> bool:
        if not self.watches:
            looks = watch.HardwareWatch(self, NvmlSource("gpu"), "Test GPU (cuda:0)", clock=lambda: now[0])
            self.watches.append(looks)
            self.recover.hardware = looks  # type: ignore[attr-defined]
        done = original(self)
        store = self.recover.session.store  # type: ignore[attr-defined]
        if self.state.step == 3:
            self.recover.session.checkpoints.close()  # type: ignore[attr-defined]
            assert store.verify("step-00000002") == ""
            time.sleep(0.01)
            now[0] += 10.0  # a clean look after step 3, whose checkpoint is written after it
        if self.state.step == 4:
            now[0] += 10.0
            nvml.xids = [94]
        return done

    monkeypatch.setattr(Trainer, "train_step", train_step)
    recorder = Recorder()
    result = start_run(config, sink=recorder)
    assert result.status == "failed"
    assert "Test GPU (cuda:0) reports an error in its memory that could not be corrected (contained), Xid 94." in (
        result.message
    )
    assert "go on from step-00000002 with: safe-scaler resume" in result.message
    assert result.checkpoint == "step-00000002"
    names = sorted(path.name for path in (result.run_dir / "checkpoints").iterdir())
    assert names == [".bad-step-00000003", "step-00000001", "step-00000002"]
    verdicts = [data for data in recorder.of("Verdict") if data["kind"] == "HARDWARE"]
    assert [data["severity"] for data in verdicts] == ["error"]
    monkeypatch.undo()
    again = resume_run(result.run_dir, sink=recorder)
    assert (again.status, recorder.of("Resumed")[0]["step"]) == ("finished", 2)


def test_counters_that_cannot_be_read_any_more_are_told_once(nvml: FakeNvml) -> None:
    told: list[Any] = []
    now = [0.0]
    trainer: Any = SimpleNamespace(state=SimpleNamespace(step=5), bus=SimpleNamespace(emit=told.append))
    looks = watch.HardwareWatch(trainer, NvmlSource("gpu"), "GPU", clock=lambda: now[0])
    looks()
    nvml.lost = True
    looks()
    assert told == [], "ten seconds are not over"
    now[0] = 10.0
    looks()
    now[0] = 20.0
    looks()
    assert len(told) == 1
    assert "cannot be read any more" in told[0].message
