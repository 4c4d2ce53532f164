"""Whether all processes train the same thing: a hash at the start, a fingerprint of the weights now and then."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import torch

from ..errors import ProcessError, WeightsDifferError
from .processes import Processes, ToldElsewhereError

EVERY = 50
"""Applied steps between fingerprints."""

_ODD = (0x9E3779B97F4A7C15 - 2**64, 0xC2B2AE3D27D4EB4F - 2**64)
"""Odd 64-bit constants (as signed numbers): the golden ratio's, and xxHash's second prime."""


def fingerprint(parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
    """128 bits over all bits of the tensors: two sums of their 32-bit words, each weighted by its place, modulo 2^64.

    A weight of an odd factor times an odd place-dependent number is never 0, so any single changed word is seen.
    """
    totals: dict[torch.device, torch.Tensor] = {}
    start = 0
    for parameter in parameters:
        words = parameter.detach().contiguous().reshape(-1).view(torch.int32).to(torch.int64)
        places = torch.arange(start, start + len(words), dtype=torch.int64, device=words.device) * 2 + 1
        sums = [(words * weight).sum() for weight in (places * _ODD[0], places * places * _ODD[1])]
        before = totals.get(words.device)
        totals[words.device] = torch.stack(sums) if before is None else before + torch.stack(sums)  # modulo 2^64
        start += len(words)
    read = [total.tolist() for total in totals.values()]  # one read a device, whatever the number of tensors
    return sum(first for first, _ in read) % 2**64, sum(second for _, second in read) % 2**64


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Every trained tensor in order: name, shape, type, whether it is trained, its group and rate."""
    lines: list[str] = []
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            about = (name, list(parameter.shape), str(parameter.dtype), parameter.requires_grad, group["label"])
            lines.append(json.dumps([*about, group.get("base_lr")]))
    return "\n".join(lines)


def check_start(processes: Processes, what: Mapping[str, str]) -> None:
    """All processes must have the same `what` (a name for each part, and its text or digest).

    Raises:
        ProcessError: naming the parts that differ, and where.
    """
    own = {name: digest(text) for name, text in what.items()}
    found = [json.loads(text) for text in processes.gather(json.dumps(own, sort_keys=True))]
    differing = {
        rank: [name for name in own if told.get(name) != found[0].get(name)]
        for rank, told in enumerate(found)
        if told != found[0]
    }
    if differing:
        lines = [f"process {rank}: {', '.join(names) or 'other parts'}" for rank, names in differing.items()]
        raise (ProcessError if processes.first else ToldElsewhereError)(
            "The processes of this run do not agree on what is trained. Compared with process 0 these differ:\n  - "
            + "\n  - ".join(lines)
            + "\nEvery process needs the same files, settings and library versions."
        )


def check_weights(processes: Processes, parameters: Iterable[torch.Tensor], step: int) -> None:
    """All processes must hold the same weights, bit for bit.

    Raises:
        WeightsDifferError: naming the processes that differ from process 0.
    """
    own = fingerprint(parameters)
    found = processes.gather(f"{own[0]:016x}{own[1]:016x}")
    other = [rank for rank, value in enumerate(found) if value != found[0]]
    if other:
        raise (WeightsDifferError if processes.first else ToldElsewhereError)(
            f"The weights of process{'es' if len(other) > 1 else ''} {', '.join(map(str, other))} are not those of "
            f"process 0 any more at step {step}: a gradient was not summed, or a device computes wrong. The run stops; "
            "resume from the last checkpoint."
        )
