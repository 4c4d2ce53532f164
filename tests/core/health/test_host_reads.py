"""Exactly one host read a step, over whole steps of the trainer with everything that is on by default and more.

On a CPU every tensor lies in host memory, so what would lie on the device is told apart by where it comes from: trained
and frozen weights, buffers, whatever is moved with `.to(device)`, and every result of an operation on one of these. A
read is then an operation whose result the host waits for (torch's own tags `data_dependent_output` and
`dynamic_output_shape` name them: item, equal, nonzero ...), or a copy of such a tensor to the host.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from run_setup import small_config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer_core.assemble import assemble
from trainer_core.config_io import from_dict
from trainer_core.events import EventBus
from trainer_core.health import headroom, signals
from trainer_core.optim.safe_scaler import SafeScaler
from trainer_core.prepare import create_run
from trainer_core.runs.database import RunDatabase
from trainer_core.runs.protocol import Commands

_WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


def _by_mask(indices: Any) -> bool:
    """Only a mask makes indexing wait: how many it picks must be known."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


class DeviceWatch(TorchDispatchMode):
    """Counts reads of what would lie on the device. `late`: transfers that nothing waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.late = 0
        self._storages: dict[int, StorageWeakRef] = {}

    def add(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            reference = StorageWeakRef(tensor.untyped_storage())
            self._storages[reference.cdata] = reference

    def holds(self, tensor: torch.Tensor) -> bool:
        reference = self._storages.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()

    def note(self, what: str) -> None:
        calls = [
            f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_stack() if "trainer_core" in f.filename
        ]
        self.reads.append(f"{what} at {' > '.join(calls[-3:])}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        on_device = any(self.holds(leaf) for leaf in leaves)
        if on_device and any(tag in func.tags for tag in _WAITS) and (func not in _INDEXING or _by_mask(args[1])):
            self.note(str(func))
        result = func(*args, **(kwargs or {}))
        if on_device:
            self.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


@contextmanager
def watching(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceWatch]:
    """Everything of `trainer` that a GPU run has on the GPU counts as being there."""
    watch, parts = DeviceWatch(), trainer.parts
    for module in (*parts.model.parts.values(), parts.network.container):
        watch.add([*module.parameters(), *module.buffers()])
    schedule = vars(parts.objective.schedule).values()
    watch.add(value for value in schedule if isinstance(value, torch.Tensor))
    states = [value for state in parts.optimizer.state.values() for value in state.values()]
    watch.add(value for value in states if isinstance(value, torch.Tensor) and value.dim() > 0)  # step counts: host

    def counted(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *args: Any, **options: Any) -> Any:
            if not watch.holds(self):
                return original(self, *args, **options)
            watch.note(name)
            return original(self.detach().clone() if name == "cpu" else self, *args, **options)

        return call

    move = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """To the device: a copy there. (Nothing in a step is moved the other way by `to`.)"""
        moved = move(self, *args, **options)
        if any(isinstance(value, torch.device) for value in (*args, *options.values())):
            moved = moved.clone() if moved is self else moved
            watch.add([moved])
        return moved

    with monkeypatch.context() as patched:
        numpy = torch.Tensor.numpy
        for name in ("tolist", "cpu", "numpy", "__array__"):
            patched.setattr(torch.Tensor, name, counted(name))
        patched.setattr(torch.Tensor, "to", to)

        def to_host(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
            """On a GPU: a copy into pinned memory that nothing waits for."""
            watch.late += 1
            return torch.from_numpy(numpy(values.detach()).copy()), None

        for module in (signals, headroom):
            patched.setattr(module, "to_host", to_host)
        with watch:
            yield watch


@pytest.fixture(scope="module")
def trainer(micro_model: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A loss scale, accumulation, a clamp, weight checks, headroom, module clipping and an average; UNet and text
    encoder 1. In fp32, because fp16 is slow on a CPU; the scaler is the same."""
    config = small_config(
        micro_model,
        pictures,
        tmp_path_factory.mktemp("reads"),
        lora={"preset": "attention", "clamp": 16.0, "max_norm": 1.0, "dropout": 0.1},
        gradient={"accumulation": 2, "clip": "module"},
        safety={"check_weights_every": 2},
        dataset={"batch_size": 1},
        optimizer={"ema_decay": 0.99, "te2_lr": 0.0},
        objective={"min_snr_gamma": 5.0, "noise_offset": 0.05},
        health={"slow_every_early": 2, "headroom_every": 2, "audit": "off"},
        precision={"compute": "fp32"},
        run={"max_train_steps": 100},
    )
    folder = create_run(config)
    stored = folder.read_config()
    bus = EventBus(run_id="reads")
    with RunDatabase(folder.database_path) as database:
        bus.subscribe(database)
        made = assemble(folder, stored, from_dict(stored["config"]), bus=bus, commands=Commands(), database=database)
        assert made is not None
        made.trainer.parts.network.train()
        precision = made.trainer.parts.precision
        precision.scaler = SafeScaler(config.precision, torch.device("cpu"), enabled=True)
        assert made.trainer.train_step(), "the optimizer's state is made in the first step"
        yield made.trainer
        assert made.trainer.health is not None
        made.trainer.health.close()


def test_a_whole_step_reads_the_device_once(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast and full measurements, weight checks and headroom among them. What full ones take is not waited for."""
    late: list[int] = []
    seen: list[int] = []
    trainer.health.listeners.append(lambda measured: seen.append(measured.fast.step) if measured.slow else None)
    for _ in range(2):
        before = trainer.state.applied
        with watching(trainer, monkeypatch) as watch:
            assert trainer.train_step()
            trainer._look_around()
        assert trainer.state.applied == before + 1, "an applied step"
        assert [read.partition(" at ")[0] for read in watch.reads] == ["tolist"], watch.reads
        assert "take_reading" in _line_of(watch.reads[0])
        late.append(watch.late)
    assert late == [2, 0], "adapters and activations are measured in every second step"
    assert len(seen) == 1, "and looked at one step later"


def test_the_watch_sees_every_way_of_reading(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that somebody adds to the micro-batch loop is counted."""
    original = trainer.loss

    def loss(*args: Any) -> torch.Tensor:
        loss_B = original(*args)
        loss_B.mean().item()
        bool((loss_B > 0).all())
        loss_B.detach().cpu()
        torch.equal(loss_B, loss_B * 2)
        loss_B[loss_B > 0]
        return loss_B

    monkeypatch.setattr(trainer, "loss", loss)
    with watching(trainer, monkeypatch) as watch:
        assert trainer.train_step()
    assert len(watch.reads) == 2 * 5 + 1, "two micro-batches and the step's own"


def _line_of(read: str) -> str:
    """The functions in the places of a read: file and line are looked up again."""
    place = read.rpartition(" > ")[2]
    name, _, line = place.partition(":")
    (file,) = (Path(signals.__file__).parents[1]).rglob(name)
    source = file.read_text(encoding="utf-8").splitlines()
    for text in reversed(source[: int(line)]):
        if text.startswith("def "):
            return text
    return ""
