"""sd-scripts as judge (its own Python, through files) and as a source of networks (in this process)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from judge_cases import read_table
from network_cases import ALL_PARTS, outputs, unet_inputs
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

import trainer_core
from trainer_core.config import LoraConfig
from trainer_core.draws import Draws
from trainer_core.errors import AdapterError
from trainer_core.models import SDXLModel, encode_captions
from trainer_core.networks import create_network, export_lora, save_lora, warm_start
from trainer_core.networks.foreign_imports import known_arguments, missing_imports
from trainer_core.networks.foreign_network import ForeignNetwork
from trainer_core.networks.lora import LoraModule
from trainer_core.networks.targets import Target

CHECKOUT = Path(os.environ.get("SD_SCRIPTS_PATH", Path.home() / "sd-scripts"))
PYTHON = Path(os.environ.get("SD_SCRIPTS_PYTHON", Path.home() / "sd-scripts-venv" / "bin" / "python"))
CONFIGS = Path(trainer_core.__file__).parent / "assets" / "sdxl"

pytestmark = pytest.mark.skipif(
    not (CHECKOUT / "networks" / "lora.py").is_file(), reason=f"no sd-scripts at '{CHECKOUT}' (SD_SCRIPTS_PATH)"
)
needs_python = pytest.mark.skipif(
    not PYTHON.is_file(), reason=f"no Python of sd-scripts at '{PYTHON}' (SD_SCRIPTS_PYTHON)"
)


# -------------------------------------------------------------------------------------------- in its own environment


def judge(folder: Path, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    script = Path(__file__).with_name("sd_scripts_judge.py")
    done = subprocess.run(
        [str(PYTHON), str(script), str(CHECKOUT), str(folder / "jobs.json"), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=CHECKOUT,
        timeout=500,
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
    )
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"sd-scripts' Python lacks a module: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line[6:] for line in done.stdout.splitlines() if line.startswith("JUDGE ")]
    assert len(lines) == len(jobs)
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def real_sdxl() -> Any:
    """Real names and shapes, no weights but those of one block, whose adapters may look at them (DoRA, PiSSA)."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(CONFIGS / "unet"))
        encoders = (
            CLIPTextModel(CLIPTextConfig.from_pretrained(CONFIGS / "text_encoder")),
            CLIPTextModelWithProjection(CLIPTextConfig.from_pretrained(CONFIGS / "text_encoder_2")),
        )
    unet.get_submodule("down_blocks.1.attentions.0").to_empty(device="cpu")
    for parameter in unet.get_submodule("down_blocks.1.attentions.0").parameters():
        nn.init.normal_(parameter, std=0.02)
    return SimpleNamespace(unet=unet, text_encoders=encoders, vae=None)


EVERYTHING: tuple[str, ...] = ALL_PARTS
ONE_BLOCK = {"targets": ("* rank=0", "IN04 attention rank=2 alpha=1")}
KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "native LoRA, linear": (EVERYTHING, {}),
    "native LoRA, with convolutions": (EVERYTHING, {"conv_rank": 1}),
    "native, ranks by block": (EVERYTHING, {"targets": ("IN07-IN08 cross rank=3 alpha=1", "te1 rank=2")}),
    "native, PiSSA": (("unet",), {"init": "pissa", **ONE_BLOCK}),
    "native, rsLoRA": (("unet",), {"rs_lora": True, "rank": 2}),
    "peft:lora": (("unet",), {"network": "peft:lora", **ONE_BLOCK}),
    "peft:rslora": (("unet",), {"network": "peft:rslora", **ONE_BLOCK}),
    "peft:dora": (("unet",), {"network": "peft:dora", **ONE_BLOCK}),
    "peft:loha": (("unet",), {"network": "peft:loha", **ONE_BLOCK}),
    "peft:lokr": (("unet",), {"network": "peft:lokr", **ONE_BLOCK}),
    "peft:oft": (("unet",), {"network": "peft:oft", **ONE_BLOCK}),
}


