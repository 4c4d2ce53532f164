"""The optimizer's state by parameter name: tensors apart, everything else as JSON.

Three places hold state, and all are stored: entries of each parameter (moments, step counts), entries of a group
(Prodigy's d, schedule-free's counters) and numbers on the optimizer itself. Settings of a group (learning rate, betas)
are not state: they stay the config's. What of a group is state is found by comparing with the fresh optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch

from ..errors import CheckpointError

_FRESH = "_safe_scaler_fresh"
_SHAPES = "shapes"
_LABELS = "labels"
# Settings of ours and torch's that a checkpoint must not bring back.
_SETTINGS = frozenset({"params", "names", "part", "label", "base_lr", "lr"})
_ABOUT = (_SHAPES, _LABELS)
_GROUP = "group:"
_SELF = "optimizer:"


def remember_fresh(optimizer: torch.optim.Optimizer) -> None:
    """Note how groups and attributes look before the first step."""
    groups = {group["label"]: {k: _copy(v) for k, v in _group_entries(group)} for group in optimizer.param_groups}
    setattr(optimizer, _FRESH, (groups, {k: _copy(v) for k, v in _attributes(optimizer)}))


def optimizer_state(
    optimizer: torch.optim.Optimizer, *, copy: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """State as tensors by `<entry>/<parameter>` and JSON-safe numbers by the same keys.

    With `copy` the tensors are contiguous copies on the CPU, else the live ones wherever they are.

    Group entries stand under `<entry>/group:<label>`, numbers of the optimizer itself under `<name>/optimizer:`, and
    `shapes` and `labels` tell the shape of every parameter and the label of every group.

    Raises:
        CheckpointError: an entry is neither a tensor nor plain data.
    """
    writer = _Writer(copy)
    shapes: dict[str, list[int]] = {}
    for name, parameter in _named(optimizer):
        shapes[name] = list(parameter.shape)
        for entry, value in optimizer.state.get(parameter, {}).items():
            writer.put(f"{entry}/{name}", value)
    fresh_groups, fresh_self = getattr(optimizer, _FRESH, ({}, {}))
    for group in optimizer.param_groups:
        before = fresh_groups.get(group.get("label"), {})
        for entry, value in _group_entries(group):
            if entry not in before or not _same(before[entry], value):
                writer.put(f"{entry}/{_GROUP}{group['label']}", value)
    for entry, value in _attributes(optimizer):
        if entry not in fresh_self or not _same(fresh_self[entry], value):
            writer.put(f"{entry}/{_SELF}", value)
    labels = [group["label"] for group in optimizer.param_groups if "label" in group]
    return writer.tensors, {**writer.numbers, _SHAPES: shapes, _LABELS: labels}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]
) -> None:
    """Put back what `optimizer_state` gave, by name. Learning rates and other group settings stay the config's.

    Raises CheckpointError listing names that lack a counterpart or have another shape; nothing is changed then.
    """
    parameters = dict(_named(optimizer))
    groups = {group["label"]: group for group in optimizer.param_groups if "label" in group}
    wrong = _shape_differences(parameters, numbers.get(_SHAPES), tensors)
    staged: list[tuple[str, str, Any]] = []
    inner = _inner_tensors(numbers)
    for key in [*(key for key in tensors if key not in inner), *(key for key in numbers if key not in _ABOUT)]:
        entry, _, owner = key.partition("/")
        value = tensors[key] if key in tensors else _decode(numbers[key], tensors)
        if owner.startswith(_GROUP):
            known = owner.removeprefix(_GROUP) in groups
        else:
            known = owner == _SELF or owner in parameters
        if known:
            staged.append((owner, entry, value))
        else:
            wrong.append(f"{owner}: in the checkpoint only")
    stored = numbers.get(_LABELS, list(groups))
    if any(owner.startswith(_GROUP) for owner, _, _ in staged) and sorted(stored) != sorted(groups):
        wrong.append(f"groups: {', '.join(stored)} in the checkpoint, {', '.join(groups)} now (LoRA+ on or off)")
    if wrong:
        raise CheckpointError("The optimizer state does not fit the adapter.", differences=sorted(set(wrong)))
    _commit(optimizer, parameters, groups, staged)


def _commit(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    groups: Mapping[str, dict[str, Any]],
    staged: list[tuple[str, str, Any]],
) -> None:
    on_device = {
        id(parameter): bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    entries: dict[str, dict[str, Any]] = {}
    for owner, entry, value in staged:
        if owner == _SELF:
            setattr(optimizer, entry, value)
        elif owner.startswith(_GROUP):
            group = groups[owner.removeprefix(_GROUP)]
            group[entry] = _moved(value, group["params"][0].device)
        else:
            parameter = parameters[owner]
            # torch's own rule: step counts stay on the host unless the kernel reads them on the device.
            host = entry == "step" and not on_device[id(parameter)]
            entries.setdefault(owner, {})[entry] = _moved(value, torch.device("cpu") if host else parameter.device)
    for owner, state in entries.items():
        optimizer.state[parameters[owner]] = state


def _shape_differences(
    parameters: Mapping[str, torch.nn.Parameter], shapes: Mapping[str, list[int]] | None, tensors: Mapping[str, Any]
) -> list[str]:
    """Parameters whose shape in the checkpoint is another one; without stored shapes the first moment tells."""
    if shapes is None:
        shapes = {
            name: list(value.shape)
            for key, value in tensors.items()
            for entry, _, name in [key.partition("/")]
            if entry == "exp_avg"
        }
    wrong: list[str] = []
    for name, shape in shapes.items():
        if name not in parameters:
            wrong.append(f"{name}: in the checkpoint only")
        elif tuple(shape) != tuple(parameters[name].shape):
            wrong.append(f"{name}: {tuple(shape)} in the checkpoint, {tuple(parameters[name].shape)} now")
    return wrong


class _Writer:
    """Sorts values into tensors and JSON."""

    def __init__(self, copy: bool) -> None:
        self._copy = copy
        self.tensors: dict[str, torch.Tensor] = {}
        self.numbers: dict[str, Any] = {}

    def put(self, key: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(key, value)
        else:
            self.numbers[key] = self._plain(key, value)

    def _tensor(self, key: str, value: torch.Tensor) -> None:
        value = value.detach()
        self.tensors[key] = value.to("cpu", copy=True).contiguous() if self._copy else value

    def _plain(self, key: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self._tensor(key, value)
            return {"tensor": key}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self._plain(f"{key}/{i}", item) for i, item in enumerate(cast("list[Any]", value))]}
        if isinstance(value, dict) and all(isinstance(name, str) for name in cast("dict[Any, Any]", value)):
            items = cast("dict[str, Any]", value).items()
            return {"dict": {name: self._plain(f"{key}/{name}", item) for name, item in items}}
        raise CheckpointError(
            f"The optimizer keeps something in its state that cannot be stored ({key}: {type(value).__name__}). "
            "Use another optimizer; those of docs/optimizers.md can all be resumed."
        )


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = cast("dict[str, Any]", value).items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {name: _decode(item, tensors) for name, item in content.items()}
    items = [_decode(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)


def _inner_tensors(numbers: Mapping[str, Any]) -> set[str]:
    """Keys of tensors that belong to a nested entry."""
    found: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            entries = cast("dict[str, Any]", value)
            if isinstance(entries.get("tensor"), str):
                found.add(entries["tensor"])
            for item in entries.values():
                walk(item)
        elif isinstance(value, list):
            for item in cast("list[Any]", value):
                walk(item)

    walk({key: value for key, value in numbers.items() if key not in _ABOUT})
    return found


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, list):
        return [_moved(item, device) for item in cast("list[Any]", value)]
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in cast("tuple[Any, ...]", value))
    if isinstance(value, dict):
        return {name: _moved(item, device) for name, item in cast("dict[str, Any]", value).items()}
    return value


def _group_entries(group: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(entry, value) for entry, value in group.items() if entry not in _SETTINGS]


def _attributes(optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    """Numbers and tensors that the optimizer keeps on itself; flags and private names are not state."""
    return [
        (name, value)
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)
    ]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _named(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    return [pair for group in optimizer.param_groups for pair in zip(group["names"], group["params"], strict=True)]
