"""How long does a training step take with our LoRA, PEFT's, LyCORIS' and sd-scripts'?

SDXL's UNet with random weights in bf16, autocast bf16, gradient checkpointing, 256x256, rank 8 on kohya's 722 linear
layers, forward and backward. The kinds take turns, round by round, and the fastest step of each counts, so that a busy
machine disturbs all alike. sd-scripts takes part when SD_SCRIPTS_PATH is set and its imports succeed; else null.
Last line: {"vs_lycoris", "vs_peft", "vs_sd_scripts"}: our time divided by theirs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.adapter_memory import SUFFIXES, make_unet  # noqa: E402
from benchmarks.measure import store_result  # noqa: E402

RANK = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=256, help="picture side in pixels")
    parser.add_argument("--smoke", action="store_true", help="a narrow UNet, one round: its ratios mean nothing")
    arguments = parser.parse_args()
    unet = make_unet(arguments.smoke, arguments.device)
    fill_randomly(unet)
    unet.enable_gradient_checkpointing()
    step = make_step(unet, (128 if arguments.smoke else arguments.size) // 8)
    kinds: dict[str, Callable[[Any], Any]] = {"native": native, "peft": peft_default, "lycoris": lycoris}
    if sd_scripts_problem() is None:
        kinds["sd_scripts"] = sd_scripts
    seconds = measure(unet, step, kinds, 1 if arguments.smoke else arguments.rounds)
    for name, times in seconds.items():
        print(f"{name:>10}: {min(times):.3f} s a step ({', '.join(f'{t:.3f}' for t in times)})")
    summary = {
        f"vs_{name}": round(min(seconds["native"]) / min(seconds[name]), 3) if name in seconds else None
        for name in ("lycoris", "peft", "sd_scripts")
    }
    if not arguments.smoke:
        store_result("adapter_speed", {**summary, "seconds": seconds, "device": arguments.device})
    print(json.dumps(summary))


def measure(
    unet: Any, step: Callable[[], None], kinds: dict[str, Callable[[Any], Any]], rounds: int
) -> dict[str, list[float]]:
    """Times of every kind, taking turns; the order turns round from one round to the next."""
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        names = list(kinds) if number % 2 else list(kinds)[::-1]
        for name in names:
            with kinds[name](unet):
                started = time.perf_counter()
                step()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                # The first round warms caches and libraries up.
                if number > 0 or rounds == 1:
                    seconds[name].append(time.perf_counter() - started)
    return seconds


def make_step(unet: Any, latent: int) -> Callable[[], None]:
    config, device = unet.config, next(unet.parameters()).device
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    noisy, target = random(1, 4, latent, latent), random(1, 4, latent, latent)
    context, text = random(1, 77, config.cross_attention_dim), random(1, pooled)
    ids = torch.tensor([[256.0, 256.0, 0.0, 0.0, 256.0, 256.0]], device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            output = unet(
                noisy,
                torch.tensor([500], device=device),
                encoder_hidden_states=context,
                added_cond_kwargs={"text_embeds": text, "time_ids": ids},
            ).sample
        (output.float() - target.float()).square().mean().backward()

    return step


def fill_randomly(unet: Any) -> None:
    """Values of a common size from one block of normals; a real model's speed does not depend on them."""
    block = torch.randn(1 << 22, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in unet.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if parameter.numel() else 0.0)
                continue
            scale = parameter[0].numel() ** -0.5
            repeats = -(-parameter.numel() // block.numel())
            values = block.repeat(repeats)[: parameter.numel()].view(parameter.shape)
            parameter.copy_(values * scale)


def model_of(unet: Any) -> Any:
    none = torch.nn.Module()
    return SimpleNamespace(unet=unet, text_encoders=(none, none), vae=None)


@contextmanager
def native(unet: Any) -> Iterator[None]:
    from trainer_core.config import LoraConfig
    from trainer_core.networks import create_network

    network = create_network(model_of(unet), LoraConfig(rank=RANK), trained_parts=("unet",), seed=0)
    try:
        yield
    finally:
        network.detach()


@contextmanager
def peft_default(unet: Any) -> Iterator[None]:
    """PEFT in place, adapters in float32 as its own `get_peft_model` makes them."""
    import peft

    wrapped = peft.get_peft_model(unet, peft.LoraConfig(r=RANK, lora_alpha=RANK // 2, target_modules=SUFFIXES))
    try:
        yield
    finally:
        wrapped.unload()
        del unet.peft_config


@contextmanager
def lycoris(unet: Any) -> Iterator[None]:
    with foreign(unet, "lycoris.kohya", ("algo=lora", "preset=attn-mlp")):
        yield


@contextmanager
def sd_scripts(unet: Any) -> Iterator[None]:
    with foreign(unet, "networks.lora", ()):
        yield


@contextmanager
def foreign(unet: Any, name: str, arguments: tuple[str, ...]) -> Iterator[None]:
    from trainer_core.config import LoraConfig
    from trainer_core.networks import create_network

    config = LoraConfig(rank=RANK, network=name, network_args=arguments)
    network = create_network(model_of(unet), config, trained_parts=("unet",), seed=0)
    try:
        yield
    finally:
        network.detach()


def sd_scripts_problem() -> str | None:
    """Why sd-scripts' own LoRA cannot take part, None when it can."""
    from trainer_core.errors import TrainerError
    from trainer_core.networks.foreign_imports import import_network_module

    try:
        import_network_module("networks.lora")
    except TrainerError as error:
        print(f"sd-scripts does not take part: {error}")
        return str(error)
    return None


if __name__ == "__main__":
    main()
