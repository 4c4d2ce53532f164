"""A checkpoint read once, by process 0, and given to all: the others may not see its disk."""

from __future__ import annotations

from collections.abc import Callable

from ..checkpoints.state import RunState
from .processes import Processes


def share_state(processes: Processes, load: Callable[[], RunState | None]) -> RunState | None:
    """What `load` returns in process 0, in every process; tensors bit for bit, on the CPU.

    Raises what `load` raises, in process 0, and ProcessError elsewhere.
    """
    loaded: list[RunState | None] = []

    def described() -> dict[str, object] | None:
        state = load()
        loaded.append(state)
        if state is None:
            return None
        return {
            "scalars": state.scalars,
            "step": state.step,
            "name": state.name,
            "generation": state.generation,
            "passed_over": list(state.passed_over),
        }

    told = processes.share_json(described)
    if told is None:
        return None
    own = loaded[0] if loaded else None
    adapter = processes.broadcast(None if own is None else own.adapter)
    optimizer = processes.broadcast(None if own is None else own.optimizer)
    if own is not None:
        return own
    state = RunState(adapter, optimizer, told["scalars"], told["step"], told["name"], told["generation"])
    state.passed_over = tuple(told["passed_over"])
    return state
