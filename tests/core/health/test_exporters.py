"""What other programs get: JSON, TensorBoard, Prometheus on this machine only."""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from health_records import fast, network, slow

from trainer_core.config_health import HealthConfig
from trainer_core.errors import ResourceError
from trainer_core.events import EventBus, StepFinished, ValidationFinished, Verdict
from trainer_core.health.alerts import Alerts
from trainer_core.health.engine import Measurement
from trainer_core.health.exporters import Exports
from trainer_core.health.rows import health_rows, table_text

TENSORS = network()


def measurement() -> Measurement:
    record = slow(TENSORS)
    return Measurement(fast(TENSORS, 10), health_rows(record, TENSORS, Alerts(), 0.25, 0.0), record)


def finished(step: int) -> StepFinished:
    return StepFinished(
        step=step, applied=step, epoch=0, loss=0.5, loss_avg=0.5, grad_norm=0.1, lr={"unet": 1e-4}, loss_scale=1.0,
        rejected_steps=0, samples_per_second=2.0, seconds=0.5, eta_seconds=1.0, vram_gib=1.0, clipped=True,
    )  # fmt: skip


def tell(bus: EventBus, exports: Exports) -> None:
    bus.emit(finished(10))
    bus.emit(ValidationFinished(step=10, validation_loss=0.25, bands=(0.25,), pictures=1, seconds=1.0))
    bus.emit(Verdict(step=10, kind="STALE", sentence="Something is stale.", severity="warning"))
    exports.measured(measurement())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_json_holds_groups_and_open_verdicts(tmp_path: Path) -> None:
    bus = EventBus(run_id="x")
    exports = Exports(HealthConfig(export_json=True), tmp_path, bus)
    tell(bus, exports)
    content: dict[str, Any] = json.loads((tmp_path / "health.json").read_text(encoding="utf-8"))
    assert content["verdicts"] == {"STALE": "Something is stale."}
    group = content["groups"]["down1.cross"]
    assert group["verdict"] == "HEALTHY"
    assert group["clip_ratio"] == 0.25
    assert group["a_norm"] == pytest.approx(0.1 * 10**0.5)
    assert "cross-attention of down block 1" in table_text(list(content["groups"].items()))


def test_prometheus_answers_on_this_machine_with_bounded_labels() -> None:
    pytest.importorskip("prometheus_client")
    bus, port = EventBus(run_id="x"), free_port()
    exports = Exports(HealthConfig(prometheus_port=port), None, bus)
    try:
        tell(bus, exports)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        with pytest.raises(ResourceError, match=f"prometheus_port = {port} cannot be used"):
            Exports(HealthConfig(prometheus_port=port), None, bus)
    finally:
        exports.close()
    assert 'train_verdict{verdict="STALE"} 1.0' in text
    assert 'train_verdict{verdict="FROZEN"} 0.0' in text
    assert 'train_grad_norm{group="down1.cross",role="A"}' in text
    assert 'train_steps_total{outcome="applied"} 1.0' in text
    assert "train_stable_val_loss 0.25" in text
    assert "lora_unet" not in text, "tensor names are no labels"
    assert text.count("\n") < 300


def test_tensorboard_files_can_be_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    bus = EventBus(run_id="x")
    exports = Exports(HealthConfig(tensorboard=True), tmp_path, bus)
    tell(bus, exports)
    exports.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert {"loss", "lr/unet", "validation_loss", "health/down1.cross/norm"} <= set(found.Tags()["scalars"])
