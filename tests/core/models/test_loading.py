"""Loading: both kinds of source give the same bits as diffusers, offline, from the memory map."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from trainer_core.errors import ModelFileError
from trainer_core.models import SDXLModel, inspect_model, load_sdxl, load_vae, save_single_file
from trainer_core.models.configs import SHIPPED
from trainer_core.models.fingerprint import part_fingerprint
from trainer_core.models.sources import CONFIG_KEY, find_source
from trainer_core.toy.micro import make_micro

State = dict[str, torch.Tensor]
VAE = "first_stage_model."
TE1 = "conditioner.embedders.0.transformer.text_model."
TE2 = "conditioner.embedders.1.model."


def states(model: SDXLModel) -> State:
    modules: dict[str, nn.Module] = {**model.parts, "vae": model.vae}
    return {f"{part}.{name}": value for part, module in modules.items() for name, value in module.state_dict().items()}


def assert_equal(first: State, second: State) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, different[:5]


def rewrite(source: Path, target: Path, change: Callable[[State], State], *, keep_configs: bool = True) -> Path:
    """Copy a single file with changed tensors, as another tool would have written it (configs in the header or not)."""
    with safe_open(source, framework="pt") as file:
        metadata = dict(file.metadata()) if keep_configs else {}
    save_file({name: value.contiguous() for name, value in change(load_file(source)).items()}, target, metadata or None)
    return target


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def test_folder_to_single_file_and_back_is_bit_equal(toy: SDXLModel, toy_file: Path, tmp_path: Path) -> None:
    assert_equal(states(toy), states(load_sdxl(toy_file)))
    exact = save_single_file(toy, tmp_path / "exact.safetensors", torch.float32)
    assert_equal(states(toy), states(load_sdxl(exact)))
    assert not list(tmp_path.glob("*.tmp"))


def test_folder_weights_equal_diffusers(toy: SDXLModel) -> None:
    from diffusers import AutoencoderKL, UNet2DConditionModel

    folder = str(SHIPPED["toy"])
    unet: Any = UNet2DConditionModel.from_pretrained(folder, subfolder="unet", local_files_only=True)
    vae: Any = AutoencoderKL.from_pretrained(folder, subfolder="vae", local_files_only=True)
    assert_equal(dict(toy.unet.state_dict()), {k: v.float() for k, v in unet.state_dict().items()})
    assert_equal(dict(toy.vae.state_dict()), {k: v.float() for k, v in vae.state_dict().items()})


@pytest.mark.filterwarnings("ignore")
def test_single_file_weights_equal_diffusers(toy_file: Path) -> None:
    """diffusers' own single-file reader is the oracle for every name, split and transposition."""
    from diffusers import StableDiffusionXLPipeline

    pipeline: Any = StableDiffusionXLPipeline.from_single_file(
        str(toy_file), config=str(SHIPPED["toy"]), local_files_only=True, torch_dtype=torch.float32
    )
    ours = load_sdxl(toy_file)
    for mine, theirs in (
        (ours.unet, pipeline.unet),
        (ours.text_encoders[0], pipeline.text_encoder),
        (ours.text_encoders[1], pipeline.text_encoder_2),
        (ours.vae, pipeline.vae),
    ):
        assert_equal(dict(mine.state_dict()), dict(theirs.state_dict()))


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(("stored", "dtype"), [(F16, F32), (F16, BF16), (BF16, BF16), (F32, F16)])
def test_any_stored_type_into_any_wanted_type(
    toy: SDXLModel, tmp_path: Path, dtype: torch.dtype, stored: torch.dtype
) -> None:
    path = save_single_file(toy, tmp_path / "m.safetensors", stored)
    model = load_sdxl(path, dtype=dtype)
    loaded = states(model)
    assert model.dtype == dtype
    for name, value in states(toy).items():
        wanted = torch.float32 if name.startswith("vae.") else dtype
        assert loaded[name].dtype == wanted, name
        assert torch.equal(loaded[name], value.to(stored).to(wanted)), name


def test_model_is_frozen_and_in_eval_mode(toy: SDXLModel) -> None:
    for module in (toy.unet, *toy.text_encoders, toy.vae):
        assert not module.training
        assert not any(parameter.requires_grad for parameter in module.parameters())
        assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc")
def test_same_type_is_the_memory_map_itself(toy_file: Path) -> None:
    model = load_sdxl(toy_file, dtype=torch.float16)
    spans = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if str(toy_file) in line:
            start, end = line.split()[0].split("-")
            spans.append((int(start, 16), int(end, 16)))
    assert spans
    copied = [
        name
        for name, value in states(model).items()
        if not name.startswith("vae.") and not any(start <= value.data_ptr() < end for start, end in spans)
    ]
    assert copied == ["te2.text_projection.weight"]  # transposed in the file


