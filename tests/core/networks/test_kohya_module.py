"""Foreign network modules: a small one of our own that behaves like sd-scripts', and LyCORIS from PyPI."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from network_cases import ALL_PARTS, outputs, unet_inputs
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

import trainer_core
from trainer_core.config import LoraConfig
from trainer_core.errors import AdapterError, ConfigError
from trainer_core.models import SDXLModel, encode_captions
from trainer_core.networks import create_network, export_lora, warm_start
from trainer_core.networks.foreign_imports import known_arguments
from trainer_core.networks.foreign_network import ForeignNetwork
from trainer_core.networks.kohya_module import class_state_restored
from trainer_core.networks.sgm_view import model_views

FIXTURES = Path(__file__).parents[2] / "fixtures"

# A network module with sd-scripts' contract and habits: target classes by name, a class list that grows in place,
# arguments as strings, printing while it works, and an isinstance check of the UNet.
FOREIGN = """
import torch
from torch import nn

class SdxlUNet2DConditionModel(nn.Module):
    def __init__(self):
        raise RuntimeError("must not be constructed")

class Adapter(nn.Module):
    def __init__(self, name, org, dim):
        super().__init__()
        self.lora_name, self.multiplier = name, 1.0
        if isinstance(org, nn.Conv2d):
            self.lora_down = nn.Conv2d(org.in_channels, dim, org.kernel_size, org.stride, org.padding, bias=False)
            self.lora_up = nn.Conv2d(dim, org.out_channels, 1, bias=False)
        else:
            self.lora_down = nn.Linear(org.in_features, dim, bias=False)
            self.lora_up = nn.Linear(dim, org.out_features, bias=False)
        nn.init.zeros_(self.lora_up.weight)
        self.register_buffer("alpha", torch.tensor(float(dim)))
        self.org = [org]
    def apply_to(self):
        self.org_forward = self.org[0].forward
        self.org[0].forward = self.forward
    def forward(self, x):
        return self.org_forward(x) + self.lora_up(self.lora_down(x)) * self.multiplier

class Net(nn.Module):
    TARGETS = ["Transformer2DModel"]
    def __init__(self, te, unet, dim, conv):
        super().__init__()
        if conv:
            Net.TARGETS += ["ResnetBlock2D", "Downsample2D", "Upsample2D"]
        def find(prefix, root, targets):
            found = []
            for name, module in root.named_modules():
                if module.__class__.__name__ in targets:
                    for child_name, child in module.named_modules():
                        if child.__class__.__name__ in ("Linear", "Conv2d"):
                            full = f"{prefix}.{name}.{child_name}".replace(".", "_")
                            found.append(Adapter(full, child, dim))
            return found
        text = ["CLIPAttention", "CLIPMLP"]
        self.text_encoder_loras = [a for i, t in enumerate(te) for a in find(f"lora_te{i + 1}", t, text)]
        self.unet_loras = find("lora_unet", unet, Net.TARGETS)
    def apply_to(self, te, unet, apply_text_encoder=True, apply_unet=True):
        for lora in self.text_encoder_loras + self.unet_loras:
            lora.apply_to()
            self.add_module(lora.lora_name, lora)

