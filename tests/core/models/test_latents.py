"""VAE in fp32 whatever stands around it; NaN is never handed on."""

from __future__ import annotations

import pytest
import torch

from trainer_core.errors import NonFiniteError
from trainer_core.models import SDXLModel, decode_latents, encode_images, load_sdxl


def _images(count: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 3, 64, 80, generator=generator) * 2 - 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_encoding_under_autocast_is_bit_equal_to_plain_fp32(toy: SDXLModel, dtype: torch.dtype) -> None:
    plain = encode_images(toy.vae, _images())
    seen: list[torch.dtype] = []
    hook = toy.vae.encoder.conv_in.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=dtype):
        cast = encode_images(toy.vae, _images().to(dtype).float())
        reference = encode_images(toy.vae, _images())
    hook.remove()
    assert set(seen) == {torch.float32}
    assert torch.equal(reference.mean_BCHW, plain.mean_BCHW)
    assert torch.equal(reference.std_BCHW, plain.std_BCHW)
    assert cast.mean_BCHW.dtype == torch.float32


def test_statistics_are_unscaled_and_shaped(toy: SDXLModel) -> None:
    stats = encode_images(toy.vae, _images())
    assert stats.mean_BCHW.shape == stats.std_BCHW.shape == (2, 4, 8, 10)
    assert bool((stats.std_BCHW > 0).all())
    distribution = toy.vae.encode(_images()).latent_dist
    assert torch.equal(stats.mean_BCHW, distribution.mean)
    assert torch.equal(stats.std_BCHW, distribution.std)


def test_decoding_takes_scaled_latents(toy: SDXLModel) -> None:
    latents = encode_images(toy.vae, _images()).mean_BCHW * toy.vae_scale
    with torch.autocast("cpu", dtype=torch.bfloat16):
        images = decode_latents(toy.vae, latents, toy.vae_scale)
    expected = (toy.vae.decode(latents / toy.vae_scale).sample / 2 + 0.5).clamp(0, 1)
    assert torch.equal(images, expected)
    assert images.shape == (2, 3, 64, 80)
    assert float(images.min()) >= 0
    assert float(images.max()) <= 1


def test_non_finite_latents_stop_with_their_position(toy: SDXLModel) -> None:
    images = _images(3)
    images[1, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="for position 1 of the batch, in fp32") as caught:
        encode_images(toy.vae, images)
    assert caught.value.sample_ids == ("1",)
    with pytest.raises(NonFiniteError, match="no usable picture"):
        decode_latents(toy.vae, torch.full((1, 4, 8, 8), float("inf")), toy.vae_scale)


def test_weights_that_leave_fp16_still_work(toy: SDXLModel) -> None:
    """Case B01: middle-block convolutions times a million overflow in fp16 and not here."""
    model = load_sdxl("toy", dtype=torch.float16)
    assert model.vae.dtype == torch.float32
    middle = model.vae.encoder.mid_block
    assert middle is not None
    for block in middle.resnets:
        block.conv2.weight.mul_(1e6)
    with torch.autocast("cpu", dtype=torch.float16):
        stats = encode_images(model.vae, _images(1))
    assert bool(torch.isfinite(stats.mean_BCHW).all())