def write_kind(sdxl: Any, path: Path, parts: tuple[str, ...], settings: dict[str, Any]) -> int:
    """A file of this kind with the names and shapes of real SDXL; returns the number of modules."""
    network = create_network(sdxl, LoraConfig(**{"rank": 1, "alpha": 1.0, **settings}), trained_parts=parts, seed=0)
    if isinstance(network, ForeignNetwork):
        state = network.export_state_dict()
    else:
        state = {
            f"{name}.{key}": value.detach() if value.device.type != "meta" else torch.ones(value.shape)
            for name, module in network.modules.items()
            for key, value in module.export_tensors().items()
        }
    network.detach()
    save_lora(path, state, {}, "fp32")
    return len(network.modules)


def verdict(found: dict[str, Any], modules: int) -> str:
    """The table's word for what the judge found."""
    if "error" in found:
        return "no"
    if found["missing"] or found["unexpected"] or found["modules"] != modules:
        return "no"
    return "yes"


def load_jobs(real_sdxl: Any, folder: Path) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """(modules by kind, jobs): a file of every kind for networks.lora; plain LoRA also for others of its form."""
    counts = {
        kind: write_kind(real_sdxl, folder / f"{i}.safetensors", *case) for i, (kind, case) in enumerate(KINDS.items())
    }
    common = {"job": "load", "module": "networks.lora", "configs": str(CONFIGS)}
    jobs = [{**common, "file": str(folder / f"{i}.safetensors")} for i in range(len(KINDS))]
    return counts, [*jobs, {**jobs[1], "module": "networks.lora_fa"}, {**jobs[4], "module": "networks.dylora"}]


@pytest.fixture(scope="module")
def judged(real_sdxl: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All questions in one start of sd-scripts' Python, which takes most of the time."""
    folder = tmp_path_factory.mktemp("judge")
    counts, loads = load_jobs(real_sdxl, folder)
    layers, ours = layer_jobs(folder)
    found = judge(folder, [*loads, *layers])
    return SimpleNamespace(
        folder=folder, counts=counts, loads=found[: len(loads)], layers=found[len(loads) :], ours=ours
    )


@needs_python
def test_sd_scripts_loads_every_kind_it_supports(judged: Any) -> None:
    counts, found = judged.counts, judged.loads
    verdicts = {
        kind: verdict(one, count) for (kind, count), one in zip(counts.items(), found[: len(KINDS)], strict=True)
    }
    print(json.dumps(verdicts))
    for kind, one, count in zip(counts, found[: len(KINDS)], counts.values(), strict=True):
        if kind.startswith("native") or kind in ("peft:lora", "peft:rslora"):
            assert one == {"modules": count, "missing": [], "unexpected": []}, (kind, one)
    assert counts["native LoRA, linear"] == 986
    assert counts["native LoRA, with convolutions"] == 1052
    assert verdict(found[-2], 1052) == "yes"
    assert verdict(found[-1], 722) == "yes"
    page = read_table()
    assert {kind: page[kind]["sd-scripts"].split()[0] for kind in verdicts} == verdicts


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(24, 40), (3, 7, 24)),
    "conv": (nn.Conv2d(8, 12, 3, padding=1), (2, 8, 9, 9)),
    "conv stride 2": (nn.Conv2d(8, 12, 3, stride=2, padding=1), (2, 8, 9, 9)),
    "conv 1x1": (nn.Conv2d(8, 12, 1), (2, 8, 9, 9)),
}


