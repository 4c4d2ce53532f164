"""How many bytes does a training forward keep for the backward pass: frozen model, our LoRA, PEFT's LoRA?

Counted with saved-tensor hooks over one forward of SDXL's UNet (bf16 weights, autocast bf16, no checkpointing, rank 8):
every storage once, without the weights of model and adapters, which are there anyway. Hidden activations of rank size
are left out of `vs_frozen`. The numbers do not depend on the weights' values, on speed or on luck; so the forward runs
on torch's fake tensors, which go through the real operators' shapes and autograd without computing. `--real` computes
(the same counts, on any device).

The frozen model's input requires a gradient, so that it keeps everything its backward pass through all layers needs.
Last line: {"vs_frozen": (ours without rank-sized activations) / frozen, "vs_peft": ours / PEFT's}.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

from benchmarks.measure import store_result  # noqa: E402

# A rank that no other width of the model has, so that rank-sized activations can be told apart by their shape.
RANK = 11
SMOKE = {
    "block_out_channels": (64, 128, 256),
    "attention_head_dim": (1, 2, 4),
    "transformer_layers_per_block": (1, 2, 4),
}
# PEFT's suffixes for kohya's linear set (kohya.md 2.3).
SUFFIXES = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256, help="picture side in pixels")
    parser.add_argument("--device", default="cpu", help="with --real: where to compute")
    parser.add_argument("--real", action="store_true", help="compute instead of counting on fake tensors")
    parser.add_argument("--smoke", action="store_true", help="a narrow UNet with fewer layers")
    arguments = parser.parse_args()
    latent = (128 if arguments.smoke else arguments.size) // 8
    counts: dict[str, tuple[int, int]] = {}
    for name, wrap in (("frozen", plain), ("native", native), ("PEFT", peft_default)):
        if arguments.real:
            unet = wrap(make_unet(arguments.smoke, arguments.device))[0]
            counts[name] = saved_bytes(unet, latent)
        else:
            unet, adapters = wrap(meta_unet(arguments.smoke))
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            make_fake([unet, *adapters], mode)
            with mode:
                counts[name] = saved_bytes(unet, latent)
    (frozen, _), (native_bytes, native_rank), (peft_bytes, peft_rank) = counts.values()
    for name, (total, rank) in counts.items():
        print(f"{name:>7}: {total / 2**20:10.2f} MiB kept for backward, of these {rank / 2**20:.2f} MiB of rank size")
    summary = {
        "vs_frozen": round((native_bytes - native_rank) / frozen, 4),
        "vs_peft": round(native_bytes / peft_bytes, 4),
    }
    if not arguments.smoke:
        details = {"frozen": frozen, "native": native_bytes, "peft": peft_bytes, "rank_sized": native_rank}
        store_result("adapter_memory", {**summary, **details, "latent": latent, "real": arguments.real})
    print(json.dumps(summary))


def meta_unet(smoke: bool) -> Any:
    """SDXL's UNet in bf16 without memory for its weights, frozen."""
    from diffusers import UNet2DConditionModel

    config = dict(UNet2DConditionModel.load_config(ROOT / "trainer_core" / "assets" / "sdxl" / "unet"))
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config({**config, **(SMOKE if smoke else {})}).to(torch.bfloat16)
    return unet.requires_grad_(False).train()


def make_unet(smoke: bool, device: str) -> Any:
    """The same with zero weights in memory: what is kept does not depend on values."""
    unet = meta_unet(smoke).to_empty(device=device)
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter.zero_()
    return unet


def make_fake(roots: list[torch.nn.Module], mode: FakeTensorMode) -> None:
    """Turn meta weights into fake tensors that claim to lie on the CPU; shared weights stay shared."""
    made: dict[int, torch.Tensor] = {}
    for module in (module for root in roots for module in root.modules()):
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or isinstance(tensor, FakeTensor):
                    continue
                if id(tensor) not in made:
                    fake: torch.Tensor = FakeTensor(mode, tensor.detach().to("meta"), torch.device("cpu"))
                    if isinstance(tensor, torch.nn.Parameter):
                        fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = fake
                tensors[name] = made[id(tensor)]  # type: ignore[assignment]


def plain(unet: Any) -> tuple[Any, list[torch.nn.Module]]:
    return unet, []


def native(unet: Any) -> tuple[Any, list[torch.nn.Module]]:
    from trainer_core.config import LoraConfig
    from trainer_core.networks import create_network

    none = torch.nn.Module()
    model: Any = SimpleNamespace(unet=unet, text_encoders=(none, none))
    network = create_network(model, LoraConfig(rank=RANK), trained_parts=("unet",), seed=0)
    return unet, [network.container]


def peft_default(unet: Any) -> tuple[Any, list[torch.nn.Module]]:
    import peft

    return peft.get_peft_model(unet, peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=SUFFIXES)), []


def saved_bytes(unet: Any, latent: int) -> tuple[int, int]:
    """(bytes of all storages kept for backward without weights, those of rank size among them)."""
    device = next(unet.parameters()).device
    known = {id_of(parameter) for parameter in unet.parameters()}
    known |= {id_of(buffer) for buffer in unet.buffers()}
    known |= {id_of(p) for module in unet.modules() for p in own_adapter_weights(module)}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if id_of(tensor) not in known:
            kept[id_of(tensor)] = tensor
        return tensor

    config = (
        unet.config if hasattr(unet, "config") and hasattr(unet.config, "in_channels") else unet.base_model.model.config
    )
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    noisy = torch.zeros(1, config.in_channels, latent, latent, device=device, dtype=torch.bfloat16, requires_grad=True)
    context = torch.zeros(1, 77, config.cross_attention_dim, device=device, dtype=torch.bfloat16)
    conditions = {
        "text_embeds": torch.zeros(1, pooled, device=device, dtype=torch.bfloat16),
        "time_ids": torch.zeros(1, 6, device=device),
    }
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast(device.type, torch.bfloat16),
    ):
        output = unet(
            noisy, torch.tensor([500], device=device), encoder_hidden_states=context, added_cond_kwargs=conditions
        ).sample
    del output
    # Weights cast for the computation are rank-sized too: down (rank, in) and up (out, rank).
    rank_sized = sum(t.untyped_storage().nbytes() for t in kept.values() if RANK in t.shape)
    return sum(t.untyped_storage().nbytes() for t in kept.values()), rank_sized


def own_adapter_weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """Weights of our adapters: they sit behind `forward`, not among the model's children."""
    adapter = getattr(module.__dict__.get("forward"), "__self__", None)
    return list(adapter.parameters()) if isinstance(adapter, torch.nn.Module) and adapter is not module else []


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


if __name__ == "__main__":
    main()
