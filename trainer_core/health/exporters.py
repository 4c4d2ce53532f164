"""Health figures for other programs: Prometheus on this machine only, TensorBoard files, one JSON file.

The label set is bounded: `group`, `role`, `outcome`, `verdict`; never a tensor's name. Scrapes are answered by a thread
that reads numbers the step has left behind, so they cost a step nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config_health import VERDICTS, HealthConfig
from ..errors import ResourceError
from ..runs.platform import DurableIO

if TYPE_CHECKING:
    from ..events import EventBus
    from .engine import Measurement

JSON_NAME = "health.json"
TENSORBOARD_NAME = "tensorboard"

_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

Wire = dict[str, Any]


class Exports:
    """The exporters that the config asks for, as one listener of the engine and one subscriber of the bus."""

    def __init__(self, config: HealthConfig, folder: Path | None, bus: EventBus) -> None:
        self._parts: list[Any] = []
        if config.export_json and folder is not None:
            self._parts.append(JsonExport(folder / JSON_NAME))
        if config.tensorboard and folder is not None:
            self._parts.append(TensorBoardExport(folder / TENSORBOARD_NAME))
        if config.prometheus_port:
            self._parts.append(PrometheusExport(config.prometheus_port))
        if self._parts:
            bus.subscribe(self.event)

    def measured(self, measurement: Measurement) -> None:
        for part in self._parts:
            part.measured(measurement)

    def event(self, wire: Wire) -> None:
        for part in self._parts:
            part.event(wire)

    def close(self) -> None:
        for part in self._parts:
            part.close()


class JsonExport:
    """`health.json`: the newest full measurement and the open verdicts, replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[str, str] = {}

    def measured(self, measurement: Measurement) -> None:
        if not measurement.rows:
            return
        fast = measurement.fast
        content = {
            "v": 1,
            "step": fast.step,
            "time": fast.time,
            "loss": fast.loss if math.isfinite(fast.loss) else None,
            "grad_norm": fast.grad_norm if math.isfinite(fast.grad_norm) else None,
            "loss_scale": fast.loss_scale,
            "groups": dict(measurement.rows),
            "verdicts": self._open,
        }
        DurableIO().replace_file(self._path, json.dumps(content, indent=1).encode("utf-8"))

    def event(self, wire: Wire) -> None:
        if wire["type"] != "Verdict" or wire["data"]["severity"] == "info":
            return
        kind = wire["data"]["kind"]
        if wire["data"]["severity"] == "ok":
            self._open.pop(kind, None)
        else:
            self._open[kind] = wire["data"]["sentence"]

    def close(self) -> None:
        """Nothing is held."""


class TensorBoardExport:
    """TensorBoard event files: the run's metrics every step, norms by group at full measurements."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def measured(self, measurement: Measurement) -> None:
        for group, row in measurement.rows:
            for name, value in row.items():
                if isinstance(value, float):
                    self._writer.add_scalar(f"health/{group}/{name}", value, measurement.fast.step)

    def event(self, wire: Wire) -> None:
        step, data = wire["step"], wire["data"]
        if wire["type"] == "StepFinished":
            for name in ("loss", "loss_avg", "grad_norm", "loss_scale", "samples_per_second", "vram_gib"):
                if data[name] is not None:
                    self._writer.add_scalar(name, data[name], step)
            for label, rate in data["lr"].items():
                self._writer.add_scalar(f"lr/{label}", rate, step)
        elif wire["type"] == "ValidationFinished" and data["validation_loss"] is not None:
            self._writer.add_scalar("validation_loss", data["validation_loss"], step)
        elif wire["type"] == "Verdict" and data["severity"] != "info":
            self._writer.add_text(f"verdict/{data['kind']}", data["sentence"], step)

    def close(self) -> None:
        self._writer.close()


class PrometheusExport:
    """Metrics at http://127.0.0.1:PORT/metrics; no other machine can reach them.

    Raises:
        ResourceError: the port is taken.
    """

    def __init__(self, port: int) -> None:
        import prometheus_client as prometheus

        self.registry = prometheus.CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Any:
            return prometheus.Gauge(name, text, labels, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Any:
            return prometheus.Counter(name, text, labels, registry=self.registry)

        self._loss = gauge("train_loss", "mean loss of the last applied step")
        self._validation = gauge("train_stable_val_loss", "stable validation loss")
        self._norm = gauge("train_grad_norm", "gradient norm by group and role", "group", "role")
        self._scale = gauge("train_loss_scale", "fp16 loss scale")
        self._steps = counter("train_steps", "decided steps", "outcome")
        self._clipped = counter("train_clip", "clipped steps")
        self._verdict = gauge("train_verdict", "1 while the verdict holds", "verdict")
        self._verdicts = counter("train_verdicts", "verdicts raised", "verdict")
        self._seconds = prometheus.Histogram(
            "train_step_seconds", "seconds of applied steps", buckets=_BUCKETS, registry=self.registry
        )
        self._memory = gauge("train_peak_memory_bytes", "peak memory of the run")
        self._saved = 0.0
        gauge("ckpt_age_seconds", "seconds since the last checkpoint").set_function(self._checkpoint_age)
        self._checkpoint = gauge("ckpt_last_step", "step of the last checkpoint")
        self._left_out = counter("data_left_out", "samples left out of a step")
        for verdict in VERDICTS:
            self._verdict.labels(verdict).set(0)
        try:
            self._server, self._thread = prometheus.start_http_server(port, addr="127.0.0.1", registry=self.registry)
        except OSError as error:
            raise ResourceError(
                f"health.prometheus_port = {port} cannot be used: {error}. Choose another port, or 0 for none."
            ) from error
        self._handlers: dict[str, Callable[[int, Wire], None]] = {
            "StepFinished": self._finished,
            "StepRejected": self._rejected,
            "ValidationFinished": lambda _, data: _set(self._validation, data["validation_loss"]),
            "CheckpointSaved": self._saved_at,
            "Verdict": self._spoken,
        }

    def measured(self, measurement: Measurement) -> None:
        for group, row in measurement.rows:
            for role in ("a", "b"):
                if f"{role}_norm" in row:
                    self._norm.labels(group, role.upper()).set(row[f"{role}_norm"])

    def event(self, wire: Wire) -> None:
        handler = self._handlers.get(wire["type"])
        if handler is not None:
            handler(int(wire["step"]), wire["data"])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _finished(self, step: int, data: Wire) -> None:
        self._steps.labels("applied").inc()
        _set(self._loss, data["loss"])
        _set(self._scale, data["loss_scale"])
        self._seconds.observe(data["seconds"])
        self._memory.set(data["vram_gib"] * 2**30)
        if data.get("clipped"):
            self._clipped.inc()
        self._left_out.inc(len(data.get("left_out", ())))

    def _rejected(self, step: int, data: Wire) -> None:
        self._steps.labels(data.get("kind") or "rejected").inc()
        _set(self._scale, data["loss_scale"])

    def _saved_at(self, step: int, data: Wire) -> None:
        self._saved = time.time()
        self._checkpoint.set(step)

    def _spoken(self, step: int, data: Wire) -> None:
        if data["severity"] == "info" or data["kind"] not in VERDICTS:
            return
        over = data["severity"] == "ok"
        self._verdict.labels(data["kind"]).set(0 if over else 1)
        if not over:
            self._verdicts.labels(data["kind"]).inc()

    def _checkpoint_age(self) -> float:
        return time.time() - self._saved if self._saved else math.nan


def _set(gauge: Any, value: float | None) -> None:
    gauge.set(math.nan if value is None else value)