def test_writing_to_a_mapped_weight_never_reaches_the_file(toy: SDXLModel, tmp_path: Path) -> None:
    path = save_single_file(toy, tmp_path / "m.safetensors", torch.float16)
    before = path.read_bytes()
    model = load_sdxl(path, dtype=torch.float16)
    model.unet.conv_in.weight.add_(1)
    assert path.read_bytes() == before


def _with_position_ids(state: State) -> State:
    te1_projection = TE1.replace("text_model.", "text_projection.weight")  # some merging tools add it
    return {**state, f"{TE1}embeddings.position_ids": torch.arange(77).unsqueeze(0), te1_projection: torch.ones(2, 2)}


def _with_ema(state: State) -> State:
    ema = {"model_ema.diffusion_modelinput_blocks00weight": torch.ones(3), "model_ema.decay": torch.tensor(0.99)}
    return {**state, **ema}


def _with_schedule(state: State) -> State:
    names = ("denoiser.sigmas", "alphas_cumprod", "betas", "logvar", "sqrt_alphas_cumprod")
    return {**state, **{name: torch.ones(4) for name in names}, f"{TE2}logit_scale": torch.tensor(4.6)}


@pytest.mark.parametrize("change", [_with_position_ids, _with_ema, _with_schedule])
def test_extra_keys_of_real_checkpoints_change_nothing(
    toy: SDXLModel, toy_file: Path, tmp_path: Path, change: Callable[[State], State]
) -> None:
    model = load_sdxl(rewrite(toy_file, tmp_path / "m.safetensors", change))
    assert_equal(states(toy), states(model))
    assert not any("no place" in note for note in model.notes)


def test_keys_without_a_place_are_told(toy_file: Path, tmp_path: Path) -> None:
    path = rewrite(toy_file, tmp_path / "m.safetensors", lambda state: {**state, "strange.weight": torch.ones(2)})
    assert any("strange.weight" in note for note in load_sdxl(path).notes)


def test_missing_tensor_is_named_before_anything_is_read(toy_file: Path, tmp_path: Path) -> None:
    key = "model.diffusion_model.middle_block.1.proj_in.weight"
    path = rewrite(toy_file, tmp_path / "m.safetensors", lambda state: {k: v for k, v in state.items() if k != key})
    with pytest.raises(ModelFileError, match=r"1 tensors missing \(mid_block.attentions.0.proj_in.weight\)"):
        load_sdxl(path)


def test_tensor_of_another_size_is_named(toy_file: Path, tmp_path: Path) -> None:
    key = "model.diffusion_model.middle_block.1.proj_in.weight"
    path = rewrite(toy_file, tmp_path / "m.safetensors", lambda state: {**state, key: state[key][:-1]})
    with pytest.raises(ModelFileError, match=r"of another size \(mid_block.attentions.0.proj_in.weight \[95, 96\]"):
        load_sdxl(path)


def test_quantised_weights_are_refused(toy_file: Path, tmp_path: Path) -> None:
    key = "model.diffusion_model.middle_block.1.proj_in.weight"
    path = rewrite(toy_file, tmp_path / "m.safetensors", lambda state: {**state, key: state[key].to(torch.int8)})
    with pytest.raises(ModelFileError, match=r"I8 \(quantised\)"):
        load_sdxl(path)


def _without_vae(state: State) -> State:
    return {name: value for name, value in state.items() if not name.startswith(VAE)}


def test_file_without_vae_needs_one(toy: SDXLModel, toy_file: Path, tmp_path: Path) -> None:
    path = rewrite(toy_file, tmp_path / "m.safetensors", _without_vae)
    with pytest.raises(ModelFileError, match="holds no VAE.*model.vae"):
        load_sdxl(path)
    assert_equal(states(toy), states(load_sdxl(path, vae="toy")))


def _ldm(state: State) -> State:
    return {name.removeprefix(VAE): value for name, value in state.items() if name.startswith(VAE)}


def _other_vae(state: State) -> State:
    return {name: value * 2 if name.startswith(VAE) else value for name, value in state.items()}