def create_network(multiplier, network_dim, network_alpha, vae, text_encoder, unet, neuron_dropout=None, **kwargs):
    assert isinstance(unet, SdxlUNet2DConditionModel)
    print("making a network")
    conv = kwargs.get("conv_dim", None)
    assert conv is None or isinstance(conv, str)
    if kwargs.get("explode"):
        raise ValueError("told to explode")
    return Net(text_encoder, unet, int(network_dim), conv is not None)
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "networks").mkdir()
    (tmp_path / "networks" / "pretend.py").write_text(FOREIGN, encoding="utf-8")
    monkeypatch.setenv("SD_SCRIPTS_PATH", str(tmp_path))
    for name in ("networks", "networks.pretend"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield "networks.pretend"
    for name in ("networks", "networks.pretend"):
        sys.modules.pop(name, None)


def one_step(model: SDXLModel, network: ForeignNetwork) -> None:
    text = encode_captions(model, ["a red square", "two"])
    noisy, timesteps, _, _, ids = unet_inputs(model)
    model.denoise(noisy, timesteps, text.context_BTD, text.pooled_BD, ids).square().mean().backward()
    torch.optim.SGD([p for _, p in network.named_parameters() if p.requires_grad], lr=0.5).step()


def make(model: SDXLModel, name: str, parts: tuple[str, ...] = ALL_PARTS, **settings: Any) -> ForeignNetwork:
    network = create_network(model, LoraConfig(rank=4, network=name, **settings), trained_parts=parts, seed=3)
    assert isinstance(network, ForeignNetwork)
    return network


@pytest.mark.parametrize(("conv", "fixture"), [(0, "linear"), (4, "conv")])
def test_views_of_real_sdxl_give_kohyas_names(foreign: str, conv: int, fixture: str) -> None:
    folder = Path(trainer_core.__file__).parent / "assets" / "sdxl"
    with torch.device("meta"):
        model: Any = SimpleNamespace(
            unet=UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(folder / "unet")),
            text_encoders=(
                CLIPTextModel(CLIPTextConfig.from_pretrained(folder / "text_encoder")),
                CLIPTextModelWithProjection(CLIPTextConfig.from_pretrained(folder / "text_encoder_2")),
            ),
        )
    unet, encoders = model_views(model)
    wanted = json.loads((FIXTURES / f"sdxl_lora_names_{fixture}.json").read_text(encoding="utf-8"))
    classes = {"Transformer2DModel"} | ({"ResnetBlock2D", "Downsample2D", "Upsample2D"} if conv else set())

    def names(prefix: str, root: torch.nn.Module, targets: set[str]) -> set[str]:
        return {
            f"{prefix}.{path}.{child}".replace(".", "_")
            for path, module in root.named_modules()
            if type(module).__name__ in targets
            for child, leaf in module.named_modules()
            if type(leaf).__name__ in ("Linear", "Conv2d")
        }

    assert names("lora_unet", unet, classes) == set(wanted["unet"])
    text = {"CLIPAttention", "CLIPMLP"}
    assert names("lora_te1", encoders[0], text) | names("lora_te2", encoders[1], text) == set(wanted["te"])


def test_a_foreign_network_trains_saves_and_is_proven(model: SDXLModel, foreign: str, tmp_path: Path) -> None:
    before = outputs(model)
    network = make(model, foreign, conv_rank=2)
    assert network.messages == (f"{foreign}: making a network",)
    assert network.parts == ("te1", "te2", "unet")
    assert torch.equal(outputs(model), before)
    one_step(model, network)
    changed = outputs(model)
    assert not torch.equal(changed, before)
    proof = export_lora(tmp_path / "a.safetensors", network, model, {}, dtype="bf16").proof
    assert proof.does_something
    assert torch.equal(outputs(model), changed)
    state = network.state_dict()
    network.detach()
    assert torch.equal(outputs(model), before)
    again = make(model, foreign, conv_rank=2)
    again.load_state_dict(state)
    assert torch.equal(outputs(model), changed)
    again.detach()
    third = make(model, foreign, conv_rank=2)
    assert "tensors of 'networks.pretend' taken over" in warm_start(third, tmp_path / "a.safetensors")
    third.detach()
    assert torch.equal(outputs(model), before)


def test_an_untrained_foreign_network_fails_its_proof(model: SDXLModel, foreign: str, tmp_path: Path) -> None:
    network = make(model, foreign)
    with pytest.raises(AdapterError, match="changes nothing"):
        export_lora(tmp_path / "a.safetensors", network, model, {})
    network.detach()


def test_class_state_does_not_leak_between_networks(model: SDXLModel, foreign: str) -> None:
    first = make(model, foreign, ("unet",), conv_rank=2)
    count = len(first.modules)
    first.detach()
    second = make(model, foreign, ("unet",))
    second.detach()
    assert count > len(second.modules) == 192
    assert set(second.parts) == {"unet"}


def test_only_the_trained_parts_are_kept(model: SDXLModel, foreign: str) -> None:
    before = outputs(model)
    network = make(model, foreign, ("te2",))
    assert network.parts == ("te2",)
    assert all(name.startswith("lora_te2_") for name in network.export_state_dict())
    network.detach()
    assert torch.equal(outputs(model), before)
    assert not any("forward" in module.__dict__ for root in model.parts.values() for module in root.modules())


def test_what_a_foreign_module_breaks_is_told_with_its_name(model: SDXLModel, foreign: str) -> None:
    with pytest.raises(AdapterError, match=r"networks\.pretend' broke .* ValueError: told to explode"):
        make(model, foreign, network_args=("explode=yes",))