def layer_jobs(folder: Path) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """(jobs, our outputs and gradients) for the same layers, weights and inputs."""
    draws = Draws(17)
    jobs: list[dict[str, Any]] = []
    ours: dict[str, dict[str, Any]] = {}
    for i, (kind, (base, shape)) in enumerate(LAYERS.items()):
        target: Any = Target("unet", kind, "lora_unet_a", base)  # type: ignore[arg-type]
        module = LoraModule(target, 4, 3.0)
        for name, parameter in [*module.named_parameters(), *base.named_parameters()]:
            parameter.data.copy_(0.3 * draws.normal(0, name, kind, parameter.shape))
        x = draws.normal(0, "x", kind, shape).requires_grad_(True)
        base.requires_grad_(False)
        module.attach()
        output = base(x)
        pull = draws.normal(0, "pull", kind, output.shape)
        (output * pull).sum().backward()
        module.detach()
        down, up = module.lora_down.weight, module.lora_up.weight
        ours[kind] = {"output": output.detach(), "down": down.grad, "up": up.grad, "x": x.grad}
        given: dict[str, Any] = {"weight": base.weight, "bias": base.bias, "down": down, "up": up, "x": x, "pull": pull}
        given["alpha"] = torch.tensor(3.0)
        file = folder / f"layer{i}.safetensors"
        safetensors.torch.save_file({key: value.detach().clone() for key, value in given.items()}, file)
        strides = {"stride": getattr(base, "stride", 1), "padding": getattr(base, "padding", 0)}
        jobs.append({"job": "layer", "file": str(file), "result": f"theirs{i}.safetensors", **strides})
    return [*jobs, {"job": "first", "shape": [64, 640], "rank": 32, "alpha": 16.0, "result": "first.safetensors"}], ours


@needs_python
def test_our_layer_computes_what_sd_scripts_does(judged: Any) -> None:
    folder, found, ours = judged.folder, judged.layers, judged.ours
    for i, kind in enumerate(LAYERS):
        theirs = safetensors.torch.load_file(folder / f"theirs{i}.safetensors")
        assert (theirs["output"] - ours[kind]["output"]).abs().max() <= 5e-6, kind
        for key in ("down", "up", "x"):
            difference = (theirs[key] - ours[kind][key]).norm() / theirs[key].norm()
            assert difference <= 5e-5, (kind, key)
    # First weights: the same tensors, the same distribution, the same 0-dim float32 alpha.
    target = Target("unet", "a", "lora_unet_a", nn.Linear(640, 64))
    module = LoraModule(target, 32, 16.0)
    from trainer_core.networks.initial import keyed_down

    down = keyed_down(Draws(0), "lora_unet_a", module.lora_down.weight.shape)
    theirs = safetensors.torch.load_file(folder / "first.safetensors")
    assert found[-1]["keys"] == sorted(module.export_tensors())
    assert found[-1]["alpha_dtype"] == str(module.export_tensors()["alpha"].dtype)
    bound = 640**-0.5
    for weights in (theirs["lora_down.weight"], down):
        assert weights.abs().max() <= bound
        assert abs(float(weights.std()) / (bound / 3**0.5) - 1) < 0.02
    assert not theirs["lora_up.weight"].any()


# ------------------------------------------------------------------------------------------------- in this process


def installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """sd-scripts' modules, with stand-ins for libraries that it imports for pictures and that are missing here."""
    monkeypatch.setenv("SD_SCRIPTS_PATH", str(CHECKOUT))
    if not installed("torchvision"):
        module = types.ModuleType("torchvision")
        module.transforms = types.ModuleType("torchvision.transforms")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torchvision", module)
        monkeypatch.setitem(sys.modules, "torchvision.transforms", module.transforms)
    if not installed("cv2"):
        monkeypatch.setitem(sys.modules, "cv2", types.ModuleType("cv2"))
    if missing := missing_imports("networks.lora", str(CHECKOUT)):
        pytest.skip(f"sd-scripts needs {', '.join(missing)}")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("networks", "library"):
            del sys.modules[name]


def one_step(model: SDXLModel, network: ForeignNetwork) -> None:
    text = encode_captions(model, ["a red square", "two"])
    noisy, timesteps, _, _, ids = unet_inputs(model)
    model.denoise(noisy, timesteps, text.context_BTD, text.pooled_BD, ids).square().mean().backward()
    with torch.no_grad():
        for part in network.parts:
            for parameter in network.parameters_of(part).values():
                if parameter.grad is not None:
                    parameter -= 0.5 * parameter.grad


IN_PROCESS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "networks.lora": (ALL_PARTS, {"conv_rank": 2}),
    "networks.lora_fa": (ALL_PARTS, {}),
    "networks.dylora": (("unet",), {"network_args": ("unit=2",)}),
    "networks.oft": (("unet",), {"alpha": 0.5}),
}


