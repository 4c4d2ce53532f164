"""LyCORIS' own loader as judge, in this process; and our own reader on the same files."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors.torch
from judge_cases import KINDS, KindFile, differences, outputs_of, read_table, verdict
from torch import nn

from trainer_core.networks import load_lora, network_from_file
from trainer_core.networks.foreign_network import base_parameters_of
from trainer_core.networks.kohya_module import class_state_restored
from trainer_core.networks.sgm_view import model_views

kohya = pytest.importorskip("lycoris.kohya", reason="lycoris-lora is not installed (extra 'lycoris')")


def with_weights(view: nn.Module) -> nn.Module:
    """The view's layers that have weights, under the same paths: LyCORIS makes adapters on all of a model before it
    looks at a file, which takes long on the whole SDXL."""
    small = nn.Module()
    for path, layer in view.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and not layer.weight.is_meta:
            *parents, last = path.split(".")
            place = small
            for name in parents:
                if name not in place._modules:
                    place.add_module(name, nn.Module())
                place = place.get_submodule(name)
            place.add_module(last, layer)
    return small


def judge(sdxl: Any, file: KindFile) -> str:
    """The verdict on a file: keys that LyCORIS has no place for, and the layers' outputs under its network."""
    state, before = safetensors.torch.load_file(file.path), base_parameters_of(sdxl)
    names = {key.partition(".")[0] for key in state}
    unread = [key for key in state if kohya.get_module(state, key.partition(".")[0])[0] is None]
    if unread:
        return verdict(unread, {}, file)
    unet, encoders = model_views(sdxl)
    small = with_weights(unet), [with_weights(encoder) for encoder in encoders]
    try:
        with class_state_restored(kohya):
            network, weights = kohya.create_network_from_weights(1.0, str(file.path), None, small[1], small[0])
            network.apply_to(small[1], small[0], True, True)
        network.eval()
        outputs = outputs_of(sdxl, tuple(file.outputs))
        # Loaded a second time only to hear which keys have no place: LyCORIS' "full" would add its difference twice.
        unread = network.load_state_dict(dict(weights), strict=False).unexpected_keys
    except TypeError as error:
        print(file.kind, error)
        return "no (LyCORIS' own loader breaks: TypeError)"
    finally:
        for module, parameters in before.items():
            for key in [key for key in module.__dict__ if key == "forward" or key.startswith("_lycoris_")]:
                del module.__dict__[key]
            module._parameters.update(parameters)
    assert {lora.lora_name for lora in network.loras} == names, file.kind
    print(file.kind, verdict(unread, outputs, file), max(differences(outputs, file.outputs).values()))
    return verdict(unread, outputs, file)


def test_lycoris_reads_every_kind_that_it_has_and_the_page_says_which(kind_files: Any) -> None:
    verdicts = {kind: judge(kind_files.sdxl, file) for kind, file in kind_files.files.items()}
    page, column = read_table(), "LyCORIS `create_network_from_weights`"
    assert {kind: page[kind][column].replace(" (`test_lycoris_judge.py`)", "") for kind in verdicts} == verdicts


PLAIN_LORA = [
    *(kind for kind in KINDS if kind.startswith("native")),
    *("peft:lora", "peft:rslora", "lycoris.kohya: locon", "lycoris.kohya: dylora"),
]


@pytest.mark.parametrize("kind", PLAIN_LORA)
def test_our_own_reader_computes_what_the_live_network_did(kind_files: Any, kind: str) -> None:
    file = kind_files.files[kind]
    network = network_from_file(kind_files.sdxl, load_lora(file.path))
    network.attach()
    try:
        outputs = outputs_of(kind_files.sdxl, tuple(file.outputs))
    finally:
        network.detach()
    assert len(network.modules) == file.modules
    assert max(differences(outputs, file.outputs).values()) <= 1e-5
    assert read_table()[kind]["our own reader"].startswith("yes")
