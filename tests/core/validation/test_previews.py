from __future__ import annotations

import gc
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from trainer_core import models
from trainer_core.models import SDXLModel
from trainer_core.networks import LoraNetwork
from trainer_core.validation import PreviewPrompt, PreviewResult, encode_prompts, make_previews, undisturbed


def prompt(**changes: Any) -> PreviewPrompt:
    values: dict[str, Any] = {
        "text": "a red circle",
        "negative": "grey",
        "width": 64,
        "height": 64,
        "steps": 2,
        "guidance": 3.0,
        "seed": 3,
        "sampler": "euler_a",
    }
    return PreviewPrompt(**{**values, **changes})


def snapshot(model: SDXLModel, network: LoraNetwork) -> dict[str, Any]:
    """Everything that a preview must leave alone, bit for bit."""
    roots = {"unet": model.unet, "te1": model.text_encoders[0], "te2": model.text_encoders[1], "vae": model.vae}
    roots["network"] = network.container  # type: ignore[assignment]
    state: dict[str, Any] = {"multiplier": network.multiplier}
    for name, root in roots.items():
        state |= {f"{name} {key}": value.clone() for key, value in root.state_dict().items()}
        state |= {f"{name} {key} mode": module.training for key, module in root.named_modules()}
        for key, parameter in root.named_parameters():
            state[f"{name} {key} trained"] = parameter.requires_grad
            state[f"{name} {key} grad"] = None if parameter.grad is None else parameter.grad.clone()
    state["python"] = random.getstate()
    state["numpy"] = np.random.get_state()[1].tobytes()  # type: ignore[union-attr]
    state["torch"] = torch.get_rng_state()
    return state


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    different = [
        key
        for key, value in before.items()
        if not (torch.equal(value, after[key]) if isinstance(value, torch.Tensor) else value == after[key])
    ]
    assert different == []


@pytest.fixture
def busy(micro: SDXLModel, network: LoraNetwork) -> LoraNetwork:
    """A network in the middle of a step: gradients are there, the multiplier is odd, modules are in mixed modes."""
    for _, parameter in network.named_parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    network.set_multiplier(0.5)
    micro.unet.mid_block.train()  # type: ignore[union-attr]
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    return network


def test_previews_change_nothing(micro: SDXLModel, busy: LoraNetwork, tmp_path: Path) -> None:
    before = snapshot(micro, busy)
    results = make_previews(micro, busy, [prompt(), prompt(sampler="ddim")], step=250, folder=tmp_path)
    assert [result.failure for result in results] == [None, None]
    assert_same(before, snapshot(micro, busy))