@pytest.mark.parametrize(
    "form", ["ldm", "ldm_prefixed", "diffusers", "old_names", "vae_folder", "whole_folder", "whole_file"]
)
def test_vae_override_in_every_form(form: str, toy: SDXLModel, toy_file: Path, tmp_path: Path) -> None:
    base = rewrite(toy_file, tmp_path / "base.safetensors", _other_vae)
    path = tmp_path / "vae.safetensors"
    vae_state = {name: value.contiguous() for name, value in toy.vae.state_dict().items()}
    renames = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
    if form.startswith("ldm"):
        ldm = _ldm(load_file(toy_file))
        save_file({(VAE if form == "ldm_prefixed" else "") + name: value for name, value in ldm.items()}, path)
    elif form == "diffusers":
        save_file(vae_state, path)
    elif form == "old_names":
        old: State = {}
        for name, value in vae_state.items():
            for new_part, old_part in renames.items():
                name = name.replace(new_part, old_part)
            old[name] = value
        save_file(old, path)
    elif form == "whole_file":
        path = toy_file
    else:
        path = SHIPPED["toy"] / "vae" if form == "vae_folder" else SHIPPED["toy"]
    assert_equal(dict(toy.vae.state_dict()), dict(load_vae(path).state_dict()))
    if form == "ldm":
        model = load_sdxl(base, vae=path)
        assert_equal(dict(toy.vae.state_dict()), dict(model.vae.state_dict()))
        assert model.vae_scale == toy.vae_scale
        before = find_source(base).parts["vae"]
        assert model.fingerprints["vae"] != part_fingerprint(before)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [("scaling_factor", 0.18215, "Stable Diffusion 1.x"), ("latent_channels", 16, "16 latent channels")],
)
def test_vae_of_another_family_is_refused(key: str, value: float, what: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SHIPPED["toy"] / "vae", tmp_path / "vae"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, key: value}), encoding="utf-8")
    with pytest.raises(ModelFileError, match=what):
        load_sdxl("toy", vae=folder)


def test_a_lora_is_no_vae(tmp_path: Path) -> None:
    save_file({"lora_unet_x.lora_down.weight": torch.ones(1)}, tmp_path / "lora.safetensors")
    with pytest.raises(ModelFileError, match="model.vae: .* is a LoRA"):
        load_sdxl("toy", vae=tmp_path / "lora.safetensors")


@pytest.mark.parametrize("keep_configs", [True, False])
def test_single_file_configs_come_from_header_or_shapes(
    toy: SDXLModel, toy_file: Path, tmp_path: Path, keep_configs: bool
) -> None:
    """Without our metadata (another tool wrote the file) the packaged config that fits all shapes is used."""
    path = rewrite(toy_file, tmp_path / "m.safetensors", dict, keep_configs=keep_configs)
    with safe_open(path, framework="pt") as file:
        assert (CONFIG_KEY in (file.metadata() or {})) is keep_configs
    model = load_sdxl(path)
    assert model.unet.config["attention_head_dim"] == toy.unet.config["attention_head_dim"]
    assert (model.native_size, model.vae_scale, model.notes) == (64, toy.vae_scale, ())
    assert model.tokenizers[0]("a red square")["input_ids"] == toy.tokenizers[0]("a red square")["input_ids"]


def test_micro_toy_as_single_file(tmp_path: Path) -> None:
    """Sizes that nothing in the package has: from the header, by config_dir, or by SDXL's rules with a word."""
    folder = make_micro(tmp_path / "micro")
    micro = load_sdxl(folder)
    path = save_single_file(micro, tmp_path / "micro.safetensors", torch.float32)
    assert_equal(states(micro), states(load_sdxl(path)))
    foreign = rewrite(path, tmp_path / "foreign.safetensors", dict, keep_configs=False)
    given = load_sdxl(foreign, config_dir=folder)
    assert_equal(states(micro), states(given))
    assert given.native_size == micro.native_size
    assert given.unet.config["attention_head_dim"] == micro.unet.config["attention_head_dim"]
    guessed = load_sdxl(foreign)
    assert_equal(states(micro), states(guessed))
    assert any("attention heads" in note and "config_dir" in note for note in guessed.notes)


def test_config_dir_that_does_not_fit_is_refused(tmp_path: Path, toy_file: Path) -> None:
    with pytest.raises(ModelFileError, match="does not fit its config"):
        load_sdxl(toy_file, config_dir=SHIPPED["sdxl"])
    with pytest.raises(ModelFileError, match="is not a folder"):
        load_sdxl(toy_file, config_dir=tmp_path / "nowhere")


