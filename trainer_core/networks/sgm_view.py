"""Views of a model for foreign network modules: other names, the same layers.

Foreign modules find their targets by class name and make file names from module paths, so they are handed a tree whose
containers have the class names and child names of Stability's UNet (SGM), and whose leaves are the model's own layers.
Text encoders get back the `text_model` level that transformers >= 5.6 dropped from `CLIPTextModel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from .naming import unet_sgm_path

if TYPE_CHECKING:
    from ..models import SDXLModel

_CONTAINERS = {
    "resnets": "ResnetBlock2D",
    "attentions": "Transformer2DModel",
    "downsamplers": "Downsample2D",
    "upsamplers": "Upsample2D",
}
# Class names of sd-scripts' UNet inside a transformer; LyCORIS' presets look for them.
_INSIDE = {"attn1": "CrossAttention", "attn2": "CrossAttention", "ff": "FeedForward"}


def unet_view(unet: nn.Module, base_class: type[nn.Module] = nn.Module) -> nn.Module:
    """A tree with SGM names over the layers of diffusers' UNet.

    Args:
        unet: diffusers' UNet.
        base_class: a class that the foreign module checks for with `isinstance`; its constructor is not run.
    """
    view = _shell("SgmUNet", base_class)
    for path, module in unet.named_modules():
        name = unet_sgm_path(unet, path) if path else None
        if name is not None and _is_layer(module):
            _mount(view, name.split("."), module, _container_of(path))
    return view


def text_encoder_view(text_encoder: nn.Module) -> nn.Module:
    """A text encoder whose module paths begin with `text_model`."""
    if any(name == "text_model" for name, _ in text_encoder.named_children()):
        return text_encoder
    view = _shell("CLIPTextModel", nn.Module)
    view.add_module("text_model", text_encoder)
    return view


def model_views(model: SDXLModel, base_class: type[nn.Module] = nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """(UNet, text encoders) as a foreign kohya module expects them."""
    return unet_view(model.unet, base_class), [text_encoder_view(encoder) for encoder in model.text_encoders]


def _is_layer(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) and any(True for _ in module.parameters())


def _container_of(path: str) -> str | None:
    """Class name that the layer's block must have, None for a plain one."""
    return next((name for kind, name in _CONTAINERS.items() if f".{kind}." in path), None)


def _mount(view: nn.Module, names: list[str], layer: nn.Module, container: str | None) -> None:
    """Put `layer` at the end of `names`, making containers on the way. SGM blocks are `input_blocks.4.1`: the third
    level is the residual block, transformer or sampler that needs the class name."""
    level = 1 if names[0] == "middle_block" else 2
    for position, name in enumerate(names[:-1]):
        child = view._modules.get(name)
        if child is None:
            block = container if container and position == level else None
            child = _shell(block or _INSIDE.get(name, "ModuleList"), nn.Module)
            view.add_module(name, child)
        view = child
    view.add_module(names[-1], layer)


def _shell(class_name: str, base: type[nn.Module]) -> nn.Module:
    """An empty module of a class made at run time with the wanted name."""
    made = type(class_name, (base,), {"__init__": nn.Module.__init__})
    return made()
