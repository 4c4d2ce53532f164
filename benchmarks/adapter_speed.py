"""How long does a training step take with our LoRA, PEFT's, LyCORIS' and sd-scripts'?

SDXL's UNet with random weights, gradient checkpointing, 256x256, rank 8 on kohya's 722 linear layers, forward and
backward. In bf16 under autocast where the machine computes in bf16 itself; elsewhere (emulated, about a hundred times
slower than fp32: the base model's own time hides everything else) in fp32, and said in the result.
`--blocks N` runs two of the real-size transformers only, that of IN04 (width 640, 256 tokens, two layers) and that
of IN07 (width 1280, 64 tokens, N of its ten layers), for machines on which whole steps take minutes.
The kinds take turns, round by round, and the fastest step of each counts; with one thread the process's own processor
time is taken and not the wall clock, so that a busy machine disturbs little. The frozen model without adapters is timed
along: what is above it is the adapters'.
sd-scripts takes part when SD_SCRIPTS_PATH is set and its imports succeed; `--stand-ins` puts empty modules in the place
of libraries that it imports for pictures only.
Last line: {"vs_lycoris", "vs_peft", "vs_sd_scripts"}: our time divided by theirs; null where they did not take part.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import types
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
from trainer_core.models.cpu_convolution import has_native  # noqa: E402

RANK = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=256, help="picture side in pixels")
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp32"), default="auto")
    parser.add_argument("--blocks", type=int, default=0, help="two transformers only, the second with N layers")
    parser.add_argument("--smoke", action="store_true", help="a narrow UNet, one round: its ratios mean nothing")
    parser.add_argument("--stand-ins", action="store_true", help="empty torchvision and cv2 for sd-scripts' imports")
    arguments = parser.parse_args()
    dtype = chosen_dtype(arguments.dtype, arguments.device)
    if arguments.blocks:
        unet, step = two_transformers(arguments.blocks, dtype, arguments.device)
    else:
        unet = make_unet(arguments.smoke, arguments.device).to(dtype)
        fill_randomly(unet)
        step = make_step(unet, (128 if arguments.smoke else arguments.size) // 8, dtype)
    unet.requires_grad_(False)
    unet.enable_gradient_checkpointing()
    if arguments.stand_ins:
        put_stand_ins()
    kinds: dict[str, Callable[[Any], Any]] = {"native": native, "peft": peft_default, "lycoris": lycoris}
    if sd_scripts_problem() is None:
        kinds["sd_scripts"] = sd_scripts
    kinds["frozen"] = frozen
    seconds = measure(unet, step, kinds, 1 if arguments.smoke else arguments.rounds)
    for name, times in seconds.items():
        print(f"{name:>10}: {min(times):.3f} s a step ({', '.join(f'{t:.3f}' for t in times)})")
    best = {name: min(times) for name, times in seconds.items()}
    others = ("lycoris", "peft", "sd_scripts")
    summary = {f"vs_{name}": round(best["native"] / best[name], 3) if name in best else None for name in others}
    above = {name: round(value - best["frozen"], 3) for name, value in best.items() if name != "frozen"}
    shares = {
        f"adapters_vs_{name}": round(above["native"] / above[name], 3) if above.get(name, 0) > 0 else None
        for name in others
    }
    print(f"above the frozen model's {best['frozen']:.3f} s: {above}; our share of theirs: {shares}")
    facts = {
        "dtype": str(dtype).removeprefix("torch."),
        "computes_bf16_itself": has_native(torch.bfloat16) if arguments.device == "cpu" else True,
        "what": f"IN04 and {arguments.blocks} layers of IN07" if arguments.blocks else "whole UNet",
        "modules": modules_of(unet),
        "threads": torch.get_num_threads(),
        "clock": "processor time" if clock is time.process_time else "wall clock",
        "device": arguments.device,
        "size": arguments.size,
    }
    if not arguments.smoke:
        store_result("adapter_speed", {**summary, **shares, "above_frozen": above, "seconds": seconds, **facts})
    print(json.dumps(facts))
    print(json.dumps(summary))


clock: Callable[[], float] = time.perf_counter


def chosen_dtype(asked: str, device: str) -> torch.dtype:
    """bf16, or fp32 where the processor has no bf16 arithmetic. One thread on a CPU: count its own time only."""
    global clock
    if device == "cpu" and torch.get_num_threads() == 1:
        clock = time.process_time
    if asked == "auto":
        asked = "fp32" if device == "cpu" and not has_native(torch.bfloat16) else "bf16"
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[asked]


def two_transformers(layers: int, dtype: torch.dtype, device: str) -> tuple[Any, Callable[[], None]]:
    """(a UNet of real width of which only two transformers have weights, a step that runs these two)."""
    from diffusers import UNet2DConditionModel

    from trainer_core.models.configs import shipped_config

    config = dict(shipped_config("sdxl", "unet") or {})
    config["transformer_layers_per_block"] = [1, 2, layers]
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(config).to(dtype)
    sides = {"down_blocks.1.attentions.0": (640, 16), "down_blocks.2.attentions.0": (1280, 8)}
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for path, (width, side) in sides.items():
        unet.get_submodule(path).to_empty(device=device)
        fill_randomly(unet.get_submodule(path))
        inputs[path] = torch.randn(1, width, side, side, generator=generator).to(device, dtype)
    context = torch.randn(1, 77, 2048, generator=generator).to(device, dtype)

    def step() -> None:
        for path, x in inputs.items():
            transformer = unet.get_submodule(path)
            with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
                # In the whole UNet something trained lies before: the gradient goes on to the input.
                output = transformer(x.detach().requires_grad_(True), encoder_hidden_states=context).sample
            output.float().square().mean().backward()

    return unet, step


def modules_of(unet: Any) -> int:
    from trainer_core.networks import find_targets

    return sum(not target.module.weight.is_meta for target in find_targets(unet, "unet"))


def put_stand_ins() -> None:
    """After everything else is imported, so that nobody takes them for the real ones."""
    import diffusers
    import transformers

    assert diffusers.UNet2DConditionModel
    assert transformers.CLIPTextModel
    assert diffusers.EulerAncestralDiscreteScheduler
    for name in ("torchvision", "torchvision.transforms", "cv2"):
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
    sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]  # type: ignore[attr-defined]


@contextmanager
def frozen(unet: Any) -> Iterator[None]:
    """No adapters: forward and backward to the input, as the adapters' gradients need."""
    if unet.conv_in.weight.is_meta:
        yield
        return
    handle = unet.conv_in.register_forward_hook(lambda module, args, output: output.requires_grad_(True))
    try:
        yield
    finally:
        handle.remove()


def measure(
    unet: Any, step: Callable[[], None], kinds: dict[str, Callable[[Any], Any]], rounds: int
) -> dict[str, list[float]]:
    """Times of every kind, taking turns; the order turns round from one round to the next."""
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        names = list(kinds) if number % 2 else list(kinds)[::-1]
        for name in names:
            with kinds[name](unet):
                started = clock()
                step()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                # The first round warms caches and libraries up.
                if number > 0 or rounds == 1:
                    seconds[name].append(clock() - started)
    return seconds


def make_step(unet: Any, latent: int, dtype: torch.dtype) -> Callable[[], None]:
    config, device = unet.config, next(unet.parameters()).device
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    noisy, target = random(1, 4, latent, latent), random(1, 4, latent, latent)
    context, text = random(1, 77, config.cross_attention_dim), random(1, pooled)
    ids = torch.tensor([[256.0, 256.0, 0.0, 0.0, 256.0, 256.0]], device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
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
        if hasattr(unet, "peft_config"):
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
