"""A block after which the run is exactly as before it, whatever happens inside."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from ..models import SDXLModel
    from ..networks import Network


@contextmanager
def undisturbed(model: SDXLModel, network: Network | None = None) -> Iterator[None]:
    """Evaluation mode without gradients inside; afterwards everything is put back, also after an exception.

    Put back: training mode of every module, `requires_grad` and the gradient of every parameter, the network's
    multiplier, and the global random state of Python, numpy and torch (which nothing here uses, but a library might).
    Weights are not copied: nothing inside may write to them, and without gradients nothing does.
    """
    roots: list[nn.Module] = [model.unet, *model.text_encoders, model.vae]
    if network is not None:
        roots.append(network.container)
    training = {module: module.training for root in roots for module in root.modules()}
    trained = {p: (p.requires_grad, p.grad) for root in roots for p in root.parameters()}
    multiplier = None if network is None else network.multiplier
    dice = _random_state()
    try:
        for root in roots:
            root.eval()
        with torch.no_grad():
            yield
    finally:
        _restore_random_state(dice)
        for module, mode in training.items():
            module.training = mode
        for parameter, (requires_grad, grad) in trained.items():
            parameter.requires_grad_(requires_grad)
            if parameter.grad is not grad:
                parameter.grad = grad
        if network is not None and multiplier is not None and network.multiplier != multiplier:
            network.set_multiplier(multiplier)


def _random_state() -> tuple[Any, Any, torch.Tensor, list[torch.Tensor]]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda  # noqa: NPY002 - the state to protect


def _restore_random_state(state: tuple[Any, Any, torch.Tensor, list[torch.Tensor]]) -> None:
    python, numpy, torch_cpu, cuda = state
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(torch_cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
