"""Grouped-query attention (Ainslie et al. 2023), with optional per-head norms, biases and sliding window."""

from __future__ import annotations

import torch

from ..config import AttentionSpec
from ..model.step import Span, Step
from ..model.weights import Weights
from .spans import Read, attend_spans

__all__ = ["attend"]


def attend(step: Step, layer: int, spec: AttentionSpec, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """Output of the attention part for the packed rows x [T, h], before the residual connection: [T, h].

    ``spec`` and weights are this rank's: its query heads and the KV heads that they read.
    """
    ops, tap = step.ops, step.tap
    rows = x.shape[0]
    q = ops.linear(x, weights["attn.q.weight"], weights.get("attn.q.bias")).view(rows, spec.heads, spec.head_dim)
    k = ops.linear(x, weights["attn.k.weight"], weights.get("attn.k.bias")).view(rows, spec.kv_heads, spec.head_dim)
    v = ops.linear(x, weights["attn.v.weight"], weights.get("attn.v.bias")).view(rows, spec.kv_heads, spec.value_dim)
    if tap:
        tap("attn.q", q)
        tap("attn.k", k)
        tap("attn.v", v)
    if spec.qk_norm:
        q = ops.rms_norm(q, weights["attn.q_norm"], spec.norm_eps)
        k = ops.rms_norm(k, weights["attn.k_norm"], spec.norm_eps)
        if tap:
            tap("attn.q_norm", q)
            tap("attn.k_norm", k)
    cos, sin = step.rope(spec.rope)
    q = ops.rope_apply(q, cos, sin, spec.rope.interleaved)
    k = ops.rope_apply(k, cos, sin, spec.rope.interleaved)
    if tap:
        tap("attn.q_rope", q)
        tap("attn.k_rope", k)
    step.cache.write(layer, step.slots, (k, v))
    scale = ops.softmax_scale(spec)

    def one(
        span: Span, queries: torch.Tensor, positions: torch.Tensor, read: Read
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        (keys, values), seen = step.past(layer, span)
        return read(
            queries,
            keys,
            values,
            q_positions=positions,
            k_positions=seen,
            scale=scale,
            window=spec.window,
        )

    context = attend_spans(step, q, spec.value_dim, one)
    out = step.parallel.linear_rows(ops, context.flatten(1), weights["attn.out.weight"], weights.get("attn.out.bias"))
    if tap:
        tap("attn.context", context)
        tap("attn.out", out)
    return out
