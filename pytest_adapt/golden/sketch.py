"""Sketches of a row of logits: small enough to keep for every position, sharp enough to judge by."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

__all__ = ["PROJECTIONS", "TOP", "log_softmax", "positions_of", "project", "top_ids"]

TOP = 20
"""Most probable tokens kept of each row: what servers show at most."""
PROJECTIONS = 8
"""Random projections kept of each row; pooled over some hundred rows they measure a distance to a few percent."""
DENSE = 512
"""Every position below this one is kept."""
SPARSE = 256
"""Log-spaced positions kept beyond the dense ones."""


def positions_of(count: int, boundaries: Iterable[int] = ()) -> np.ndarray:
    """Recorded positions (int32, ascending) of a prompt of ``count`` tokens.

    All of the first 512; beyond, 256 log-spaced ones, the last one, and b-1, b, b+1 of every boundary b.
    """
    dense = np.arange(min(count, DENSE))
    if count <= DENSE:
        return dense.astype(np.int32)
    sparse = np.geomspace(DENSE, count - 1, SPARSE).astype(np.int64)
    around = [p for b in boundaries for p in (b - 1, b, b + 1) if DENSE <= p < count]
    chosen = np.concatenate([dense, sparse, np.array([count - 1, *around])])
    return np.unique(chosen).astype(np.int32)


def log_softmax(logits: np.ndarray, dtype: type[np.floating] = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """(log-probabilities [rows, V], log-sum-exp [rows]) computed in ``dtype``.

    float32 is what engines do to logits of any precision before they answer.
    """
    x = np.asarray(logits).astype(dtype)
    peak = x.max(axis=-1, keepdims=True)
    shifted = x - peak
    total = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted - total, (peak + total)[..., 0]


def top_ids(logits: np.ndarray, count: int = TOP) -> np.ndarray:
    """Ids (int32 [rows, k]) of the largest logits: value descending, then id ascending."""
    rows, vocab = logits.shape
    count = min(count, vocab)
    # Some spare candidates, so that ties at the border are resolved by id in all but absurd cases.
    spare = min(vocab, 2 * count)
    found = (
        np.argpartition(-logits, spare - 1, axis=1)[:, :spare]
        if spare < vocab
        else np.tile(np.arange(vocab), (rows, 1))
    )
    values = np.take_along_axis(logits, found, axis=1)
    order = np.lexsort((found, -values), axis=1)[:, :count]
    return np.take_along_axis(found, order, axis=1).astype(np.int32)


def project(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(projections [rows, 8], norm [rows]) of centred logits z = logits - mean, in float64.

    ``norm`` is the rms of z. Each projection is the sum of z with fixed random signs, divided by sqrt(V): the mean
    square of a projection of a difference is the mean square of the difference (Johnson and Lindenstrauss, with
    signs as in Achlioptas 2003).
    """
    z = np.asarray(logits, np.float64)
    z = z - z.mean(axis=-1, keepdims=True)
    vocab = z.shape[-1]
    return z @ _signs(vocab) / np.sqrt(vocab), np.sqrt(np.mean(z * z, axis=-1))


def _signs(vocab: int) -> np.ndarray:
    """Signs [V, 8], each from a hash of its index alone (splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = np.arange(1, vocab * PROJECTIONS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return np.where(x >> np.uint64(63), 1.0, -1.0).reshape(vocab, PROJECTIONS)
