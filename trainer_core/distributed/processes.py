"""The processes of one run, started by torchrun or accelerate launch: where they are, and how they speak.

Flags and small messages go over gloo on the CPU, tensors over NCCL where they are on GPUs. Process 0 does the slow work
that happens once (scan, caches, validation, previews, files) while the others wait at a gate in the store; a heartbeat
tells "slow" from "gone", so no collective ever waits for slow work.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
from torch import distributed

from ..errors import ProcessError

_START_S = 300.0
"""The least time that processes have to start and import their libraries."""
_BEAT_S = 1.0
_LOOK_S = 1.0
_QUICK_S, _SLOW_S = 0.001, 0.05
_PASSED_ON = "\0"
"""Before word of a failure that began elsewhere."""


def world_size() -> int:
    """How many processes the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE") or "1")


class ToldElsewhereError(ProcessError):
    """What another process tells of as well, so that this one need not."""


def agree_on_prefix(store: Any, rank: int, count: int, patience: timedelta) -> str:
    """Meet the other processes in `store`; returns a prefix for the keys of this start, the same for all.

    The store may be the launcher's and hold keys of processes that it has restarted since, under any number of theirs:
    process 0 answers each greeting by its own random name, and goes on when all have taken its answer.

    Raises:
        RuntimeError: some did not come within `patience`.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"hello/{rank}", own)
        store.wait([f"answer/{own}"], patience)
        prefix = store.get(f"answer/{own}").decode("ascii")
        store.set(f"ready/{prefix}/{rank}", "here")
        store.wait([f"go/{prefix}"], patience)
        return prefix
    deadline = time.monotonic() + patience.total_seconds()
    waiting, answered = set(range(1, count)), set[str]()
    while waiting:
        for other in waiting:
            greeting = store.get(f"hello/{other}").decode("ascii") if store.check([f"hello/{other}"]) else ""
            if greeting and greeting not in answered:
                store.set(f"answer/{greeting}", own)
                answered.add(greeting)
        waiting = {other for other in waiting if not store.check([f"ready/{own}/{other}"])}
        if waiting and time.monotonic() > deadline:
            raise RuntimeError(f"process {min(waiting)} did not start within {patience.total_seconds():.0f} s")
        time.sleep(_QUICK_S)
    store.set(f"go/{own}", "go")
    return own


class RunOver(Exception):
    """Process 0 has ended the run; the others may end too."""


class Processes:
    """This process among `count`, numbered `rank` from 0. One instance a process; `close()` at the end.

    Args:
        limit_s: seconds a collective waits for the others, and a gate for a heartbeat.

    Raises:
        ProcessError: the others cannot be reached.
    """

    def __init__(self, *, limit_s: float = 600.0, cuda: bool = False) -> None:
        self.limit_s = limit_s
        limit = timedelta(seconds=limit_s)
        try:
            patience = timedelta(seconds=max(limit_s, _START_S))
            store, self.rank, self.count = next(distributed.rendezvous("env://", timeout=patience))
            start = distributed.PrefixStore("safe-scaler-start", store)
            store = distributed.PrefixStore(agree_on_prefix(start, self.rank, self.count, patience), store)
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=distributed.PrefixStore("safe-scaler", store),
                rank=self.rank,
                world_size=self.count,
                timeout=limit,
            )
        except (RuntimeError, ValueError) as error:
            raise ProcessError(f"The processes of this run cannot reach each other: {error}") from error
        self.local_rank = int(os.environ.get("LOCAL_RANK") or "0")
        self._store = distributed.PrefixStore("safe-scaler-notes", store)
        self._gates: dict[str, int] = {}
        self._closed = threading.Event()
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._beat(0)
        self._thread = threading.Thread(target=self._keep_beating, args=(store,), name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def first(self) -> bool:
        """Whether this is process 0, which alone writes files and speaks."""
        return self.rank == 0

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag, true where it is on any process. Leaves a note of having come here, so that one that does not
        answer can be named."""
        self._store.set(f"at/{self.rank}", str(self._next("flags")))
        values = torch.tensor(flags, dtype=torch.int32)
        self._guarded(lambda: distributed.all_reduce(values, distributed.ReduceOp.MAX))
        return tuple(bool(value) for value in values.tolist())

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` summed over the processes, in place; the same bits everywhere."""
        self._guarded(lambda: distributed.all_reduce(tensor, distributed.ReduceOp.SUM))
        return tensor

    def gather(self, text: str) -> list[str]:
        """The text of every process, by rank."""
        own = torch.frombuffer(bytearray(text.encode("utf-8") or b" "), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        self._guarded(lambda: distributed.all_gather(lengths, torch.tensor([len(own)])))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = own
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.count)]
        self._guarded(lambda: distributed.all_gather(texts, padded))
        return [
            bytes(found[: int(length)].tolist()).decode("utf-8") for found, length in zip(texts, lengths, strict=True)
        ]

    def share_json(self, make: Callable[[], Any]) -> Any:
        """What `make` returns in process 0, in every process; a failure of it is one everywhere."""
        if not self.first:
            told = json.loads(self._wait_for(f"shared/{self._next('shared')}", {0}))
            if "failed" in told:
                raise ToldElsewhereError(f"Process 0 failed: {told['failed']}")
            return told["value"]
        key = f"shared/{self._next('shared')}"
        try:
            value = make()
        except BaseException as error:
            self._store.set(key, json.dumps({"failed": str(error) or type(error).__name__}))
            raise
        self._store.set(key, json.dumps({"value": value}))
        return value

    def broadcast(self, tensors: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """CPU tensors of process 0 (None elsewhere) in every process, bit for bit."""
        described: Any = self.share_json(
            lambda: [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in (tensors or {}).items()]
        )
        result: dict[str, torch.Tensor] = {}
        for name, dtype, shape in described:
            value = tensors[name].contiguous() if tensors else torch.empty(shape, dtype=getattr(torch, dtype))
            raw = value.reshape(-1).view(torch.uint8) if value.numel() else torch.empty(0, dtype=torch.uint8)
            if raw.numel():
                self._guarded(lambda raw=raw: distributed.broadcast(raw, 0))
            result[name] = value
        return result

    def gate(self, name: str) -> None:
        """Process 0 goes through and opens it for the others, which wait as long as process 0 is alive.

        Raises ProcessError when it is not, or has failed.
        """
        key = f"gate/{name}/{self._next(f'gate/{name}')}"
        if self.first:
            self._store.set(key, "open")
        else:
            self._wait_for(key, {0})

    def meet(self, name: str) -> None:
        """Wait until every process has come here, however long it works, as long as all are alive."""
        number = self._next(f"meet/{name}")
        self._store.set(f"meet/{name}/{number}/{self.rank}", "here")
        for rank in range(self.count):
            if rank != self.rank:
                self._wait_for(f"meet/{name}/{number}/{rank}", {rank})

    def tell_failed(self, error: BaseException | str) -> None:
        """Leave word of why this process ends. A failure of another process is passed on as it was told."""
        text = str(error) or type(error).__name__
        with contextlib.suppress(RuntimeError):
            self._store.set(f"failed/{self.rank}", (_PASSED_ON if isinstance(error, ProcessError) else "") + text)

    def tell_over(self) -> None:
        """Process 0 needs the others no more."""
        with contextlib.suppress(RuntimeError):
            self._store.set("over", "over")

    def close(self) -> None:
        """Leave the group. A process that failed leaves without waiting for the others."""
        self._closed.set()
        self._thread.join(timeout=5.0)
        with contextlib.suppress(RuntimeError):
            distributed.destroy_process_group()

    def _next(self, name: str) -> int:
        self._gates[name] = self._gates.get(name, 0) + 1
        return self._gates[name]

    def _wait_for(self, key: str, ranks: set[int]) -> bytes:
        """The value of `key`, which one of `ranks` will set."""
        self._beats.clear()
        started = looked = time.monotonic()
        while True:
            if self._there(key):
                return cast("bytes", self._store.get(key))
            now = time.monotonic()
            time.sleep(_QUICK_S if now - started < 1.0 else _SLOW_S)  # steps are quick, validation is not
            if now - looked < _LOOK_S:
                continue
            looked = now
            self._look_for_failures()
            for rank in ranks:
                if self._silence(rank) > self.limit_s:
                    raise ProcessError(f"Process {rank} is gone: no sign of life for {self.limit_s:.0f} s.")

    def _there(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError as error:
            raise ProcessError(f"The store of this run is gone, and with it process 0 ({error}).") from error

    def _look_for_failures(self) -> None:
        """Raise ProcessError when another process has left word that it failed, RunOver when the run has ended."""
        with contextlib.suppress(RuntimeError):
            if not self.first and self._store.check(["over"]):
                raise RunOver
        for rank in range(self.count):
            try:
                if rank != self.rank and self._store.check([f"failed/{rank}"]):
                    told = self._store.get(f"failed/{rank}").decode("utf-8", "replace")
                    passed_on = told.startswith(_PASSED_ON)
                    text = told.removeprefix(_PASSED_ON) if passed_on else f"Process {rank} failed: {told}"
                    raise ToldElsewhereError(text)
            except RuntimeError as error:
                raise ProcessError(f"The store of this run is gone ({error}).") from error

    def _silence(self, rank: int) -> float:
        """Seconds since the heartbeat of `rank` last changed, as seen from here."""
        beat = self._store.get(f"beat/{rank}") if self._store.check([f"beat/{rank}"]) else b""
        now = time.monotonic()
        known, since = self._beats.get(rank, (None, now))
        if beat != known:
            self._beats[rank] = beat, now
            return 0.0
        return now - since

    def _beat(self, number: int, store: Any = None) -> None:
        (store or self._store).set(f"beat/{self.rank}", str(number))

    def _keep_beating(self, store: Any) -> None:
        """In a thread with a connection of its own: a wait in the main thread holds the shared one."""
        with contextlib.suppress(AttributeError, RuntimeError):
            store = store.clone()
        own = distributed.PrefixStore("safe-scaler-notes", store)
        number = 0
        while not self._closed.wait(_BEAT_S):
            number += 1
            try:
                self._beat(number, own)
            except RuntimeError:  # the store is gone: the run is over, one way or the other
                return

    def _guarded(self, collective: Callable[[], object]) -> None:
        """A collective whose failure is told in words: who failed, is gone, or does not answer."""
        try:
            collective()
        except RuntimeError as error:
            self._explain(error)

    def _explain(self, error: RuntimeError) -> None:
        time.sleep(_BEAT_S)  # word of a failure may be on its way
        self._look_for_failures()
        late = self._late()
        who = f"Process{'es' if len(late) > 1 else ''} {', '.join(map(str, late))}" if late else "A process"
        raise ProcessError(
            f"{who} did not answer within {self.limit_s:.0f} s or is gone "
            f"({str(error).splitlines()[0][:200]}). The run can be resumed from its last checkpoint, with any number "
            "of processes."
        ) from error

    def _late(self) -> list[int]:
        places: dict[int, int] = {}
        with contextlib.suppress(RuntimeError):
            for rank in range(self.count):
                if self._store.check([f"at/{rank}"]):
                    places[rank] = int(self._store.get(f"at/{rank}"))
        own = places.get(self.rank, 0)
        return [rank for rank, place in places.items() if place < own]
