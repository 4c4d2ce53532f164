"""Made-up records of a small network, for rules that need no training run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer_core.health.groups import Tensor, describe
from trainer_core.health.records import FastRecord, SlowRecord, TensorSample


def network(modules: int = 10) -> dict[str, Tensor]:
    """A UNet's cross-attention of `modules` adapters, and three layers of each text encoder."""
    found: dict[str, Tensor] = {}
    for number in range(modules):
        for side in ("down", "up"):
            name = f"lora_unet_input_blocks_4_1_transformer_blocks_{number}_attn2_to_q.lora_{side}.weight"
            found[name] = describe(name, "unet")
    for part in ("te1", "te2"):
        for layer in range(3):
            for side in ("down", "up"):
                name = f"lora_{part}_text_model_encoder_layers_{layer}_mlp_fc1.lora_{side}.weight"
                found[name] = describe(name, part)
    return found


def fast(tensors: dict[str, Tensor], step: int = 1, **changes: Any) -> FastRecord:
    """A healthy step: every tensor has the gradient norm 0.1."""
    record = FastRecord(
        step=step,
        applied=step,
        outcome="applied",
        loss=1.0,
        losses=(1.0,),
        grad_norm=0.5,
        loss_scale=1.0,
        clip=1.0,
        norms=dict.fromkeys(tensors, 0.1),
    )
    return replace(record, **changes)


def slow(tensors: dict[str, Tensor], step: int = 10, age: float = 10.0, **changes: Any) -> SlowRecord:
    """A healthy measurement."""
    sample = TensorSample(
        has_gradient=True, in_optimizer=True, rate=1e-3, zero=0.0, changed=1.0, grad=0.1, weight=1.0, update=0.01,
        amax=0.01, rms=1.0, consistency=0.1, spread=0.3, age=age,
    )  # fmt: skip
    modules = {tensor.module for tensor in tensors.values()}
    record = SlowRecord(step, 1.0, 1.0, dict.fromkeys(tensors, sample), dict.fromkeys(modules, 0.5))
    return replace(record, **changes)


def changed(record: SlowRecord, names: list[str], **values: Any) -> SlowRecord:
    """`record` with other numbers for some tensors."""
    return replace(record, tensors={n: replace(s, **values) if n in names else s for n, s in record.tensors.items()})
