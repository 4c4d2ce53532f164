"""Stateless random draws: every number a run uses is a pure function of what it is for.

A draw is keyed by (seed, attempt, epoch, sample, purpose, index), so resume, previews, worker counts and micro-batch
splits cannot change it, and nothing depends on global random state. The generator is numpy's Philox-4x64 with a
128-bit key (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011); normals are float32 made on the
CPU. Golden vectors are in `tests/core/test_draws.py`: a change of the key layout is a change of every run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

_KEY_BYTES = 16
_FIELD_SEPARATOR = b"\x1f"


def sample_key(relative_path: str, content_hash: str, repeat: int = 0) -> str:
    """Identity of one sample of an epoch: which picture (by path and content) and which of its repeats.

    `relative_path` is the POSIX path inside the data set, so moving the folder changes no draw.
    """
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    digest.update(relative_path.encode("utf-8", "surrogateescape"))
    digest.update(_FIELD_SEPARATOR)
    digest.update(content_hash.encode("utf-8"))
    return f"{digest.hexdigest()}:{repeat}"


@dataclass(frozen=True)
class Draws:
    """All random draws of a run. `attempt` is raised by a rollback so that the same step draws anew."""

    seed: int
    attempt: int = 0

    def generator(self, epoch: int, sample: str, purpose: str, index: int = 0) -> np.random.Generator:
        """A fresh generator for this draw; two calls with the same arguments give the same stream."""
        fields = (str(self.seed), str(self.attempt), str(epoch), sample, purpose, str(index))
        digest = hashlib.blake2b(
            _FIELD_SEPARATOR.join(field.encode("utf-8", "surrogateescape") for field in fields),
            digest_size=_KEY_BYTES,
        )
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest.digest(), "little")))

    def normal(self, epoch: int, sample: str, purpose: str, shape: Sequence[int], index: int = 0) -> torch.Tensor:
        """Standard normal float32 tensor of `shape` on the CPU."""
        return _as_tensor(self.generator(epoch, sample, purpose, index).standard_normal(tuple(shape), np.float32))

    def uniform(self, epoch: int, sample: str, purpose: str, shape: Sequence[int] = (), index: int = 0) -> torch.Tensor:
        """Uniform float32 tensor of `shape` in [0, 1) on the CPU."""
        return _as_tensor(self.generator(epoch, sample, purpose, index).random(tuple(shape), np.float32))

    def integer(self, low: int, high_exclusive: int, epoch: int, sample: str, purpose: str, index: int = 0) -> int:
        """One integer in [low, high_exclusive)."""
        return int(self.generator(epoch, sample, purpose, index).integers(low, high_exclusive))

    def permutation(self, n: int, epoch: int, purpose: str = "order") -> np.ndarray:
        """A permutation of range(n) that depends on seed and epoch only, not on `attempt`.

        A rollback must not change which pictures an epoch holds, or some would be seen twice and others never.
        """
        return Draws(self.seed).generator(epoch, "", purpose).permutation(n)


def _as_tensor(array: np.ndarray | np.floating) -> torch.Tensor:
    import torch

    if not np.ndim(array):
        return torch.tensor(float(array))
    return torch.from_numpy(np.ascontiguousarray(array))  # pyright: ignore[reportUnknownMemberType] - untyped in torch
