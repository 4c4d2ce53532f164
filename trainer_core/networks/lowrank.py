"""The largest singular vectors of a matrix, by random projection (Halko, Martinsson, Tropp 2011, algorithm 4.4)."""

from __future__ import annotations

import torch

from ..draws import Draws

_EXACT_SIDE = 256
"""Up to this smaller side the full decomposition is as fast."""
_OVERSAMPLING = 16


def top_singular(
    matrix: torch.Tensor, rank: int, draws: Draws, name: str, iterations: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(U (m, k), S (k,), Vh (k, n)) for the k = min(rank, m, n) largest singular values of `matrix` (m, n), float32.

    The random projection is a draw keyed by `name`, so the result depends on nothing else.
    """
    matrix = matrix.float()
    kept = min(rank, *matrix.shape)
    if min(matrix.shape) <= max(_EXACT_SIDE, kept + _OVERSAMPLING):
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        return u[:, :kept], s[:kept], vh[:kept]
    probe = draws.normal(0, name, "low rank", (matrix.shape[1], kept + _OVERSAMPLING)).to(matrix.device)
    basis = torch.linalg.qr(matrix @ probe).Q
    for _ in range(iterations):
        basis = torch.linalg.qr(matrix.T @ basis).Q
        basis = torch.linalg.qr(matrix @ basis).Q
    u, s, vh = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return (basis @ u)[:, :kept], s[:kept], vh[:kept]