def test_unknown_arguments_are_refused_with_the_nearest_name(model: SDXLModel, foreign: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(model, foreign, network_args=("conv_dm=4", "nonsense"))
    assert "it is not key=value" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        make(model, foreign, network_args=("conv_dm=4",))
    assert "Did you mean 'conv_dim'" in str(caught.value)


def test_settings_of_our_own_lora_are_refused(model: SDXLModel, foreign: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(model, foreign, preset="attention", init="pissa")
    assert {problem.field for problem in caught.value.problems} == {"lora.preset", "lora.init"}


def test_missing_modules_are_named(model: SDXLModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SD_SCRIPTS_PATH", raising=False)
    with pytest.raises(AdapterError, match="Set SD_SCRIPTS_PATH"):
        make(model, "networks.lora")
    monkeypatch.setenv("SD_SCRIPTS_PATH", str(tmp_path))
    with pytest.raises(AdapterError, match="there is no 'networks/lora.py'"):
        make(model, "networks.lora")
    with pytest.raises(AdapterError, match="cannot be imported"):
        make(model, "no_such_package.kohya")
    with pytest.raises(AdapterError, match="has no create_network"):
        make(model, "json")


lycoris = pytest.importorskip("lycoris.kohya", reason="lycoris-lora is not installed (extra 'lycoris')")

ALGORITHMS = {
    "lora": (),
    "loha": (),
    "lokr": ("factor=4",),
    "dylora": ("block_size=2",),
    "full": (),
    "diag-oft": (),
    "boft": (),
    "lora-dora": ("dora_wd=True",),
    "ia3": (),
    "glora": (),
}


IA3_PRESET = """
enable_conv = false
unet_target_module = []
unet_target_name = [".*to_k", ".*to_v", ".*ff.net.2"]
text_encoder_target_module = []
text_encoder_target_name = [".*k_proj", ".*v_proj", ".*mlp.fc2"]
"""


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_lycoris_trains_saves_and_is_proven(model: SDXLModel, tmp_path: Path, kind: str) -> None:
    arguments = (f"algo={kind.split('-dora')[0]}", *ALGORITHMS[kind])
    if kind == "ia3":
        # LyCORIS' own ia3 preset matches names from their beginning, so it finds nothing in any model.
        (tmp_path / "ia3.toml").write_text(IA3_PRESET, encoding="utf-8")
        arguments += (f"preset={tmp_path / 'ia3.toml'}",)
    parts = ("unet", "te2") if kind not in ("glora",) else ("unet",)
    before = outputs(model)
    network = make(model, "lycoris.kohya", parts, network_args=arguments)
    one_step(model, network)
    assert not torch.equal(outputs(model), before)
    proof = export_lora(tmp_path / "a.safetensors", network, model, {}).proof
    assert proof.probe_error <= 1e-5
    state, trained = network.state_dict(), outputs(model)
    network.detach()
    assert torch.equal(outputs(model), before)
    again = make(model, "lycoris.kohya", parts, network_args=arguments)
    again.load_state_dict(state)
    assert torch.equal(outputs(model), trained)
    again.detach()
    assert torch.equal(outputs(model), before)


def test_a_preset_that_matches_nothing_is_an_error(model: SDXLModel) -> None:
    with pytest.raises(AdapterError, match="made no adapters for unet, te2"):
        make(model, "lycoris.kohya", ("unet", "te2"), network_args=("algo=ia3", "preset=ia3"))


def test_lycoris_presets_do_not_leak(model: SDXLModel) -> None:
    make(model, "lycoris.kohya", ("unet",), network_args=("preset=attn-only",)).detach()
    network = make(model, "lycoris.kohya", ("unet",))
    network.detach()
    assert any("_in_layers_" in name for name in network.modules)
    assert {"algo", "preset", "conv_dim", "dora_wd"} <= known_arguments(lycoris)
    with class_state_restored(lycoris):
        lycoris.LycorisNetworkKohya.ENABLE_CONV = False
        lycoris.LycorisNetworkKohya.UNET_TARGET_REPLACE_MODULE.append("X")
    assert lycoris.LycorisNetworkKohya.ENABLE_CONV is True
    assert "X" not in lycoris.LycorisNetworkKohya.UNET_TARGET_REPLACE_MODULE
