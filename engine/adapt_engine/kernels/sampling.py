"""Draw the next token: greedy, or temperature / top-k / top-p with counter-based random numbers.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) keyed by the request's
seed and counted by position: a draw depends on nothing else, so neither batch nor order can change it.
"""

from __future__ import annotations

import torch

__all__ = ["philox4x32", "sample", "uniform"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
# Separates the draws of sampling from other uses of the same seed.
_PURPOSE = 1


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox on four 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(_MULTIPLIERS[0] * c0, 1 << 32)
        high1, low1 = divmod(_MULTIPLIERS[1] * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a function of (seed, position) alone."""
    key = (seed & _MASK, (seed >> 32) & _MASK)
    first, second, _, _ = philox4x32((position & _MASK, (position >> 32) & _MASK, _PURPOSE, 0), key)
    return ((first << 21) | (second >> 11)) / (1 << 53)


def sample(logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float, seed: int, position: int) -> int:
    """The next token id from float32 logits [V]; ties rank by lowest id.

    temperature 0 takes the largest logit. Otherwise: divide by temperature, keep the top_k largest (0: all),
    then the shortest prefix whose probability reaches top_p (1: all), and invert the distribution function.
    """
    if temperature == 0:
        return int((logits == logits.max()).nonzero()[0])
    ranked = logits.double().sort(descending=True, stable=True)
    kept = top_k if 0 < top_k < logits.shape[0] else logits.shape[0]
    probs = (ranked.values[:kept] / temperature).softmax(-1)
    total = probs.cumsum(-1)
    if top_p < 1:
        # Token i stays while the mass before it is short of top_p: the first one always does.
        kept = max(1, int((total - probs < top_p).sum()))
        total = total[:kept]
    target = uniform(seed, position) * float(total[-1])
    drawn = int(torch.searchsorted(total, target, right=True))
    return int(ranked.indices[min(drawn, kept - 1)])
