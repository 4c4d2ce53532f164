"""What the always-on safety costs: unscaling, norms, verdict, clipping, phases, health records, events.

`python benchmarks/safety_overhead.py` measures two things in CPU time of one thread (other programs on the machine
do not count):

* `toy`: a run on the built-in toy model. CPU time of a step outside forward, backward and the optimizer's update, as
  a share of those three.
* `real_size`: the same for a rank-16 LoRA on all 722 layers of a full-size SDXL UNet in fp32 at 256x256 with gradient
  checkpointing, batch 1, which is the smallest step that anybody trains: at 1024x1024 the same cost stands against 16
  times the work. The UNet's weights share one buffer, so that it fits a small machine; what is computed is the same.

fp32 on a CPU only: no GPU was measured. The last line is JSON: `{"toy", "real_size"}`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measure import RESULTS, store_result  # noqa: E402

LIMITS = {"toy": 0.05, "real_size": 0.01}


@dataclass
class Costs:
    """CPU seconds of single steps: all of it, forward with backward, and the optimizer's update."""

    whole: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)

    def share(self, skip: int) -> float:
        """Median of the rest of a step, as a share of the median of compute and update."""
        rows = list(zip(self.whole, self.compute, self.update, strict=True))[skip:]
        rest = sorted(whole - compute - update for whole, compute, update in rows)
        bare = sorted(compute + update for _, compute, update in rows)
        # The mean of the rest, not its median: slow records are taken in some steps only.
        return (sum(rest) / len(rest)) / bare[len(bare) // 2]


def timed(function: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        started = time.process_time()
        try:
            return function(*args, **options)
        finally:
            into.append(time.process_time() - started)

    return call


@contextmanager
def watched(costs: Costs) -> Iterator[None]:
    """Every trainer of this process notes what its steps cost."""
    from trainer_core.accumulation import Accumulation
    from trainer_core.trainer import Trainer

    run, step = Accumulation.run, Trainer.train_step

    def train_step(self: Any) -> bool:
        if not hasattr(self.parts.optimizer, "_timed"):
            self.parts.optimizer.step = timed(self.parts.optimizer.step, costs.update)
            self.parts.optimizer._timed = True
            costs.compute.clear()  # the memory probe before the first step
        return timed(step, costs.whole)(self)

    Accumulation.run = timed(run, costs.compute)  # type: ignore[method-assign]
    Trainer.train_step = train_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Accumulation.run, Trainer.train_step = run, step  # type: ignore[method-assign]


def measure_toy(steps: int, folder: Path) -> float:
    from PIL import Image

    from trainer_core.build import start_run
    from trainer_core.config import TrainConfig
    from trainer_core.toy.shapes import training_picture

    for index in range(4):
        picture = training_picture(7, index, (128, 128))
        (folder / "pictures").mkdir(exist_ok=True)
        Image.fromarray(picture.pixels_HWC).save(folder / "pictures" / f"{index}.png")
        (folder / "pictures" / f"{index}.txt").write_text(picture.caption, encoding="utf-8")
    config = TrainConfig()
    config = replace(
        config,
        model=replace(config.model, path="toy"),
        dataset=replace(config.dataset, path=str(folder / "pictures"), batch_size=4, workers=0),
        validation=replace(config.validation, enabled=False),
        run=replace(config.run, output_dir=str(folder / "out"), max_train_steps=steps, seed=1, device="cpu"),
    )
    costs = Costs()
    with watched(costs):
        result = start_run(config)
    if result.status != "finished":
        raise SystemExit(f"the toy run did not finish: {result.message}")
    return costs.share(skip=2)


def measure_real_size(steps: int, folder: Path) -> tuple[float, dict[str, float]]:
    """The UNet's forward and backward once, then the rest of `steps` guarded steps on its adapters."""
    import torch

    from trainer_core.config import LoraConfig, TrainConfig
    from trainer_core.events import EventBus
    from trainer_core.health.engine import HealthEngine
    from trainer_core.networks import create_network
    from trainer_core.optim import Precision, build_optimizer
    from trainer_core.step_work import StepWork
    from trainer_core.trainer import Trainer, TrainerParts

    model = shared_unet()
    network = create_network(model, LoraConfig(rank=16), trained_parts=["unet"], seed=0)
    model.unet.enable_gradient_checkpointing()
    compute = forward_backward(model)
    config = TrainConfig()
    optimizer = build_optimizer({"unet": network.parameters_of("unet")}, config.optimizer, network.rate_factors())
    precision = Precision(config.precision, "fp32", torch.device("cpu"), gradient=config.gradient, safety=config.safety)
    item = SimpleNamespace(file="0.png", bucket=(256, 256), caption="a", rules=SimpleNamespace(may_be_empty=False))
    plan = SimpleNamespace(items=[item], steps_per_epoch=lambda _: 1000)
    objective, loader = SimpleNamespace(config=config.objective), SimpleNamespace(texts=None)
    parts: Any = TrainerParts(
        model,
        network,
        optimizer,
        precision,
        objective,
        plan,
        loader,
        torch.device("cpu"),  # type: ignore[arg-type]
    )
    trainer = Trainer(
        parts, config, EventBus("benchmark"), total_steps=10**6, seed=0, should_stop=lambda: False,
        after_step=lambda step: None,
    )  # fmt: skip
    trainer.health = HealthEngine(trainer, folder=folder)
    trainer.state.step = trainer.state.applied = 300  # slow records are then taken every 50 steps
    ref: Any = SimpleNamespace(item_index=0, repeat=0, key="0:0")
    work = StepWork(0, ((ref,),), 1)
    costs = Costs()
    optimizer.step = timed(optimizer.step, costs.update)  # type: ignore[method-assign]
    gradients = [torch.randn_like(parameter) * 1e-6 for parameter in network.parameters_of("unet").values()]
    for _ in range(steps):
        for parameter, gradient in zip(network.parameters_of("unet").values(), gradients, strict=True):
            parameter.grad = gradient.clone()
        precision.losses.append(torch.ones(1))
        started = time.process_time()
        reading = precision.read(optimizer)
        trainer._decide(work, reading, precision.judge(optimizer, reading), time.perf_counter())
        costs.whole.append(time.process_time() - started)
        costs.compute.append(compute)
    costs.whole = [whole + compute for whole in costs.whole]
    update = sorted(costs.update)[len(costs.update) // 2]
    facts = {"compute_s": compute, "update_s": update, "tensors": float(len(gradients)), "steps": float(steps)}
    return costs.share(skip=1), facts


def shared_unet() -> Any:
    """A full-size SDXL UNet in fp32 whose weights are views of one buffer."""
    import torch

    from trainer_core.models import SDXLModel
    from trainer_core.models.configs import shipped_config
    from trainer_core.models.loading import builder
    from trainer_core.models.weights import build_on_meta

    configs: dict[str, Any] = {part: shipped_config("sdxl", part) for part in ("unet", "te1", "te2", "vae")}
    parts: dict[str, Any] = {part: build_on_meta(builder(part, config)) for part, config in configs.items()}
    unet = parts["unet"]
    buffer = torch.randn(30_000_000) * 0.02
    for name, parameter in list(unet.named_parameters()):
        owner = unet.get_submodule(name.rpartition(".")[0])
        values = buffer[: parameter.numel()].view(parameter.shape)
        if parameter.dim() == 1:
            values = torch.ones(parameter.shape) if name.endswith("weight") else torch.zeros(parameter.shape)
        owner._parameters[name.rpartition(".")[2]] = torch.nn.Parameter(values, requires_grad=False)
    return SDXLModel(
        unet=unet, text_encoders=(parts["te1"], parts["te2"]), vae=parts["vae"], tokenizers=(None, None),  # type: ignore[arg-type]
        prediction_type="epsilon", zero_terminal_snr=False, native_size=1024, fingerprint="", source=Path("none"),
        vae_scale=0.13025, vae_factor=8, dtype=torch.float32, configs=configs,
    )  # fmt: skip


def forward_backward(model: Any) -> float:
    """CPU seconds of one micro-batch of one 256x256 picture."""
    import torch

    started = time.process_time()
    predicted = model.denoise(
        torch.randn(1, 4, 32, 32),
        torch.tensor([500]),
        torch.randn(1, 77, 2048),
        torch.randn(1, 1280),
        torch.tensor([[256.0, 256.0, 0.0, 0.0, 256.0, 256.0]]),
    )
    predicted.square().mean().backward()
    seconds = time.process_time() - started
    for parameter in model.unet.parameters():
        parameter.grad = None
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few toy steps and no full-size UNet")
    parser.add_argument("--only", choices=tuple(LIMITS), help="measure one of the two; the other is the stored one")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    stored = RESULTS / "safety_overhead.json"
    found: dict[str, Any] = {"toy": None, "real_size": None}
    if arguments.only and stored.exists():
        found = {key: json.loads(stored.read_text(encoding="utf-8")).get(key) for key in (*LIMITS, "facts")}
    with tempfile.TemporaryDirectory(prefix="safe-scaler-overhead-") as name:
        if arguments.only != "real_size":
            found["toy"] = round(measure_toy(6 if arguments.smoke else 24, Path(name)), 4)
        if arguments.only != "toy" and not arguments.smoke:
            share, found["facts"] = measure_real_size(26, Path(name))
            found["real_size"] = round(share, 4)
    if not arguments.smoke:
        store_result("safety_overhead", {**found, "limits": LIMITS, "device": "cpu, fp32, one thread"})
    result = {key: found[key] for key in LIMITS}
    missed = [key for key, limit in LIMITS.items() if result[key] is not None and result[key] > limit]
    print(json.dumps(result))
    if missed and not arguments.smoke:
        sys.exit(f"above the limit of {LIMITS}: {', '.join(missed)}")


if __name__ == "__main__":
    main()
