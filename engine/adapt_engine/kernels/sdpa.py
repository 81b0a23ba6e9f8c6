"""Attention through torch's fused CPU kernel, where it computes the same function: several times the reference's speed.

torch's scaled_dot_product_attention keeps scores and softmax in float32 and rounds the weights once to the precision of
the values, which is less than the eager code of the model families rounds. It cuts keys into blocks by the number of
rows, so its bits depend on how a prompt was chunked: mode fast only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import reference
from .registry import Implementation

__all__ = ["offers"]

# Elements of one block's mask of visible keys: bounds memory over long contexts.
_MASK_BLOCK = 1 << 24


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """See `reference.attention`, which serves what the fused kernel cannot: values of another width than the keys, and
    queries of another dtype (multi-head latent attention)."""
    if q.dtype != k.dtype or k.shape[-1] != v.shape[-1] or not q.shape[0]:
        return reference.attention(
            q, k, v, q_positions=q_positions, k_positions=k_positions, scale=scale, window=window
        )
    rows, heads, width = q.shape
    keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    groups = keys.shape[1]
    out = torch.empty_like(q)
    step = max(1, _MASK_BLOCK // keys.shape[2])
    for start in range(0, rows, step):
        at = q_positions[start : start + step]
        begin, end = reference.reach(at, k_positions, window)
        part_k, part_v = keys[:, :, begin:end], values[:, :, begin:end]
        if at.shape[0] == 1:
            # All that is left is visible; the heads of a group are rows of one product.
            block = q[start].view(1, groups, heads // groups, width)
            out[start] = F.scaled_dot_product_attention(block, part_k, part_v, scale=scale).reshape(heads, width)
            continue
        seen = k_positions[None, begin:end]
        visible = seen <= at[:, None]
        if window is not None:
            visible &= seen > at[:, None] - window
        block = q[start : start + step].transpose(0, 1)[None]
        mixed = F.scaled_dot_product_attention(
            block, part_k, part_v, attn_mask=visible, scale=scale, enable_gqa=groups != heads
        )
        out[start : start + step] = mixed[0].transpose(0, 1)
    return out


def offers() -> list[Implementation]:
    """The op, for every precision, without the traits that mode strict requires."""
    every = frozenset({torch.float32, torch.bfloat16, torch.float16})
    return [Implementation("attention", "torch-sdpa", attention, every, priority=5)]