class Boom(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Boom("in the decoder"), "failed; the training goes on. (Boom: in the decoder)"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "not enough memory"),
        (MemoryError(), "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"), "not enough memory"),
    ],
)
@pytest.mark.parametrize("place", ["decode", "unet", "text"])
def test_a_failing_preview_ends_nothing_and_changes_nothing(
    micro: SDXLModel,
    busy: LoraNetwork,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
    error: Exception,
    said: str,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        torch.rand(3)  # a library that draws before it fails
        busy.set_multiplier(9.0)
        micro.unet.train()
        raise error

    before = snapshot(micro, busy)
    places = {
        "decode": (models, "decode_latents"),
        "unet": (micro.unet, "forward"),
        "text": (models, "encode_captions"),
    }
    home, name = places[place]
    with monkeypatch.context() as patch:
        patch.setattr(home, name, fail)
        results = make_previews(micro, busy, [prompt(), prompt(seed=4)], step=2, folder=tmp_path)
    assert len(results) == 2
    for index, result in enumerate(results):
        assert result.file is None
        assert said in str(result.failure)
        assert f"preview {index + 1} at step 2" in str(result.failure)
    assert said in caplog.text
    assert list(tmp_path.iterdir()) == []
    assert_same(before, snapshot(micro, busy))
    assert make_previews(micro, busy, [prompt()], step=3, folder=tmp_path)[0].failure is None


def test_a_full_disk_is_a_failed_preview(micro: SDXLModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    result = make_previews(micro, None, [prompt()], step=2, folder=tmp_path)[0]
    assert "No space left" in str(result.failure)
    assert list(tmp_path.iterdir()) == []


def test_files_names_and_text(micro: SDXLModel, tmp_path: Path) -> None:
    folder = tmp_path / "previews"
    ready: list[PreviewResult] = []
    odd = prompt(text='a "red" circle, 猫 <b>', width=96, height=64)
    results = make_previews(micro, None, [prompt(), odd], step=250, folder=folder, on_ready=ready.append)
    assert results == ready
    assert [result.file and result.file.name for result in results] == ["step-00000250-00.png", "step-00000250-01.png"]
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000250-00.png", "step-00000250-01.png"]
    with Image.open(folder / "step-00000250-01.png") as picture:
        assert picture.size == (96, 64)
        text: dict[str, str] = picture.text  # type: ignore[attr-defined]
    told = json.loads(text["safe_scaler"])
    assert (told["text"], told["seed"], told["step"]) == (odd.text, 3, 250)
    assert text["parameters"].startswith(odd.text + "\nNegative prompt: grey\nSteps: 2, Sampler: euler_a")
    assert "Seed: 3" in text["parameters"]
    assert "prompt" not in text  # ComfyUI would take it for a graph


def test_the_network_is_seen(micro: SDXLModel, network: LoraNetwork, tmp_path: Path) -> None:
    def picture(step: int) -> bytes:
        (result,) = make_previews(micro, network, [prompt()], step=step, folder=tmp_path)
        assert result.file is not None
        return Image.open(result.file).tobytes()

    with_adapter = picture(1)
    assert picture(2) == with_adapter  # adapter dropout is off, and nothing is random
    network.set_multiplier(0.0)
    assert picture(3) != with_adapter


def test_no_second_unet_and_fp32_decode(
    micro: SDXLModel, busy: LoraNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import UNet2DConditionModel

    alive: list[int] = []
    types: list[torch.dtype] = []

    def note(module: Any, inputs: Any, output: torch.Tensor) -> None:
        types.append(output.dtype)
        alive.append(sum(isinstance(thing, UNet2DConditionModel) for thing in gc.get_objects()))

    gc.collect()
    count = sum(isinstance(thing, UNet2DConditionModel) for thing in gc.get_objects())
    handle = micro.vae.decoder.conv_in.register_forward_hook(note)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (result,) = make_previews(micro, busy, [prompt()], step=1, folder=tmp_path)
    finally:
        handle.remove()
    assert result.failure is None
    assert types == [torch.float32]
    assert alive == [count]


def test_stop_ends_the_list_early(micro: SDXLModel, tmp_path: Path) -> None:
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 4  # picture 1: once before it and before each of its 2 steps; picture 2: inside it

    results = make_previews(micro, None, [prompt()] * 3, step=1, folder=tmp_path, should_stop=stop)
    assert len(results) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001-00.png"]


def test_ready_embeddings_replace_the_text_encoders(
    micro: SDXLModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (live,) = make_previews(micro, None, [prompt()], step=1, folder=tmp_path)
    ready = [encode_prompts(micro, [prompt()])]
    monkeypatch.setattr(models, "encode_captions", lambda *_, **__: pytest.fail("the text encoders were used"))
    (cached,) = make_previews(micro, None, [prompt()], step=2, folder=tmp_path, conditioning=ready)
    assert live.file is not None
    assert cached.file is not None
    assert Image.open(live.file).tobytes() == Image.open(cached.file).tobytes()


def test_a_broken_listener_ends_nothing(micro: SDXLModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def listener(_: PreviewResult) -> None:
        raise Boom("listener")

    results = make_previews(micro, None, [prompt()], step=1, folder=tmp_path, on_ready=listener)
    assert results[0].failure is None
    assert "could not be passed on" in caplog.text


def test_a_picture_that_is_not_finite_is_a_failure(
    micro: SDXLModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(micro), "denoise", lambda self, noisy, *_: torch.full_like(noisy, float("nan")))
    (result,) = make_previews(micro, None, [prompt()], step=1, folder=tmp_path)
    assert "not finite" in str(result.failure)


def test_undisturbed_puts_a_replaced_gradient_back(micro: SDXLModel, busy: LoraNetwork) -> None:
    def spoil() -> None:
        with undisturbed(micro, busy):
            assert not torch.is_grad_enabled()
            for _, parameter in busy.named_parameters():
                parameter.grad = None
                parameter.requires_grad_(False)
            raise Boom

    before = snapshot(micro, busy)
    with pytest.raises(Boom):
        spoil()
    assert torch.is_grad_enabled()
    assert_same(before, snapshot(micro, busy))
