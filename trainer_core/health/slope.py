"""Is a gradient norm dying away? A robust slope with a confidence interval (docs/gradient_health.md, slope)."""

from __future__ import annotations

import numpy as np

_BLOCK = 10
_RESAMPLES = 200


def theil_sen(values: np.ndarray) -> float:
    """Median of the slopes between all pairs of points a unit apart in x (Theil 1950, Sen 1968)."""
    count = len(values)
    rows, columns = np.triu_indices(count, 1)
    return float(np.median((values[columns] - values[rows]) / (columns - rows)))


def slope_interval(values: np.ndarray, *, level: float = 0.95) -> tuple[float, float, float]:
    """(slope, low, high) of a series: Theil-Sen, and a moving-block bootstrap of its residuals, which are correlated.

    The resampling is seeded: the same series gives the same interval.
    """
    slope = theil_sen(values)
    x = np.arange(len(values), dtype=np.float64)
    line = np.median(values - slope * x) + slope * x
    residuals = values - line
    generator = np.random.Generator(np.random.Philox(key=0))
    blocks = -(-len(values) // _BLOCK)
    starts = generator.integers(0, len(values) - _BLOCK + 1, size=(_RESAMPLES, blocks))
    places = (starts[:, :, None] + np.arange(_BLOCK)).reshape(_RESAMPLES, -1)[:, : len(values)]
    slopes = np.sort([_pairs_slope(line + residuals[row]) for row in places])
    tail = (1 - level) / 2
    low, high = np.quantile(slopes, [tail, 1 - tail])
    return slope, float(low), float(high)


def _pairs_slope(values: np.ndarray) -> float:
    """A cheap Theil-Sen: each point against the one half the series later."""
    half = len(values) // 2
    return float(np.median((values[half : 2 * half] - values[:half]) / half))
