"""Running the UNet, and recomputing activations without losing gradients."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from trainer_core.models import SDXLModel, encode_captions, load_sdxl, time_ids

CAPTIONS = ["a red square", "a blue circle"]


def _inputs(model: SDXLModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    noisy = torch.randn(2, 4, 8, 10, generator=generator)
    ids = torch.stack([time_ids((64, 80), (0, 4), (64, 80)), time_ids((1025, 2049), (1, 0), (64, 80))])
    return noisy, torch.tensor([10, 990]), ids


def test_time_ids_order() -> None:
    assert time_ids((100, 200), (3, 4), (64, 80)).tolist() == [100, 200, 3, 4, 64, 80]
    assert time_ids((1, 2), (3, 4), (5, 6)).dtype == torch.float32


def test_denoise_equals_the_plain_unet(toy: SDXLModel) -> None:
    noisy, timesteps, ids = _inputs(toy)
    embeds = encode_captions(toy, CAPTIONS)
    mine = toy.denoise(noisy, timesteps, embeds.context_BTD, embeds.pooled_BD, ids)
    conditions = {"text_embeds": embeds.pooled_BD, "time_ids": ids}
    theirs = toy.unet(noisy, timesteps, encoder_hidden_states=embeds.context_BTD, added_cond_kwargs=conditions).sample
    assert torch.equal(mine, theirs)
    assert mine.shape == noisy.shape


def test_half_precision_model_takes_fp32_inputs_and_exact_sizes(toy: SDXLModel) -> None:
    """Size 2049 is not a bfloat16 number: it must be embedded before it is rounded."""
    model = load_sdxl("toy", dtype=torch.bfloat16)
    noisy, timesteps, ids = _inputs(model)
    embeds = encode_captions(model, CAPTIONS)
    seen: list[torch.Tensor] = []
    hook = model.unet.add_time_proj.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    out = model.denoise(noisy, timesteps, embeds.context_BTD.float(), embeds.pooled_BD.float(), ids.double())
    hook.remove()
    assert out.dtype == torch.bfloat16
    assert seen[0].dtype == torch.float32
    assert 2049.0 in seen[0].tolist()
    exact = encode_captions(toy, CAPTIONS)
    reference = toy.denoise(noisy, timesteps, exact.context_BTD, exact.pooled_BD, ids)
    assert float((out.float() - reference).norm() / reference.norm()) < 0.05


class _Adapter(nn.Module):
    """A stand-in for a LoRA: a trained layer beside a frozen one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.extra = nn.Linear(base.in_features, base.out_features, bias=False)
        nn.init.constant_(self.extra.weight, 1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.extra(x)


def _adapted(seed_model: SDXLModel) -> dict[str, _Adapter]:
    """Wrap one projection in the UNet's middle and one in each encoder; everything else stays frozen."""
    middle: Any = seed_model.unet.mid_block
    attention = middle.attentions[0].transformer_blocks[0].attn1
    attention.to_q = _Adapter(attention.to_q)
    found = {"unet": attention.to_q}
    for part in ("te1", "te2"):
        encoder: Any = seed_model.parts[part]
        layer = getattr(encoder, "text_model", encoder).encoder.layers[0].self_attn
        layer.v_proj = _Adapter(layer.v_proj)
        found[part] = layer.v_proj
    return found


def _gradients(checkpointing: bool, autocast: bool) -> dict[str, torch.Tensor]:
    model = load_sdxl("toy")
    adapters = _adapted(model)
    model.set_gradient_checkpointing(checkpointing)
    noisy, timesteps, ids = _inputs(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        embeds = encode_captions(model, CAPTIONS)
        out = model.denoise(noisy, timesteps, embeds.context_BTD, embeds.pooled_BD, ids)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*requires_grad.*")
        out.float().square().mean().backward()
    gradients = {}
    for part, adapter in adapters.items():
        assert adapter.extra.weight.grad is not None, part
        gradients[part] = adapter.extra.weight.grad
    return gradients


@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_changes_no_gradient(autocast: bool) -> None:
    """Case B55: frozen base, adapters inside, both encoders trained along."""
    plain, recomputed = _gradients(False, autocast), _gradients(True, autocast)
    for part, gradient in plain.items():
        assert float(gradient.norm()) > 0, part
        assert float((recomputed[part] - gradient).norm() / gradient.norm()) < 1e-6, part


def test_checkpointing_really_recomputes_and_can_be_switched_off() -> None:
    model = load_sdxl("toy")
    _adapted(model)
    middle: Any = model.unet.mid_block
    inner: Any = model.text_encoders[0]
    calls = {"unet": 0, "te1": 0}
    middle.resnets[-1].conv1.register_forward_hook(lambda *_: calls.__setitem__("unet", calls["unet"] + 1))
    layer = getattr(inner, "text_model", inner).encoder.layers[0]
    layer.mlp.fc1.register_forward_hook(lambda *_: calls.__setitem__("te1", calls["te1"] + 1))
    noisy, timesteps, ids = _inputs(model)
    for enabled, count in ((True, 2), (False, 1)):
        model.set_gradient_checkpointing(enabled)
        calls.update(unet=0, te1=0)
        embeds = encode_captions(model, CAPTIONS)
        model.denoise(noisy, timesteps, embeds.context_BTD, embeds.pooled_BD, ids).mean().backward()
        assert calls == {"unet": count, "te1": count}
        assert model.unet.training is enabled


def test_parts_are_the_trainable_modules(toy: SDXLModel) -> None:
    assert list(toy.parts) == ["unet", "te1", "te2"]
    assert toy.device == torch.device("cpu")
    assert toy.to("cpu") is toy
