"""Attention through torch's fused kernel: no further from the exact result than the reference is."""

from __future__ import annotations

import math

import pytest
import torch
from adapt_engine.kernels import reference, sdpa

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor, seen: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Written from the definition, in float64: [Tq, H, d]."""
    share = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.double().repeat_interleave(share, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), wide_k) / math.sqrt(q.shape[-1])
    hidden = seen[None] > at[:, None]
    if window is not None:
        hidden |= seen[None] <= at[:, None] - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), wide_v)


@pytest.mark.requirement(51, 54)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 70), (33, 33), (5, 70), (70, 70)])
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (4, 4), (5, 1)])
def test_it_is_as_exact_as_the_reference(
    dtype: torch.dtype,
    window: int | None,
    rows: int,
    keys: int,
    heads: int,
    groups: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(rows * keys + heads)
    q = torch.randn(rows, heads, 20).to(dtype)
    k, v = (torch.randn(keys, groups, 20).to(dtype) for _ in range(2))
    seen = torch.arange(keys)
    settings = {
        "q_positions": seen[keys - rows :],
        "k_positions": seen,
        "scale": 1 / math.sqrt(20),
        "window": window,
    }
    right = exact(q, k, v, seen[keys - rows :], seen, window)
    twin = (reference.attention(q, k, v, **settings).double() - right).square().mean().sqrt()
    floor = torch.finfo(dtype).eps / 4 * right.square().mean().sqrt()
    for block in (1 << 24, 4 * keys):  # in one piece, and four rows at a time
        monkeypatch.setattr(sdpa, "_MASK_BLOCK", block)
        found = sdpa.attention(q, k, v, **settings)
        assert found.dtype == dtype and found.shape == q.shape
        assert (found.double() - right).square().mean().sqrt() <= 2 * max(twin, floor)


@pytest.mark.parametrize("width", [20, 12])
def test_what_the_kernel_cannot_serve_goes_to_the_reference(width: int) -> None:
    q, k, v = torch.randn(3, 4, 20), torch.randn(3, 2, 20).bfloat16(), torch.randn(3, 2, width).bfloat16()
    seen = torch.arange(3)
    settings = {"q_positions": seen, "k_positions": seen, "scale": 0.2, "window": None}
    assert torch.equal(sdpa.attention(q, k, v, **settings), reference.attention(q, k, v, **settings))


def test_strict_mode_does_not_take_it() -> None:
    assert all(not offer.traits for offer in sdpa.offers())