@pytest.mark.parametrize("prefixed", [True, False])
def test_folder_text_encoders_of_both_layouts(toy: SDXLModel, tmp_path: Path, prefixed: bool) -> None:
    """transformers >= 5.6 writes CLIPTextModel without `text_model.`, older versions with it."""
    folder = Path(shutil.copytree(SHIPPED["toy"], tmp_path / "toy"))
    for name in ("text_encoder", "text_encoder_2"):
        path = folder / name / "model.safetensors"
        bare = {key.removeprefix("text_model."): value for key, value in load_file(path).items()}
        state = {key if not prefixed or key.startswith("text_p") else f"text_model.{key}": v for key, v in bare.items()}
        ids = "text_model.embeddings.position_ids" if prefixed else "embeddings.position_ids"
        save_file({**state, ids: torch.arange(77).unsqueeze(0)}, path)
    assert_equal(states(toy), states(load_sdxl(folder)))


def test_sharded_and_fp16_variant_folders(toy: SDXLModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SHIPPED["toy"], tmp_path / "toy"))
    whole = folder / "unet" / "diffusion_pytorch_model.safetensors"
    state = load_file(whole)
    names = sorted(state)
    weight_map: dict[str, str] = {}
    for index, part in enumerate((names[::2], names[1::2])):
        shard = f"diffusion_pytorch_model-0000{index + 1}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, folder / "unet" / shard)
        weight_map.update(dict.fromkeys(part, shard))
    whole.unlink()
    index_file = folder / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    vae = folder / "vae" / "diffusion_pytorch_model.safetensors"
    vae.rename(vae.with_name("diffusion_pytorch_model.fp16.safetensors"))
    assert_equal(states(toy), states(load_sdxl(folder)))
    (folder / "unet" / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFileError, match="There is no file .*00002-of-00002"):
        load_sdxl(folder)


def _marked(*names: str) -> Callable[[State], State]:
    return lambda state: {**state, **{name: torch.zeros(()) for name in names}}


@pytest.mark.parametrize(
    ("names", "prediction", "ztsnr"),
    [((), "epsilon", False), (("v_pred",), "v", False), (("v_pred", "ztsnr"), "v", True)],
)
def test_marker_keys(names: tuple[str, ...], prediction: str, ztsnr: bool, toy_file: Path, tmp_path: Path) -> None:
    path = rewrite(toy_file, tmp_path / "m.safetensors", _marked(*names), keep_configs=False)
    info = inspect_model(path)
    assert (info.prediction_type, info.zero_terminal_snr) == (prediction, ztsnr)
    assert not any("no place" in note for note in info.notes)


def test_markers_yield_to_the_user_and_are_written_again(toy_file: Path, tmp_path: Path) -> None:
    path = rewrite(toy_file, tmp_path / "m.safetensors", _marked("v_pred", "ztsnr"), keep_configs=False)
    model = load_sdxl(path)
    assert (model.prediction_type, model.zero_terminal_snr) == ("v", True)
    again = inspect_model(save_single_file(model, tmp_path / "again.safetensors", torch.float16))
    assert (again.prediction_type, again.zero_terminal_snr) == ("v", True)
    forced = load_sdxl(path, prediction_type="epsilon", zero_terminal_snr=False)
    assert (forced.prediction_type, forced.zero_terminal_snr) == ("epsilon", False)


def test_scheduler_config_decides_for_folders(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SHIPPED["toy"], tmp_path / "toy"))
    path = folder / "scheduler" / "scheduler_config.json"
    config = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **config}), encoding="utf-8")
    info = inspect_model(folder)
    assert (info.prediction_type, info.zero_terminal_snr) == ("v", True)
    path.write_text(json.dumps({**config, "prediction_type": "sample"}), encoding="utf-8")
    with pytest.raises(ModelFileError, match="predicts 'sample'; supported are epsilon and v"):
        load_sdxl(folder)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="prediction_type must be"):
        load_sdxl("toy", prediction_type="x0")
    with pytest.raises(ValueError, match="zero_terminal_snr must be"):
        load_sdxl("toy", zero_terminal_snr="perhaps")


@pytest.mark.skipif(sys.platform == "win32", reason="a mapped file cannot be deleted there")
def test_model_outlives_its_deleted_file(toy: SDXLModel, tmp_path: Path) -> None:
    path = save_single_file(toy, tmp_path / "m.safetensors", torch.float16)
    model = load_sdxl(path, dtype=torch.float16)
    path.unlink()
    assert torch.equal(model.unet.conv_in.weight.float(), toy.unet.conv_in.weight)


def test_a_model_loaded_in_inference_mode_can_be_trained_through() -> None:
    with torch.inference_mode():
        model = load_sdxl("toy")
    assert not any(value.is_inference() for value in states(model).values())
