"""Keys of PEFT layers and kohya's (LyCORIS') for the same weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# PEFT's name inside a layer -> kohya's. The rest keeps its name.
_NAMES = {
    "lora_A.default.weight": "lora_down.weight",
    "lora_B.default.weight": "lora_up.weight",
    "lora_magnitude_vector.default.weight": "dora_scale",
}
_BACK = {kohya: peft for peft, kohya in _NAMES.items()}
_RANK_OF = {"lora_down.weight": 0, "hada_w1_b": 0, "lokr_w2_b": 0, "lokr_w1_b": 0}
"""Which axis of which tensor is the rank."""


def to_kohya_keys(tensors: Mapping[str, torch.Tensor], scales: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """Kohya's keys with an alpha for every module that has a rank.

    LoKr without any factorised matrix has no rank in a file, and loaders then use no scale: it goes into `lokr_w1`.
    """
    state: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        module, _, rest = name.partition(".")
        key = _NAMES.get(rest, rest.replace(".default", ""))
        if key == "dora_scale":
            # One value an output channel; LyCORIS keeps it in the weight's number of dimensions.
            down = tensors[f"{module}.lora_A.default.weight"]
            value = value.reshape(-1, *[1] * (down.dim() - 1))
        state[f"{module}.{key}"] = value
    for module, scale in scales.items():
        rank = next((state[k].shape[axis] for key, axis in _RANK_OF.items() if (k := f"{module}.{key}") in state), None)
        if rank is not None:
            state[f"{module}.alpha"] = torch.tensor(scale * rank)
        elif f"{module}.lokr_w1" in state:
            state[f"{module}.lokr_w1"] = state[f"{module}.lokr_w1"] * scale
            state[f"{module}.alpha"] = torch.tensor(scale)
    return state


def from_kohya_keys(state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PEFT's parameter names for kohya's keys; `own` are the network's parameters (for shapes)."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        module, _, rest = key.partition(".")
        if rest == "alpha":
            continue
        name = f"{module}.{_BACK.get(rest) or _with_adapter(rest)}"
        if rest == "dora_scale" and name in own:
            value = value.reshape(own[name].shape)
        if rest == "lokr_w1" and f"{module}.lokr_w2_b" not in state and f"{module}.alpha" in state:
            value = value / state[f"{module}.alpha"]
        found[name] = value
    return found


def _with_adapter(rest: str) -> str:
    """`hada_w1_a` -> `hada_w1_a.default`, `oft_R.weight` -> `oft_R.default.weight`."""
    head, dot, tail = rest.partition(".")
    return f"{head}.default{dot}{tail}"