@pytest.mark.parametrize("name", IN_PROCESS)
def test_sd_scripts_networks_train_save_and_are_proven(
    model: SDXLModel, checkout: None, tmp_path: Path, name: str
) -> None:
    parts, settings = IN_PROCESS[name]
    config = LoraConfig(**{"rank": 4, "network": name, **settings})
    before = outputs(model)
    network = create_network(model, config, trained_parts=parts, seed=3)
    assert isinstance(network, ForeignNetwork)
    assert set(network.parts) == set(parts)
    one_step(model, network)
    trained = outputs(model)
    assert not torch.equal(trained, before)
    assert export_lora(tmp_path / "a.safetensors", network, model, {}).proof.probe_error <= 1e-5
    if name == "networks.lora_fa":
        assert all("lora_up" in key for part in parts for key in network.parameters_of(part))
    network.detach()
    assert torch.equal(outputs(model), before)
    again = create_network(model, config, trained_parts=parts, seed=4)
    assert "taken over" in warm_start(again, tmp_path / "a.safetensors")
    assert torch.allclose(outputs(model), trained, atol=1e-6)
    again.detach()
    assert torch.equal(outputs(model), before)


def test_block_rates_and_loraplus_of_sd_scripts_have_an_effect(model: SDXLModel, checkout: None) -> None:
    arguments = ("down_lr_weight=1,1,1,1,0.5,1,1,1,1", "loraplus_lr_ratio=4")
    config = LoraConfig(rank=4, network="networks.lora", network_args=arguments)
    network = create_network(model, config, trained_parts=("unet",), seed=3)
    factors = network.rate_factors()
    network.detach()
    assert {value for key, value in factors.items() if "_input_blocks_4_" in key and "lora_down" in key} == {0.5}
    assert {value for key, value in factors.items() if "_input_blocks_4_" in key and "lora_up" in key} == {2.0}
    assert {value for key, value in factors.items() if "_input_blocks_5_" in key and "lora_up" in key} == {4.0}


def test_class_lists_of_sd_scripts_do_not_grow(model: SDXLModel, checkout: None) -> None:
    counts = []
    for conv in (0, 2, 0):
        config = LoraConfig(rank=4, network="networks.lora", conv_rank=conv)
        network = create_network(model, config, trained_parts=("unet",), seed=3)
        counts.append(len(network.modules))
        network.detach()
    assert counts[0] == counts[2] == 192 < counts[1]


def test_dylora_of_sd_scripts_cannot_name_text_encoders(model: SDXLModel, checkout: None) -> None:
    before = outputs(model)
    with pytest.raises(AdapterError, match=r"no name of SDXL there.*te1_rank = 0"):
        create_network(model, LoraConfig(rank=4, network="networks.dylora"), trained_parts=ALL_PARTS, seed=3)
    assert torch.equal(outputs(model), before)


def test_arguments_that_helpers_read_are_known(checkout: None) -> None:
    from trainer_core.networks.foreign_imports import import_network_module

    known = known_arguments(import_network_module("networks.lora"))
    assert {"conv_dim", "block_dims", "down_lr_weight", "block_lr_zero_threshold", "rank_dropout"} <= known


def test_everything_that_an_import_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("networks", "library"):
        (tmp_path / folder).mkdir()
    (tmp_path / "networks" / "mine.py").write_text(
        "import absent_one\nfrom library.own import thing\ndef f():\n    import absent_never\n", encoding="utf-8"
    )
    (tmp_path / "library" / "own.py").write_text("import torch\nfrom absent_two.sub import x\n", encoding="utf-8")
    assert missing_imports("networks.mine", str(tmp_path)) == ["absent_one", "absent_two"]
    monkeypatch.setenv("SD_SCRIPTS_PATH", str(tmp_path))
    from trainer_core.networks.foreign_imports import import_network_module

    with pytest.raises(AdapterError, match="Missing: absent_one, absent_two. Try: pip install absent_one absent_two"):
        import_network_module("networks.mine")
