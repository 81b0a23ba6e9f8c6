"""How a cost grows with length: the exponent of the power law that fits it, in one run and without absolute limits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["exponent"]

_GRID = np.arange(0.0, 4.001, 0.02)


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """c of the best fit a + b n^c with a, b >= 0, by least squares over c in 0 .. 4.

    ``lengths`` ascend. 0 where the values do not grow at all. Raises ValueError for fewer than three points.
    """
    if len(lengths) < 3 or len(lengths) != len(values):
        raise ValueError(f"{len(lengths)} lengths and {len(values)} values; a growth is fitted to three or more")
    n = np.asarray(lengths, np.float64) / lengths[-1]
    y = np.asarray(values, np.float64)
    if y[-1] <= y[0]:
        return 0.0
    residual, best = np.inf, 0.0
    for c in _GRID[1:]:
        power = n**c
        centred, target = power - power.mean(), y - y.mean()
        slope = max(0.0, float(centred @ target / (centred @ centred)))
        level = float(np.mean(y - slope * power))
        if level < 0:  # a cost has no negative part
            level, slope = 0.0, max(0.0, float(power @ y / (power @ power)))
        error = float(np.sum((y - level - slope * power) ** 2))
        if error < residual:
            residual, best = error, float(c)
    return best
